"""Shares of a converted model's time on a CPU: the ten costliest operations of one compiled call, in float32.

    python benchmarks/shares.py minilm|vit|wav2vec2|decoder [--budget .4] [--calls 5]

Models have the sizes of MiniLM-L6 (8 texts of 128 tokens), ViT-B/16 (one image), wav2vec2-base (five seconds of sound)
and six layers of SmolLM2-135M (512 tokens at once), with drawn weights, MLPs and q, k, v, o converted. Gates are drawn
too, and pushed, site by site, until the mean k/N of their tokens is the budget. Times are those of torch's profiler, of
each operation without what it calls; the profiler itself costs some microseconds an operation.
"""

from __future__ import annotations

import argparse
import os
import platform
import warnings

import torch
from int8 import Bert, Decoder
from tabulate import tabulate
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import acm_compiler as acm
from acm_compiler.acm import ACM

N, MOST = 4, 10


class Speech(nn.Module):
    """transformers' wav2vec2 of the base size, which gives one tensor."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Wav2Vec2Config, Wav2Vec2Model

        self.model = Wav2Vec2Model(Wav2Vec2Config())

    def forward(self, sound: Tensor) -> Tensor:
        return self.model(sound).last_hidden_state


def main() -> None:
    """Profile the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("minilm", "vit", "wav2vec2", "decoder"))
    parser.add_argument("--budget", type=float, default=0.4)
    parser.add_argument("--calls", type=int, default=5)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads,")
    print(f"{torch.backends.cpu.get_cpu_capability()}, load {os.getloadavg()[0]:.1f}\n")
    with torch.no_grad():
        dense, x = built(chosen.model)
        plan = acm.plan(dense.eval(), x, learners=N, init="random")
        converted = acm.rewrite(dense, plan).eval()
        acm.set_k(converted, None)
        push_gates(converted, x, chosen.budget)
        with acm.record(converted) as usage:
            converted(x)
        shares, total = time_of(torch.compile(converted, backend="acm"), x, chosen.calls)
    rows = [[name, f"{ms:.2f}", f"{ms / total:.3f}", calls] for name, ms, calls in shares[:MOST]]
    rows.append(["all", f"{total:.2f}", "1.000", ""])
    print(tabulate(rows, headers=("operation", "ms", "share", "calls"), tablefmt="github", disable_numparse=True))
    k = [float(each.float().mean()) for each in usage.k.values()]
    print(f"\nmean k/N {sum(k) / len(k) / N:.2f}")


def built(name: str) -> tuple[nn.Module, Tensor]:
    """The dense model and an input."""
    if name == "minilm":
        return Bert(), torch.randint(0, 30_000, (8, 128))
    if name == "decoder":
        return Decoder(), torch.randint(0, 30_000, (1, 512))
    if name == "wav2vec2":
        return Speech(), torch.randn(1, 80_000)
    from torchvision.models import vit_b_16

    return vit_b_16(), torch.randn(1, 3, 224, 224)


def push_gates(model: nn.Module, x: Tensor, budget: float) -> None:
    """Move each gate's last biases, in one call of the model, until its tokens run the budget's share of learners."""

    def push(site: ACM, args: tuple[Tensor, ...]) -> None:
        bias, slope = site.gate.outer.bias.clone(), torch.linspace(-1, 1, len(site.gate.outer.bias))
        site.gate.outer.weight.mul_(30)
        tokens, low, high = args[0].flatten(0, -2), -50.0, 50.0
        for _ in range(20):
            middle = (low + high) / 2
            site.gate.outer.bias.copy_(bias + middle * slope)
            mean = float(site.choose(tokens, tokens.shape[:1]).float().mean())
            low, high = (middle, high) if mean < budget * N else (low, middle)

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
