"""Tokens per second of a decoder that goes on token by token from its cache, against the dense model in the same run.

    python benchmarks/decode.py [--batch 1 16] [--width 512] [--layers 6] [--tokens 24] [--rounds 7]

A Llama with drawn weights writes by `generate()` (eager, greedy, with a cache) at every k; MLPs are converted. Weights
are drawn: time does not depend on their values, only on k. The budget is k / N in both phases.
"""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import nn

import acm_compiler as acm
from acm_compiler.evaluation.bench import clock, interleave
from acm_compiler.passes.rewrite.conversion import conversion

VOCABULARY, PROMPT, N = 2000, 16, 4
HEADINGS = ("batch", "k/N", "tokens/s", "dense/s", "speed-up", "q1", "q3", "MACs")


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads,")
    print(f"{torch.backends.cpu.get_cpu_capability()}, {clock()[0]}, load {os.getloadavg()[0]:.1f}\n")
    dense = drawn_llama(chosen.width, chosen.layers)
    plan = acm.plan(dense, {"input_ids": torch.ones(1, 32, dtype=torch.int64)}, sites="mlp")
    converted = acm.rewrite(dense, plan)
    rows = [row for batch in chosen.batch for row in measured(dense, converted, batch, chosen.tokens, chosen.rounds)]
    print(tabulate(rows, headers=HEADINGS, tablefmt="github", disable_numparse=True))


def drawn_llama(width: int, layers: int) -> nn.Module:
    """A Llama of this size, in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=8,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def measured(dense: nn.Module, converted: nn.Module, batch: int, tokens: int, rounds: int) -> list[list[str]]:
    """One row per k."""
    prompt = torch.randint(1, VOCABULARY, (batch, PROMPT))
    calls: dict[str, Callable[[], object]] = {"dense": lambda: write(dense, prompt, tokens)}
    for k in range(1, N + 1):
        calls[f"{k / N:.2f}"] = lambda k=k: (acm.set_k(converted, k), write(converted, prompt, tokens))
    found = interleave(calls, base="dense", rounds=rounds, warmup=1)
    rates = {name: 1000 * batch * tokens / timing.time_ms for name, timing in found.items()}
    cost = conversion(converted).plan.cost
    rows = []
    for k in range(1, N + 1):
        timing = found[f"{k / N:.2f}"]
        speedups = [1 / ratio for ratio in (timing.ratio, timing.ratio_q3, timing.ratio_q1)]
        shown = [f"{number:.3g}" for number in (rates[f"{k / N:.2f}"], rates["dense"], *speedups)]
        rows.append([str(batch), f"{k / N:.2f}", *shown, f"{cost.model_share(k / N):.0%}"])
    return rows


def write(model: nn.Module, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """So many more tokens."""
    return model.generate(prompt, max_new_tokens=tokens, do_sample=False)  # type: ignore[operator]


if __name__ == "__main__":
    main()
