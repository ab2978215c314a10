"""Tokens per second of `acm.generate` over the drafts' budget and length, against `generate` of both models.

    python -m benchmarks.drafts runs/smollm2 [--budgets .25 .4 .6] [--lengths 2 4 8] [--texts 8] [--tokens 64]

The folder is a finished run of a decoder. Prompts are the first tokens of texts that the run is judged by; everything
writes greedily, eager, one text at a time, and takes turns text by text. Drafts are checked at budget 1; `accepted` is
how many tokens of a draft the model would have written, `kept` their share of those drafted.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

import acm_compiler as acm
from acm_compiler.runs.opened import SavedRun, open_saved_run
from benchmarks.machine import machine

HEADINGS = ("draft", "tokens", "until", "accepted", "kept", "tokens/s", "to dense", "q1", "q3", "same text")
Write = Callable[[Tensor], Tensor]


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.4, 0.6])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.4])
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=64)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    print(machine(), flush=True)
    run = open_saved_run(chosen.run)
    assert run.dense is not None
    acm.set_budget(run.model, 1)
    options = {"do_sample": False, "max_new_tokens": chosen.tokens, "min_new_tokens": chosen.tokens, "pad_token_id": 0}
    drafts = [
        acm.Draft(budget=budget, tokens=length, confidence=confidence)
        for budget in chosen.budgets
        for length in chosen.lengths
        for confidence in chosen.confidence
    ]
    writers: list[Write] = [partial(model.eval().generate, **options) for model in (run.dense, run.model)]
    writers += [partial(acm.generate, run.model, draft=draft, **options) for draft in drafts]
    seconds, same = timed(writers, prompts(run, chosen.texts, chosen.prompt))
    rows = [["dense, generate", *[""] * 4, *rates(seconds, 0, chosen.tokens), ""]]
    rows.append(["ACMs, generate", *[""] * 4, *rates(seconds, 1, chosen.tokens), ""])
    for number, draft in enumerate(drafts, start=2):
        accepted = f"{draft.accepted / draft.rounds:.2f}", f"{draft.accepted / draft.drafted:.0%}"
        about = [f"{draft.budget:g}", str(draft.tokens), f"p < {draft.confidence:g}"]
        rows.append([*about, *accepted, *rates(seconds, number, chosen.tokens), f"{same[number]}/{chosen.texts}"])
    print(tabulate(rows, headers=HEADINGS, tablefmt="github", disable_numparse=True))


def prompts(run: SavedRun, texts: int, tokens: int) -> list[Tensor]:
    """The beginnings [1, tokens] of the first texts that are long enough."""
    found = (run.data[number]["input_ids"][None, :tokens] for number in range(len(run.data)))  # type: ignore[arg-type]
    return [ids for ids in found if ids.shape[1] == tokens][:texts]


def timed(writers: list[Write], texts: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Seconds of every text by every writer [texts, writers], and how many texts are those of the second writer."""
    for write in writers:
        write(texts[0])
    seconds, same = torch.empty(len(texts), len(writers)), [0] * len(writers)
    for row, ids in zip(seconds, texts, strict=True):
        written = []
        for number, write in enumerate(writers):
            start = time.perf_counter()
            written.append(write(ids))
            row[number] = time.perf_counter() - start
        same = [count + torch.equal(text, written[1]) for count, text in zip(same, written, strict=True)]
    return seconds, same


def rates(seconds: Tensor, number: int, tokens: int) -> list[str]:
    """Tokens per second, and the median and quartiles over texts of their ratio to dense `generate`."""
    ratios = seconds[:, 0] / seconds[:, number]
    shown = (tokens / seconds[:, number].median(), *torch.quantile(ratios, torch.tensor([0.5, 0.25, 0.75])))
    return [f"{float(value):.3g}" for value in shown]


if __name__ == "__main__":
    main()
