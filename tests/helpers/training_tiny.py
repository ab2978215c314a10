"""A tiny model with hand-made ACMs, its data and its task: what the training tests train."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from acm_compiler import tasks
from acm_compiler.passes.rewrite.conversion import Conversion
from acm_compiler.planning.cost import learner_unit, macs_per_learner
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.site import LinearRef
from tests.helpers.build import acm_for, plan_of, planned_site

WIDTH, TOKENS, CLASSES, N = 8, 5, 3, 4


class Block(nn.Module):
    """Mixes tokens, then runs a projection and an MLP beside bypasses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.proj: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.norm1(x + x.mean(1, keepdim=True)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Tiny(nn.Module):
    """[B, S, 6] -> logits [B, 3]; `depth` blocks, each run `calls` times."""

    def __init__(self, depth: int = 2, calls: int = 1) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.calls = calls
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(self.calls):
            for block in self.blocks:
                x = block(x)
        return self.head(x.mean(1))


def tiny_site(name: str, kind: str, *, calls: int = 1) -> PlannedSite:
    """The facts and decisions of one site of `Tiny`: an MLP with k_min 0 or a projection with k_min 1."""
    common = {"tokens": TOKENS, "calls": calls, "state": "dense"}
    if kind == "mlp":
        return planned_site(name, dense_width=16, width=4, **common)
    linear = {"kind": "linear", "dense_width": None, "last": None, "act": "identity", "learner_act": "identity"}
    linear |= {"first": (LinearRef(weight=f"{name}.weight", bias=f"{name}.bias"),)}
    return planned_site(name, **linear, width=2, k_min=1, **common)


def make_model(*, depth: int = 2, calls: int = 1, seed: int = 0) -> Tiny:
    """A rewritten `Tiny`, in eval mode; every site still answers by its dense region."""
    torch.manual_seed(seed)
    model = Tiny(depth, calls)
    sites = [tiny_site(f"blocks.{i}.{kind}", kind, calls=calls) for i in range(depth) for kind in ("proj", "mlp")]
    plan = plan_of(*sites)
    conversion = Conversion(plan=plan, teacher="tiny-teacher")
    for site in sites:
        parent, child = model.get_submodule(site.name.rpartition(".")[0]), site.name.rpartition(".")[2]
        acm = acm_for(site, cost=macs_per_learner(site) / learner_unit(plan.sites))
        acm.dense = getattr(parent, child).requires_grad_(False)
        acm.state, acm.conversion = "dense", conversion
        acm.set_choices(knob=0.0, k_lo=N, k_hi=N)
        setattr(parent, child, acm)
    return model.eval()


class Points(Dataset):
    """Examples {"x": [S, 6], "label": int}; the label is a function of x. `padded`: the mask leaves tokens out."""

    def __init__(self, count: int = 48, *, padded: bool = False) -> None:
        self.count, self.padded = count, padded

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(index))
        label = (x.sum() > 0).long() + (x[0, 0] > 0.5).long()
        real = TOKENS - index % 3 if self.padded else TOKENS
        return {"x": x, "label": label, "mask": torch.arange(TOKENS) < real}


def make_teacher(*, depth: int = 2, seed: int = 0) -> Tiny:
    """The original of `make_model`."""
    torch.manual_seed(seed)
    return Tiny(depth).requires_grad_(False)


class Task(tasks.Task):
    """Classifies `Points`."""

    answers_logits = True

    def answer(self, output: Tensor, mask: Tensor | None = None) -> Tensor:
        return output

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def mask(self, batch: dict[str, Tensor]) -> Tensor | None:
        return batch["mask"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["label"])
