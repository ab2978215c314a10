"""Time of learners that skip small values, for few tokens, against acm::learners and the dense MLP in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.skipped [--width 576] [--hidden 1536] [--sites 20] [--dtype float32]

SwiGLU MLPs with drawn weights, eight learners each; so many sites take turns, as the layers of a model do. Ratios are
medians of time over that of the dense MLP; GB/s counts the weights of the values that are not skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from acm_compiler.acm import ops, sparse
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import hidden
from acm_compiler.evaluation.bench import interleave
from benchmarks.machine import machine

N, CHOICES, SHARES = 8, (4, 6, 8), (0.0, 0.3, 0.5, 0.7)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=11)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    dtype = getattr(torch, chosen.dtype)
    sites = [drawn(chosen.width, chosen.hidden, dtype) for _ in range(chosen.sites)]
    x = torch.randn(chosen.tokens, chosen.width).to(dtype)
    with torch.no_grad():
        found = interleave(contenders(x, sites), base="dense", rounds=chosen.rounds)
    print(machine())
    print(f"dense: {found['dense'].time_ms / chosen.sites * 1e3:.0f} us a site\n")
    size = 3 * chosen.width * chosen.hidden * dtype.itemsize * chosen.sites
    rows = []
    for k in CHOICES:
        ratios = [found[f"{name} {k}"].ratio for name in ("learners", *SHARES)]
        rates = [size * k / N * (1 - share) / found[f"{share} {k}"].time_ms / 1e6 for share in SHARES]
        rows.append([f"{k / N:g}", *(f"{r:.2f}" for r in ratios), ", ".join(f"{rate:.1f}" for rate in rates)])
    headings = ("k/N", "acm::learners", *(f"{share:g} skipped" for share in SHARES), "GB/s")
    print(tabulate(rows, headers=headings, tablefmt="github", disable_numparse=True))


def drawn(width: int, hidden_width: int, dtype: torch.dtype) -> Weights:
    """Learners of a SwiGLU of these widths."""
    shape = N, hidden_width // N, width
    w_in, w_up = (torch.randn(shape).mul_(width**-0.5).to(dtype) for _ in range(2))
    w_out = torch.randn(width, *shape[:2]).mul_(hidden_width**-0.5).to(dtype)
    b_out = torch.zeros(N + 1, width, dtype=dtype)
    return Weights(w_in, None, w_up, None, w_out, b_out, None, act="silu", form="gated")


def thresholds_of(x: Tensor, weights: Weights, share: float) -> sparse.Thresholds:
    """Sizes that skip this share of the inputs and of the hidden values."""

    def quantile(values: Tensor) -> Tensor:
        return values.float().abs().flatten().quantile(share) if share else torch.tensor(0.0)

    inputs = quantile(x).repeat(x.shape[1])
    h = hidden(sparse.cut(x, inputs), weights, N)
    return sparse.Thresholds(inputs, quantile(h).expand(weights.w_in.shape[:2]).contiguous())


def contenders(x: Tensor, sites: list[Weights]) -> dict[str, Callable[[], object]]:
    """Calls of all sites in turn: dense, `acm::learners` and `acm::sparse_learners` at each k."""

    def dense(w: Weights) -> Tensor:
        assert w.w_up is not None and w.w_out is not None
        h = F.silu(F.linear(x, w.w_in.flatten(0, 1))) * F.linear(x, w.w_up.flatten(0, 1))
        return F.linear(h, w.w_out.flatten(1))

    calls: dict[str, Callable[[], object]] = {"dense": lambda: [dense(w) for w in sites]}
    for k in CHOICES:
        k_T = torch.full((len(x),), k, dtype=torch.int32)
        calls[f"learners {k}"] = lambda k_T=k_T: [ops.learners(x, k_T, w) for w in sites]
        for share in SHARES:
            least = [thresholds_of(x, w, share) for w in sites]
            calls[f"{share} {k}"] = lambda k_T=k_T, least=least: [
                sparse.sparse_learners(x, k_T, w, cut) for w, cut in zip(sites, least, strict=True)
            ]
    return calls


if __name__ == "__main__":
    main()
