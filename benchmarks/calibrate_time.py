"""Costs of a calibration, over tokens, layers, and for a ViT-B/16: docs/results/calibration-time.md.

    python -m benchmarks.calibrate_time tokens      a BERT of 3 layers of width 128, 5,000, 10,000 and 20,000 tokens
    python -m benchmarks.calibrate_time layers      a BERT of 3, 6 and 12 layers of width 128, 5,000 tokens
    python -m benchmarks.calibrate_time layers 12   only that one
    python -m benchmarks.calibrate_time vit         torchvision's vit_b_16, MLP sites, 20,000 tokens of 122 images
    python -m benchmarks.calibrate_time vit 1 2000  one layer of it, all sites, 2,000 tokens: the price of a layer
    python -m benchmarks.calibrate_time decoder     SmolLM2-135M's shape, MLP sites, 40,000 tokens
    python -m benchmarks.calibrate_time decoder 5 4000 1000  the same with 5 layers, 4,000 tokens, 1,000 with gradients
    python -m benchmarks.calibrate_time wide        one gated MLP of 1,536, 4,864 and 14,336 hidden neurons
    python -m benchmarks.calibrate_time wide 4864   that one

Weights and inputs are random: what is computed does not depend on them. CPU seconds of all threads together, in all
and of each part, and seconds on the clock, which say something on quiet cores only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import torch
from torch import nn

import acm_compiler as acm

BATCH, LENGTH, IMAGES = 16, 34, 8
VOCABULARY, CONTEXTS, CONTEXT = 49_152, 4, 256
# hidden neurons and width of the MLPs of SmolLM2-135M, Qwen2-0.5B and Llama-3-8B
WIDE = {1_536: 576, 4_864: 896, 14_336: 4096}
PARTS = ("read", "learners and gates", "lowest k", "budgets")  # how calibrate's lines about a finished part begin


def main() -> None:
    """Print a row of Markdown for every calibration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokens", "layers", "vit", "decoder", "wide"))
    what = "these tokens, layers or neurons only; of vit and decoder their layers and tokens"
    parser.add_argument("sizes", nargs="*", type=int, help=what)
    options = parser.parse_args()
    makers = {"tokens": over_tokens, "layers": over_layers, "vit": of_vit, "decoder": of_decoder, "wide": of_wide}
    cases = makers[options.what](*options.sizes)
    heads = ("model", "sites", "tokens", "CPU s", *PARTS, "s", "threads, load")
    sys.stdout.write("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads) + "\n")
    for name, *case in cases:
        row = timed(*case)
        sys.stdout.write(f"| {name} | {row}\n")
        sys.stdout.flush()


Case = tuple[str, nn.Module, Any, Iterator[Any], int, list[str], int | None]


def over_tokens(*sizes: int) -> Iterator[Case]:
    """One model, more and more tokens."""
    for tokens in sizes or (5_000, 10_000, 20_000):
        yield bert_case(3, tokens)


def over_layers(*sizes: int) -> Iterator[Case]:
    """More and more layers, the same tokens."""
    for layers in sizes or (3, 6, 12):
        yield bert_case(layers, 5_000)


def bert_case(layers: int, tokens: int) -> Case:
    """A BERT of width 128, all its sites."""
    batches = (sentences(BATCH) for _ in count())
    return f"BERT, {layers} layers of 128", bert(layers, 128), sentences(1), batches, tokens, ["mlp", "attn"], None


def of_vit(*sizes: int) -> Iterator[Case]:
    """A ViT-B/16 on images of noise; `sizes`: its layers, and tokens, for all sites."""
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    layers, tokens = (*sizes, *(12, 20_000)[len(sizes) :])
    model = VisionTransformer(224, 16, num_layers=layers, num_heads=12, hidden_dim=768, mlp_dim=3072)
    torch.nn.init.normal_(model.heads.head.weight, std=0.03)  # torchvision's zeros would give no gradient
    sites = ["mlp", "attn"] if sizes else ["mlp"]
    images = (torch.randn(IMAGES, 3, 224, 224) for _ in count())
    yield f"ViT-B/16, {layers} layers", model.eval(), torch.randn(1, 3, 224, 224), images, tokens, sites, None


def of_decoder(*sizes: int) -> Iterator[Case]:
    """A decoder of SmolLM2-135M's shape on random tokens; `sizes`: its layers, tokens, and those with gradients."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers, tokens, with_gradients = (*sizes, *(30, 40_000, None)[len(sizes) :])
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=VOCABULARY, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model, batches = LlamaForCausalLM(config).eval(), (contexts(CONTEXTS) for _ in count())
    yield f"SmolLM2-135M's shape, {layers} layers", model, contexts(1), batches, tokens, ["mlp"], with_gradients


def of_wide(*neurons: int) -> Iterator[Case]:
    """One gated MLP with its norm and bypass; gradients of 2,000 tokens, and twice as many tokens as neurons."""
    for hidden in neurons or WIDE:
        width = WIDE[hidden]
        model, batches = Block(width, hidden).eval(), (torch.randn(4, 128, width) for _ in count())
        yield f"MLP of {hidden:,}", model, torch.randn(1, 128, width), batches, 2 * hidden, ["mlp"], 2000


class Block(nn.Module):
    """x + down(silu(gate(z)) * up(z)), z the normalised x."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(hidden, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        z = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(z)) * self.up(z))


def timed(
    model: nn.Module, example: Any, batches: Iterator[Any], tokens: int, sites: list[str], with_gradients: int | None
) -> str:
    """The cells of one calibration."""
    plan = acm.plan(model, example, sites=sites)
    converted = acm.rewrite(model, plan)
    clock, spent = time.perf_counter(), [time.process_time()]

    def progress(text: str) -> None:
        sys.stderr.write(f"{time.perf_counter():.0f} {text}\n")
        if len(spent) <= len(PARTS) and text.startswith(f"calibrate: {PARTS[len(spent) - 1]}"):
            spent.append(time.process_time())

    fewer: dict[str, Any] = {} if with_gradients is None else {"gradient_tokens": with_gradients}
    acm.calibrate(converted, batches, tokens=tokens, progress=progress, **fewer)
    clock, load = time.perf_counter() - clock, f"{torch.get_num_threads()}, {os.getloadavg()[0]:.1f}"
    parts = [f"{after - before:.0f}" for before, after in pairwise(spent)]
    cells = [len(plan.sites), tokens, f"{spent[-1] - spent[0]:.0f}", *parts, f"{clock:.0f}", load]
    return " | ".join(map(str, cells)) + " |"


def bert(layers: int, width: int) -> nn.Module:
    """MiniLM's architecture, random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width, num_attention_heads=width // 32, intermediate_size=4 * width, num_hidden_layers=layers
    )
    return BertModel(config, add_pooling_layer=False).eval()


def sentences(batch: int) -> dict[str, torch.Tensor]:
    """A batch of drawn tokens."""
    return {"input_ids": torch.randint(1000, 30_000, (batch, LENGTH))}


def contexts(batch: int) -> dict[str, torch.Tensor]:
    """A batch of drawn tokens for the decoder."""
    return {"input_ids": torch.randint(VOCABULARY, (batch, CONTEXT))}


if __name__ == "__main__":
    main()
