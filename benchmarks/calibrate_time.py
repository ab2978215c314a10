"""What calibration costs, over tokens, layers, and for a ViT-B/16: the table of times in docs/quality.md.

    python benchmarks/calibrate_time.py tokens      a BERT of MiniLM's size, 5,000, 10,000 and 20,000 tokens
    python benchmarks/calibrate_time.py layers      a BERT of 3, 6 and 12 layers of width 128, 5,000 tokens
    python benchmarks/calibrate_time.py vit         torchvision's vit_b_16, MLP sites, 20,000 tokens of 122 pictures

Weights and inputs are random: what is computed does not depend on them. CPU seconds of all threads together, and
seconds on the clock, which say something on quiet cores only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import acm_compiler as acm

BATCH, LENGTH, PICTURES = 16, 34, 8


def main() -> None:
    """Print a row of Markdown for every calibration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokens", "layers", "vit"))
    cases = {"tokens": over_tokens, "layers": over_layers, "vit": of_vit}[parser.parse_args().what]
    sys.stdout.write("| model | sites | tokens | CPU s | s | threads, load |\n| --- | --- | --- | --- | --- | --- |\n")
    for name, model, example, batches, tokens, sites in cases():
        row = timed(model, example, batches, tokens=tokens, sites=sites)
        sys.stdout.write(f"| {name} | {row}\n")
        sys.stdout.flush()


Case = tuple[str, nn.Module, Any, Iterator[Any], int, list[str]]


def over_tokens() -> Iterator[Case]:
    """One model, more and more tokens."""
    for tokens in (5_000, 10_000, 20_000):
        yield "BERT, 6 layers of 384", bert(6, 384), sentence(), sentences(), tokens, ["mlp", "attn"]


def over_layers() -> Iterator[Case]:
    """More and more layers, the same tokens."""
    for layers in (3, 6, 12):
        yield f"BERT, {layers} layers of 128", bert(layers, 128), sentence(), sentences(), 5_000, ["mlp", "attn"]


def of_vit() -> Iterator[Case]:
    """A ViT-B/16 on pictures of noise."""
    from torchvision.models import vit_b_16

    torch.manual_seed(0)
    yield "ViT-B/16", vit_b_16().eval(), torch.randn(1, 3, 224, 224), pictures(), 20_000, ["mlp"]


def timed(model: nn.Module, example: Any, batches: Iterator[Any], *, tokens: int, sites: list[str]) -> str:
    """The cells of one calibration."""
    plan = acm.plan(model, example, sites=sites)
    converted = acm.rewrite(model, plan)
    clock, cpu = time.perf_counter(), time.process_time()
    acm.calibrate(converted, batches, tokens=tokens, progress=progress)
    cpu, clock = time.process_time() - cpu, time.perf_counter() - clock
    load = f"{torch.get_num_threads()}, {os.getloadavg()[0]:.1f}"
    return f"{len(plan.sites)} | {tokens} | {cpu:.0f} | {clock:.0f} | {load} |"


def progress(text: str) -> None:
    """What is done, on standard error."""
    sys.stderr.write(f"{time.perf_counter():.0f} {text}\n")


def bert(layers: int, width: int) -> nn.Module:
    """MiniLM's architecture, random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width, num_attention_heads=width // 32, intermediate_size=4 * width, num_hidden_layers=layers
    )
    return BertModel(config, add_pooling_layer=False).eval()


def sentence() -> dict[str, torch.Tensor]:
    """One example."""
    return {"input_ids": torch.randint(1000, 30_000, (1, LENGTH))}


def sentences() -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end."""
    while True:
        yield {"input_ids": torch.randint(1000, 30_000, (BATCH, LENGTH))}


def pictures() -> Iterator[torch.Tensor]:
    """Batches without end."""
    while True:
        yield torch.randn(PICTURES, 3, 224, 224)


if __name__ == "__main__":
    main()
