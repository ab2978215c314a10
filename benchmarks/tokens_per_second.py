"""Tokens per second of a converted decoder, reading a prompt and writing token by token, against the dense model.

    python -m benchmarks.tokens_per_second runs/smollm2 [--prompt 128] [--batch 1] [--budgets 1 .75 .6 .4] [--rounds 5]

The folder is a finished run. Dense eager, dense Inductor, ACMs eager and ACMs compiled take turns, in one table for
reading (prefill: all tokens of the prompt at once) and one for writing (decode: one more token after as many as the
prompt has, from the cache, the same step again and again). The texts are those that the run is judged by, one after
the other, so that gates choose as they do in use. What a budget cannot shorten is in the share of the dense MACs.
`--llama-cpp` adds llama.cpp on the GGUF file that the run's model came from, and on others that it names: thinner ones,
as `benchmarks.llama_cpp_model` says how to make (package llama-cpp-python).
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

import acm_compiler as acm
from acm_compiler.evaluation.bench import Timing, interleave
from acm_compiler.recipe.lookup import gguf_file
from acm_compiler.runs.opened import SavedRun, open_saved_run
from benchmarks.machine import machine

HEADINGS = ("phase", "batch", "budget", "contender", "tokens/s", "to dense Inductor", "q1", "q3", "MACs")
BASE, LLAMA_CPP = "dense inductor", "llama.cpp"
_DENSE = (BASE, "dense eager", LLAMA_CPP)


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.75, 0.6, 0.4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", type=Path, nargs="*", metavar="FILE", help="a contender more, and one for each")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine(), flush=True)
    run = open_saved_run(chosen.run)
    prompt = prompts(run, chosen.batch, chosen.prompt)
    with torch.no_grad():
        rivals = {} if chosen.llama_cpp is None else llama_cpp(run, prompt, chosen.llama_cpp)
        rows = list(measured(run, prompt, chosen.budgets, chosen.rounds, rivals))
    print(tabulate(rows, headers=HEADINGS, tablefmt="github", disable_numparse=True))


def prompts(run: SavedRun, batch: int, tokens: int) -> Tensor:
    """The run's texts, one after the other, as token ids [batch, tokens]."""
    ids = torch.cat([run.data[number]["input_ids"] for number in range(len(run.data))])  # type: ignore[arg-type]
    return ids[: batch * tokens].reshape(batch, tokens)


def measured(
    run: SavedRun, prompt: Tensor, budgets: list[float], rounds: int, rivals: dict[str, Any]
) -> Iterator[list[str]]:
    """A row for every phase, budget and contender; the dense ones, llama.cpp's too, stand in the first budget's turns.

    rivals: models in llama.cpp by what a row calls them.
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
            if not place:
                calls |= {name: rival_step(rival, prompt, phase) for name, rival in rivals.items()}
            with acm.record(converted) as usage:
                calls["acm eager"]()
            for name, timing in interleave(calls, base=BASE, rounds=rounds).items():
                if name.startswith("acm"):
                    yield row(phase, len(prompt), f"{budget:g}", name, timing, tokens, usage.model_share)
                elif not place:
                    yield row(phase, len(prompt), "", name, timing, tokens, 1.0 if name in _DENSE else None)


def row(phase: str, batch: int, budget: str, name: str, timing: Timing, tokens: int, share: float | None) -> list[str]:
    """Tokens per second, and how often that is what dense Inductor does; share: of the dense MACs, if known."""
    numbers = (1000 * tokens / timing.time_ms, 1 / timing.ratio, 1 / timing.ratio_q3, 1 / timing.ratio_q1)
    shown = "" if share is None else f"{share:.0%}"
    return [phase, str(batch), budget, name, *(f"{number:.3g}" for number in numbers), shown]


def read(model: Any, dense: Any, prompt: Tensor) -> Callable[[], object]:
    """A call that reads the prompt."""
    return partial(model, prompt, use_cache=True, logits_to_keep=1)


def write(model: Any, dense: Any, prompt: Tensor) -> Callable[[], object]:
    """A call that writes one token after the prompt, whose cache is left as it was."""
    from transformers import DynamicCache

    cache = DynamicCache(config=dense.config)
    last = dense(prompt, None, None, cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    def step(model: Any = model) -> None:
        model(last, None, None, cache, use_cache=True)
        cache.crop(-1)

    step(dense)  # a cropped cache has other strides, for which a compiled model would be compiled once more
    return step


def llama_cpp(run: SavedRun, prompt: Tensor, others: list[Path]) -> dict[str, Any]:
    """The same GGUF file in llama.cpp, and others, each by what a row calls it."""
    from benchmarks.llama_cpp_model import LlamaCppModel

    assert run.recipe is not None
    batch, tokens = prompt.shape
    files = {LLAMA_CPP: gguf_file(run.recipe.model), **{f"{LLAMA_CPP} {path.stem}": path for path in others}}
    return {name: LlamaCppModel(path, sequences=batch, tokens=tokens) for name, path in files.items()}


def rival_step(rival: Any, prompt: Tensor, phase: str) -> Callable[[], object]:
    """A call that reads the prompt, or writes one token after it."""
    ids, (batch, tokens) = prompt.tolist(), prompt.shape

    def read_prompt() -> None:
        rival.forget()
        rival.read(ids)

    def write_token() -> None:
        rival.read([row[-1:] for row in ids], behind=tokens)
        rival.drop(tokens, batch)

    if phase == "decode":
        read_prompt()
    return read_prompt if phase == "prefill" else write_token


if __name__ == "__main__":
    main()
