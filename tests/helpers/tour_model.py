"""A two-block transformer and a data set, as a user's own module would offer them to recipes."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH, TOKENS, CLASSES = 32, 9, 4


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class Classifier(nn.Module):
    """Two blocks and a head on the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(tokens.mean(1))


def model() -> tuple[nn.Module, torch.Tensor]:
    """The classifier and one example of its input."""
    torch.manual_seed(1)
    return Classifier(), torch.zeros(1, TOKENS, WIDTH)


class Tokens(Dataset):
    """Noise around one direction per class."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.direction = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        noise = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(index))
        return {"tokens": noise + self.direction[index % CLASSES], "label": torch.tensor(index % CLASSES)}


class FewTokens(Tokens):
    """Examples of which the last one alone can be used."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor] | None:
        return super().__getitem__(index) if index == self.count - 1 else None


def few(count: int = 12) -> Dataset:
    """Examples that are left out, but for one."""
    return FewTokens(count)


def data(count: int = 96) -> Dataset:
    """Examples of all classes in turn."""
    return Tokens(count)


def pictures(broken: bool = False) -> nn.Module:
    """torchvision's vision transformer for 16 x 16 pictures of three classes; `broken`: not a number inside."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(1)
    size = {"image_size": 16, "patch_size": 8, "hidden_dim": WIDTH, "mlp_dim": 2 * WIDTH}
    vision = VisionTransformer(num_layers=1, num_heads=2, num_classes=3, **size)
    if broken:
        nn.init.constant_(vision.conv_proj.weight, float("nan"))
    return vision


def pictures_with_example() -> tuple[nn.Module, torch.Tensor]:
    """The same, and one example of its input."""
    return pictures(), torch.zeros(1, 3, 16, 16)


def failing() -> nn.Module:
    """A builder that does not work."""
    raise RuntimeError("nothing here")


class BrokenTokens(Tokens):
    """Examples that cannot be read."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise OSError("the disk is gone")


def broken_data() -> Dataset:
    """A data set whose examples cannot be read."""
    return BrokenTokens(8)
