"""A small vision transformer, and random images for it."""

import torch
from torch import nn


class Images(torch.utils.data.Dataset):
    """Random images with labels, 9 patches each, of which some are bright."""

    def __len__(self):
        return 128

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        bright = 1 + 2 * torch.rand(3, 3, generator=generator).repeat_interleave(4, 0).repeat_interleave(4, 1)
        return {"image": bright * torch.randn(3, 12, 12, generator=generator), "label": torch.tensor(index % 5)}


def small_vit():
    """A vision transformer of three layers of width 16 with a head that tells images apart."""
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    vit = VisionTransformer(
        image_size=12, patch_size=4, num_layers=3, num_heads=2, hidden_dim=16, mlp_dim=64, num_classes=5
    )
    nn.init.normal_(vit.heads.head.weight, std=0.5)
    return vit.eval()
