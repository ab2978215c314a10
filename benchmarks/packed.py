"""One ACM for a packed qkv matrix, or three for q, k and v? The shipped digits ViT, built both ways, measured.

    python benchmarks/packed.py            a few minutes on one core; the table of docs/quality.md

Both variants hold the same trained weights and give the same answers. Their attention projections become ACMs, the
MLPs stay dense; the same pictures calibrate and judge both. Times are of forwards of 64 pictures, taken by turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.data.digits import as_input, canvases
from acm_compiler.recipe.schema import SiteRule
from acm_compiler.shipped.digits import trained

BUDGETS = (0.4, 0.5, 0.6, 0.75, 1.0)
BATCH, ROUNDS = 64, 15


class PackedAttention(nn.Module):
    """`nn.MultiheadAttention` as most ViTs have it: one linear for q, k and v."""

    def __init__(self, former: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = former.num_heads
        self.qkv = nn.Linear(former.embed_dim, 3 * former.embed_dim)
        self.qkv.weight, self.qkv.bias = former.in_proj_weight, former.in_proj_bias
        self.out_proj = former.out_proj

    def forward(self, x: Tensor, *_: Tensor, **__: Any) -> tuple[Tensor, None]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), None


def packed(model: nn.Module) -> nn.Module:
    """`model` with every attention packed, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(module, name, PackedAttention(child))
    return model.eval()


def pictures(split: Any, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    drawn = canvases(split, range(count), seed=seed)
    return as_input(drawn.image), drawn.label


def converted(model: nn.Module, form: Any, training: Tensor, tokens: int) -> nn.Module:
    """`model` with ACMs in its attention, calibrated."""
    rules = [SiteRule(match=("attn",), form=form)]
    copied = acm.rewrite(model, acm.plan(model, training[:2], sites=rules))
    acm.calibrate(copied, training.split(100), tokens=tokens, budgets=BUDGETS)
    return copied


@torch.no_grad()
def judged(model: nn.Module, x: Tensor, label: Tensor, dense: Tensor) -> list[list[Any]]:
    """Per budget: share reached, accuracy, and how many answers are the dense model's."""
    rows = []
    for budget in BUDGETS:
        acm.set_budget(model, budget)
        with acm.record(model) as usage:
            found = torch.cat([model(part) for part in x.split(200)]).argmax(-1)
        right, same = (found == label).float().mean(), (found == dense).float().mean()
        rows.append([budget, f"{usage.budget:.3f}", f"{right:.4f}", f"{same:.4f}"])
    return rows


@torch.no_grad()
def times(models: Sequence[nn.Module], x: Tensor) -> list[list[str]]:
    """Per budget, milliseconds of one forward of each model: the least of several, taken by turns."""
    rows = []
    for budget in BUDGETS:
        least = [float("inf")] * len(models)
        for model in models:
            acm.set_budget(model, budget)
            model(x)
        for _ in range(ROUNDS):
            for place, model in enumerate(models):
                start = time.thread_time()
                model(x)
                least[place] = min(least[place], 1e3 * (time.thread_time() - start))
        rows.append([f"{value:.1f}" for value in least])
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--judged", type=int, default=3600)
    options = parser.parse_args()
    torch.manual_seed(0)
    training, _ = pictures("train", 1200, 1)
    x, label = pictures("eval", options.judged, 2)
    with torch.no_grad():
        dense = torch.cat([trained()(part) for part in x.split(200)]).argmax(-1)
        assert (packed(trained())(x[:4]) - trained()(x[:4])).abs().max() < 1e-4
    variants = {
        "one ACM (svd)": converted(packed(trained()), "auto", training, options.tokens),
        "three ACMs, svd": converted(trained(), "svd", training, options.tokens),
        "three ACMs, auto": converted(trained(), "auto", training, options.tokens),
    }
    spent = times(list(variants.values()), x[:BATCH])
    rows = []
    for place, (name, model) in enumerate(variants.items()):
        for budget, row in zip(spent, judged(model, x, label, dense), strict=True):
            rows.append([name, *row, budget[place]])
    print(f"dense accuracy {(dense == label).float().mean():.4f}; {torch.get_num_threads()} threads")
    headers = ["variant", "budget", "reached", "accuracy", "as dense", f"ms CPU, batch {BATCH}"]
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
