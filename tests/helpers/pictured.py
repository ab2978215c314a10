"""A small model of text with images, whose patches come packed into one axis, and batches of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PATCH, WIDTH, IMAGE = 6, 8, 1


class Pictured(nn.Module):
    """Every image attends to itself, every text to what is no padding; patches take the places of `IMAGE`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.patch = nn.Embedding(20, WIDTH), nn.Linear(PATCH, WIDTH)
        self.see = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"})
        self.read = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"})
        self.tower = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.text = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, patches: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        images = self.patch(patches)
        q, k, v = (self.see[name](images).split(sizes.tolist()) for name in "qkv")
        attended = [
            nn.functional.scaled_dot_product_attention(*(t[None] for t in one))[0] for one in zip(q, k, v, strict=True)
        ]
        images = images + self.see["o"](torch.cat(attended))
        images = images + self.tower(images)
        x = self.embed(input_ids).masked_scatter((input_ids == IMAGE)[..., None], images)
        q, k, v = (self.read[name](x) for name in "qkv")
        real = attention_mask.bool()[:, None]
        x = x + self.read["o"](nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=real))
        x = x + self.text(x)
        return {"logits": self.head(x)}


def pictured_batch(examples: Sequence[Sequence[int]], *, seed: int = 0) -> dict[str, Tensor]:
    """Texts with images of so many patches each: as many words as its patches and two, padded on the right."""
    torch.manual_seed(seed)
    rows = [torch.tensor([IMAGE] * sum(sizes) + [5] * (2 + len(sizes))) for sizes in examples]
    sizes = torch.tensor([size for example in examples for size in example])
    return {
        "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "patches": torch.randn(int(sizes.sum()), PATCH),
        "sizes": sizes,
    }


def one_by_one(batch: dict[str, Tensor], examples: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
    """The examples of that batch, each by itself and without padding."""
    parts = batch["patches"].split([sum(sizes) for sizes in examples])
    reals = batch["attention_mask"].bool()
    return [
        {
            "input_ids": ids[real][None],
            "attention_mask": real[real][None].long(),
            "patches": patches,
            "sizes": torch.tensor(sizes),
        }
        for ids, real, patches, sizes in zip(batch["input_ids"], reals, parts, examples, strict=True)
    ]
