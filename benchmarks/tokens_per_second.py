"""Tokens per second of a converted decoder, reading a prompt and writing token by token, against the dense model.

    python -m benchmarks.tokens_per_second runs/smollm2 [--prompt 128] [--batch 1] [--budgets 1 .75 .6 .4] [--rounds 5]

The folder is a finished run. Dense eager, dense Inductor, ACMs eager and ACMs compiled take turns, in one table for
reading (prefill: all tokens of the prompt at once) and one for writing (decode: one more token after as many as the
prompt has, from the cache, the same step again and again). The texts are those that the run is judged by, one after
the other, so that gates choose as they do in use. What a budget cannot shorten is in the share of the dense MACs.
`--llama-cpp` adds llama.cpp on the GGUF file that the run's model came from (package llama-cpp-python), batch 1 alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import acm_compiler as acm
from acm_compiler.evaluation.bench import Timing, clock, interleave
from acm_compiler.recipe.gguf import gguf_file
from acm_compiler.runs.recipe_run import SavedRun, open_saved_run

HEADINGS = ("phase", "batch", "budget", "contender", "tokens/s", "to dense Inductor", "q1", "q3", "MACs")
BASE = "dense inductor"


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.75, 0.6, 0.4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", action="store_true", help="one contender more")
    chosen = parser.parse_args()
    if chosen.llama_cpp and chosen.batch != 1:
        parser.error("--llama-cpp goes with --batch 1")
    warnings.simplefilter("ignore")
    print(machine(), flush=True)
    run = open_saved_run(chosen.run)
    prompt = prompts(run, chosen.batch, chosen.prompt)
    with torch.no_grad():
        rival = llama_cpp(run, prompt) if chosen.llama_cpp else None
        rows = list(measured(run, prompt, chosen.budgets, chosen.rounds, rival))
    print(tabulate(rows, headers=HEADINGS, tablefmt="github", disable_numparse=True))


def machine() -> str:
    """Versions, threads and load, which belong to every table of times."""
    versions = f"torch {torch.__version__}, python {platform.python_version()}, {torch.get_num_threads()} threads,"
    return f"{versions}\n{torch.backends.cpu.get_cpu_capability()}, {clock()[0]}, load {os.getloadavg()[0]:.1f}\n"


def prompts(run: SavedRun, batch: int, tokens: int) -> Tensor:
    """The run's texts, one after the other, as token ids [batch, tokens]."""
    ids = torch.cat([run.data[number]["input_ids"] for number in range(len(run.data))])  # type: ignore[arg-type]
    return ids[: batch * tokens].reshape(batch, tokens)


def measured(run: SavedRun, prompt: Tensor, budgets: list[float], rounds: int, rival: Any) -> Iterator[list[str]]:
    """A row for every phase, budget and contender; the dense ones, llama.cpp's too, stand in the first budget's turns.

    rival: the model in llama.cpp, or None.
    """
    assert run.dense is not None
    dense, converted = run.dense.eval(), run.model.eval()
    models = {
        BASE: torch.compile(dense, backend="inductor"),
        "acm eager": converted,
        "acm compiled": torch.compile(converted, backend="acm"),
    }
    for phase, call, tokens in (("prefill", read, prompt.numel()), ("decode", write, len(prompt))):
        for place, budget in enumerate(budgets):
            acm.set_budget(converted, budget)
            shown = models if place else {**models, "dense eager": dense}
            calls = {name: call(model, dense, prompt) for name, model in shown.items()}
            if rival is not None and not place:
                calls["llama.cpp"] = partial(rival_step, rival, prompt, phase)
            with acm.record(converted) as usage:
                calls["acm eager"]()
            for name, timing in interleave(calls, base=BASE, rounds=rounds).items():
                if name.startswith("acm"):
                    yield row(phase, len(prompt), f"{budget:g}", name, timing, tokens, usage.model_share)
                elif not place:
                    yield row(phase, len(prompt), "", name, timing, tokens, 1.0)


def row(phase: str, batch: int, budget: str, name: str, timing: Timing, tokens: int, share: float) -> list[str]:
    """Tokens per second, and how often that is what dense Inductor does."""
    numbers = (1000 * tokens / timing.time_ms, 1 / timing.ratio, 1 / timing.ratio_q3, 1 / timing.ratio_q1)
    return [phase, str(batch), budget, name, *(f"{number:.3g}" for number in numbers), f"{share:.0%}"]


def read(model: Any, dense: Any, prompt: Tensor) -> Callable[[], object]:
    """A call that reads the prompt."""
    return partial(model, prompt, use_cache=True, logits_to_keep=1)


def write(model: Any, dense: Any, prompt: Tensor) -> Callable[[], object]:
    """A call that writes one token after the prompt, whose cache is left as it was."""
    from transformers import DynamicCache

    cache = DynamicCache(config=dense.config)
    last = dense(prompt, None, None, cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def step() -> None:
        model(last, None, None, cache, use_cache=True)
        cache.crop(-1)

    return step


def llama_cpp(run: SavedRun, prompt: Tensor) -> Any:
    """The same GGUF file in llama.cpp, with as many threads as torch uses."""
    from llama_cpp import Llama

    assert run.recipe is not None
    threads, room = torch.get_num_threads(), prompt.numel() + 8
    sizes: dict[str, Any] = {"n_ctx": room, "n_batch": room, "n_threads": threads, "n_threads_batch": threads}
    return Llama(str(gguf_file(run.recipe.model)), verbose=False, **sizes)


def rival_step(rival: Any, prompt: Tensor, phase: str) -> None:
    """Read the prompt, or write one token after it."""
    if phase == "prefill" or rival.n_tokens < prompt.numel():
        rival.reset()
        rival.eval(prompt.flatten().tolist())
    if phase == "decode":
        rival.n_tokens = prompt.numel()
        rival.eval([int(prompt[0, -1])])


if __name__ == "__main__":
    main()
