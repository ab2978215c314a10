"""Tokens per second of processor time of a converted decoder in vLLM, at budgets, beside the dense model in vLLM.

    python -m benchmarks.vllm_tokens runs/smollm2 --dense FOLDER_OR_NAME [--budgets 1 .75 .5 .25] [--rounds 5]

Each contender is an engine in a process of its own, in vLLM's compiled mode, on one thread, and they take turns: the
converted model at each budget, the dense one by vLLM's own class and by its Transformers backend, which the converted
one stands on. A turn is a batch of requests with prompts of drawn tokens, greedy. Times are the fewest seconds of
processor time of all rounds: they hold on a machine that others use, too, and leave out what waits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

HEADINGS = ("contender", "reading: tokens/s", "to dense", "writing: tokens/s", "to dense")
OWN, BACKEND = "dense, vLLM's own class", "dense, Transformers backend"


def main() -> None:
    """Measure and print one table, or be one of the engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--dense", help="the model before conversion")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25])
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each request writes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.engine:
        _answer(chosen)
        return
    if chosen.dense is None:
        parser.error("--dense: name the model before conversion")
    engines = {name: _Engine(chosen, name) for name in ("acm", "dense", "transformers")}
    turns = [(f"ACMs, budget {b:g}", "acm", {"budget": b}) for b in chosen.budgets]
    turns += [(OWN, "dense", None), (BACKEND, "transformers", None)]
    fewest: dict[str, list[float]] = {}
    for _ in range(chosen.rounds):
        for label, name, extra in turns:
            found = engines[name].take_turn(extra)
            fewest[label] = list(map(min, fewest.get(label, found), found))
    print(_table(fewest, chosen))


class _Engine:
    """An engine in its own process."""

    def __init__(self, chosen: argparse.Namespace, name: str) -> None:
        sizes = ("requests", "prompt", "tokens")
        options = [text for size in sizes for text in (f"--{size}", str(getattr(chosen, size)))]
        model = str(chosen.run) if name == "acm" else chosen.dense
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_tokens", model, "--engine", name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ | own,
        )
        self.take_turn(None)  # compiles, and fills caches

    def take_turn(self, extra: dict[str, Any] | None) -> list[float]:
        """Processor seconds of reading the prompts, and of writing behind them."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(extra) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return json.loads(line.removeprefix("seconds "))
        raise SystemExit("an engine ended; its own words are above")


def _answer(chosen: argparse.Namespace) -> None:
    """Run a turn for each line of stdin: the requests' extra arguments."""
    import torch
    from vllm import LLM, SamplingParams

    total = chosen.prompt + chosen.tokens
    engine = LLM(
        str(chosen.run),
        model_impl="transformers" if chosen.engine == "transformers" else "auto",
        dtype="float32",
        max_model_len=total,
        max_num_seqs=chosen.requests,
        max_num_batched_tokens=chosen.requests * chosen.prompt,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    drawn = torch.Generator().manual_seed(0)
    most = engine.model_config.get_vocab_size()
    prompts = [
        {"prompt_token_ids": torch.randint(3, most, (chosen.prompt,), generator=drawn).tolist()}
        for _ in range(chosen.requests)
    ]
    for line in sys.stdin:
        seconds = []
        for tokens in (1, chosen.tokens):
            params = SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=json.loads(line)
            )
            start = time.process_time()
            engine.generate(prompts, params, use_tqdm=False)
            seconds.append(time.process_time() - start)
        print("seconds", json.dumps([seconds[0], seconds[1] - seconds[0]]), flush=True)


def _table(fewest: dict[str, list[float]], chosen: argparse.Namespace) -> str:
    counts = (chosen.requests * chosen.prompt, chosen.requests * (chosen.tokens - 1))
    rows = []
    for label, seconds in fewest.items():
        row: list[str] = [label]
        for count, own, base in zip(counts, seconds, fewest[OWN], strict=True):
            row += [f"{count / own:,.0f}", f"{base / own:.2f}"]
        rows.append(row)
    names = ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers"))
    right = ("left", "right", "right", "right", "right")
    return f"{names}; {chosen.requests} requests, {chosen.prompt} + {chosen.tokens} tokens\n" + tabulate(
        rows, HEADINGS, tablefmt="github", colalign=right, disable_numparse=True
    )


if __name__ == "__main__":
    main()
