"""The model and data of the folders beside this file; they stay as they are, since the folders name them."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

WIDTH, TOKENS, CLASSES = 16, 5, 3


class Classifier(nn.Module):
    """One pre-norm block and a head on the mean token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y = self.norm_1(tokens)
        tokens = tokens + self.attention(y, y, y, need_weights=False)[0]
        tokens = tokens + self.mlp(self.norm_2(tokens))
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


def data(count: int = 48) -> Dataset:
    """Examples of all classes in turn."""
    return Tokens(count)


def examples(count: int) -> torch.Tensor:
    """The first inputs of the data, [count, TOKENS, WIDTH]."""
    return torch.stack([data()[i]["tokens"] for i in range(count)])
