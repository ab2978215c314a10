"""Shares of a converted model's time on a CPU: the ten costliest operations of one compiled call, in float32.

    python -m benchmarks.shares bert|vit|wav2vec2|decoder [--budget .4] [--calls 5]

Models have the sizes of MiniLM-L6 (8 texts of 128 tokens), ViT-B/16 (one image), wav2vec2-base (five seconds of sound)
and six layers of SmolLM2-135M (512 tokens at once), with drawn weights, MLPs and q, k, v, o converted. Gates are drawn
too, and pushed, site by site, until the mean k/N of their tokens is the budget. Times are those of torch's profiler, of
each operation without what it calls; the profiler itself costs some microseconds an operation.
"""

from __future__ import annotations

import argparse
import warnings

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import acm_compiler as acm
from acm_compiler.acm import ACM
from benchmarks.drawn import N, bias_to, converted, drawn
from benchmarks.machine import machine

MOST = 10


def main() -> None:
    """Profile the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("bert", "vit", "wav2vec2", "decoder"))
    parser.add_argument("--budget", type=float, default=0.4)
    parser.add_argument("--calls", type=int, default=5)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(machine())
    with torch.no_grad():
        dense, (x,) = drawn(chosen.model, batch=8 if chosen.model == "bert" else 1)
        model = converted(dense, (x,))
        acm.set_k(model, None)
        push_gates(model, x, chosen.budget)
        with acm.record(model) as usage:
            model(x)
        shares, total = time_of(torch.compile(model, backend="acm"), x, chosen.calls)
    rows = [[name, f"{ms:.2f}", f"{ms / total:.3f}", calls] for name, ms, calls in shares[:MOST]]
    rows.append(["all", f"{total:.2f}", "1.000", ""])
    print(tabulate(rows, headers=("operation", "ms", "share", "calls"), tablefmt="github", disable_numparse=True))
    k = [float(each.float().mean()) for each in usage.k.values()]
    print(f"\nmean k/N {sum(k) / len(k) / N:.2f}")


def push_gates(model: nn.Module, x: Tensor, budget: float) -> None:
    """Have each gate choose so that its tokens run the budget's share of learners, in one call of the model."""

    def push(site: ACM, args: tuple[Tensor, ...]) -> None:
        bias_to(site, args[0].flatten(0, -2), budget)

    hooks = [site.register_forward_pre_hook(push) for site in acm.sites(model).values()]
    model(x)
    for hook in hooks:
        hook.remove()


def time_of(model: nn.Module, x: Tensor, calls: int) -> tuple[list[tuple[str, float, int]], float]:
    """Milliseconds and number of calls of each operation in one call of the model, the costliest first; the sum."""
    model(x)
    model(x)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(calls):
            model(x)
    each = [(e.key[:48], e.self_cpu_time_total / 1e3 / calls, e.count // calls) for e in found.key_averages()]
    each.sort(key=lambda one: -one[1])
    return each, sum(ms for _, ms, _ in each)


if __name__ == "__main__":
    main()
