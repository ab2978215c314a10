"""How many clips of a release of Common Voice are decoded per second, by how many workers?

    python benchmarks/clips.py                                   half a minute on two free cores
    python benchmarks/clips.py --format wav --rate 48000

A release of clips of noise is written to a temporary folder. Every row reads all of it once as a training does:
decoded, resampled to 16 kHz, standardised, padded, in batches; first with nothing else to do, then with so much
arithmetic after every batch as one worker needs to load it: two cores that are both busy make twice the clips of one.
What the main process itself spends on a clip, in CPU time, tells the same on cores that are shared with others.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import torch
from tabulate import tabulate

from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.files import write_file
from acm_compiler.progress import Progress
from acm_compiler.recipe.datasets import CommonVoiceData

SIZE = 256  # of the square matrices that arithmetic is made of


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, as the command line says."""
    parser = argparse.ArgumentParser(description="Clips decoded per second, by the number of workers.")
    parser.add_argument("--clips", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=5.0, help="mean length of a clip")
    parser.add_argument("--format", choices=("mp3", "wav", "flac"), default="mp3")
    parser.add_argument("--rate", type=int, default=32_000, help="samples per second of the files")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        write_release(Path(folder), options)
        rows = measure(folder, batch=options.batch, workers=options.workers)
    size = f"{options.clips} clips of {options.seconds:g} s, {options.format} at {options.rate} Hz"
    print(f"{size}, batches of {options.batch}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(
        tabulate(rows, headers=["workers", "clips/s", "main process, ms/clip", "with arithmetic: clips/s", "waiting"])
    )


def write_release(folder: Path, options: argparse.Namespace) -> None:
    """`train.tsv`, `clips/` and `vocab.json`; lengths are even between half and one and a half of the mean."""
    (folder / "clips").mkdir()
    write_file(folder / "vocab.json", '{"<pad>": 0, "|": 1, "a": 2}')
    draw = np.random.default_rng(0)
    lines = ["path\tsentence"]
    for i in range(options.clips):
        samples = int(options.rate * options.seconds * draw.uniform(0.5, 1.5))
        soundfile.write(folder / f"clips/{i}.{options.format}", 0.1 * draw.standard_normal(samples), options.rate)
        lines.append(f"{i}.{options.format}\ta aa")
    write_file(folder / "train.tsv", "\n".join(lines) + "\n")


def measure(folder: str, *, batch: int, workers: Sequence[int]) -> list[tuple[int, str, str, str, str]]:
    """A row per number of workers."""
    config = CommonVoiceData(kind="common_voice", root=folder, split="train", vocabulary=f"{folder}/vocab.json")
    streams = {
        count: BatchStream(dataset=open_dataset(config), batch=batch, shuffle=True, workers=count) for count in workers
    }
    read(BatchStream(dataset=open_dataset(config), batch=batch))  # from here on the system holds the files
    alone = {count: read(stream) for count, stream in streams.items()}
    products = _products(seconds=batch / alone[workers[0]].clips_per_s)
    rows = []
    for count, stream in streams.items():
        busy = read(stream, lambda: _multiply(products))
        loading = f"{alone[count].clips_per_s:.0f}", f"{alone[count].main_ms:.2f}"
        rows.append((count, *loading, f"{busy.clips_per_s:.0f}", f"{busy.waiting:.0%}"))
    return rows


class Pace(NamedTuple):
    """Clips per second of the clock, CPU time of the main process per clip, share of the time it waited for data."""

    clips_per_s: float
    main_ms: float
    waiting: float


def read(stream: BatchStream, then: Callable[[], None] = lambda: None) -> Pace:
    """One epoch, with `then` after every batch."""
    began, used = time.monotonic(), time.process_time()
    with Progress("read", len(stream), shown=False) as progress:
        for _ in progress.fed(stream.epoch()):
            then()
    seconds, main_s = time.monotonic() - began, time.process_time() - used
    return Pace(stream.examples / seconds, 1e3 * main_s / stream.examples, progress.waited / seconds)


def _products(*, seconds: float) -> int:
    """How many products of matrices take so long."""
    began, count = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        _multiply(1)
        count += 1
    return count


def _multiply(count: int) -> None:
    a = torch.ones(SIZE, SIZE)
    for _ in range(count):
        a @ a


if __name__ == "__main__":
    main()
