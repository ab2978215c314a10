"""How much memory does one step of each of the paper's phases take at the size of XLS-R-300M?

    python benchmarks/step_memory.py --seconds 10        some minutes on one core; Linux

The recipe `xlsr300m_common_voice` as it is shipped, but for a batch of one and one step, on a model of that size with
random weights and clips of noise: what a step takes does not depend on either. Peak memory is the kernel's (VmHWM),
set back before each phase; it includes the saved states, as of a real run.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile
import torch
from tabulate import tabulate

from acm_compiler.files import write_file
from acm_compiler.recipe import Recipe, expand_paths, load_recipe
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.run_recipe import Workshop, convert
from acm_compiler.training.machine import open_machine
from acm_compiler.training.schedule import run_schedule

RATE = 16_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
XLSR_300M = {
    "model_type": "wav2vec2",
    "architectures": ["Wav2Vec2ForCTC"],
    "vocab_size": len(LETTERS) + 2,
    "pad_token_id": 0,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "conv_bias": True,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "mask_time_prob": 0.0,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, as the command line says."""
    parser = argparse.ArgumentParser(description="Peak memory of one step of each phase.")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the one clip")
    parser.add_argument("--layers", type=int, default=XLSR_300M["num_hidden_layers"])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        stand_in(Path(folder), seconds=options.seconds, layers=options.layers)
        recipe = expand_paths(shipped_recipe(options.precision))
        rows = measure(recipe, Path(folder) / "run")
    size = f"{options.seconds:g} s of audio, {options.layers} layers, {options.precision}"
    print(f"{size}, {torch.get_num_threads()} threads")
    print(tabulate(rows, headers=["", "peak GB", "s"], floatfmt=".1f"))


def stand_in(folder: Path, *, seconds: float, layers: int) -> None:
    """A model's config without weights, and a release of Common Voice with a clip of noise per split."""
    write_file(folder / "config.json", json.dumps(XLSR_300M | {"num_hidden_layers": layers}))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "|", *LETTERS])}
    write_file(folder / "vocab.json", json.dumps(vocabulary))
    (folder / "clips").mkdir()
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        soundfile.write(folder / f"clips/{split}.wav", 0.1 * draw.standard_normal(int(seconds * RATE)), RATE)
        write_file(folder / f"{split}.tsv", f"path\tsentence\n{split}.wav\tuna frase corta\n")
    os.environ.update(XLSR=str(folder), COMMON_VOICE=str(folder))


def shipped_recipe(precision: str) -> Recipe:
    """The recipe with one step of one clip in every phase."""
    changes = [f"schedule[{i}].{key}" for i in range(3) for key in ("epochs=null", "steps=1", "batch=1")]
    return load_recipe(
        "xlsr300m_common_voice",
        [*changes, "model.weights=null", "expect=null", "run.workers=0", f"run.precision={precision}"],
    )


def measure(recipe: Recipe, directory: Path) -> list[tuple[str, float, float]]:
    """(what, peak in GB, seconds) of making the model and of each phase."""
    rows, began = [], _start()
    workshop = Workshop(recipe, open_machine(recipe.run.precision, recipe.run.device), lambda line: None)
    workshop.open()
    workshop.model, model = convert(recipe, lambda line: None)
    rows.append(("load, plan, rewrite", _peak_gb(), time.monotonic() - began))
    job = replace(workshop.job(RunOptions(directory=directory)), measure=None, evaluate=None)
    for phase in recipe.schedule:
        began = _start()
        run_schedule(model, [phase], job)
        rows.append((phase.phase, _peak_gb(), time.monotonic() - began))
    return rows


def _start() -> float:
    """Set the peak back to what is used now."""
    Path("/proc/self/clear_refs").write_text("5")
    return time.monotonic()


def _peak_gb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


if __name__ == "__main__":
    main()
