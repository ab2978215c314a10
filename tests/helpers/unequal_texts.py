"""A text model in float64, texts of unequal length and a task, for recipes of kind `python:`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

WORDS, WIDTH, LONGEST = 50, 16, 32
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention and an MLP, beside bypasses."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = self.norms[0](x)
        q, k, v = (part(z).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Text(nn.Module):
    """Token numbers [B, S] -> logits of the next ones [B, S, WORDS]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask.bool())
        return self.head(x)


def model() -> tuple[nn.Module, Batch]:
    """The model, and an example of its inputs."""
    torch.manual_seed(0)
    ones = torch.ones(2, 12, dtype=torch.long)
    return Text().double(), {"input_ids": ones, "attention_mask": ones}


class Texts(Dataset):
    """Arithmetic sequences of 4 to 32 numbers."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        length = int(torch.randint(4, LONGEST + 1, (), generator=generator))
        first, step = torch.randint(WORDS, (2,), generator=generator)
        return {"input_ids": (first + step * torch.arange(length)) % WORDS}

    def collate(self, examples: list[Batch]) -> Batch:
        """Examples padded to their longest."""
        rows = [example["input_ids"] for example in examples]
        ones = [torch.ones_like(row) for row in rows]
        return {
            "input_ids": pad_sequence(rows, batch_first=True),
            "attention_mask": pad_sequence(ones, batch_first=True),
        }


def data(count: int, seed: int = 0) -> Dataset:
    """The data set."""
    return Texts(count, seed)


class NextWord:
    """The mean cross entropy of all next tokens; longer texts count for more."""

    metric, lower_is_better, answers_logits = "loss", True, True

    def inputs(self, batch: Batch) -> Batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def mask(self, batch: Batch) -> Tensor:
        return batch["attention_mask"].bool()

    def loss(self, output: Tensor, batch: Batch) -> Tensor:
        return self.score(output, batch).sum() / self.counted(batch)

    def counted(self, batch: Batch) -> Tensor:
        return self.units(batch).sum()

    def score(self, output: Tensor, batch: Batch) -> Tensor:
        surprise = F.cross_entropy(output[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
        return (surprise * batch["attention_mask"][:, 1:]).sum(1)

    def units(self, batch: Batch) -> Tensor:
        return batch["attention_mask"][:, 1:].sum(1)

    def answer(self, output: Tensor, mask: Any = None) -> Tensor:
        return output


def task() -> NextWord:
    """The task."""
    return NextWord()
