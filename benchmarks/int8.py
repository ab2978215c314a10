"""CPU times of int8 learners, as ratios to what Inductor makes of the dense float32 model, interleaved in one run.

    python -m benchmarks.int8 mlp [--width 768 --hidden 3072 --tokens 1576 --gated]     one MLP
    python -m benchmarks.int8 vit [--batch 8]       all of ViT-B, MLPs and q, k, v, o converted
    python -m benchmarks.int8 bert [--batch 8]      six BERT layers of width 384, 128 tokens an example
    python -m benchmarks.int8 decoder [--tokens 512]     six decoder layers of SmolLM2-135M's sizes, without a cache
    python -m benchmarks.int8 decode [--batch 8]    one more token after 128 cached ones, all of SmolLM2-135M's sizes

--sites mlp converts MLPs alone; --rest makes the linears around the ACMs int8, too, but for output heads, --head
those as well; --weights int8 int4 measures both; --bfloat16-attention is the backend's option of that name.

Weights are drawn: time does not depend on their values, only on k. Where onnxruntime can be imported, the dense model
runs in it too, in float32 and with its dynamic int8 (weights signed, activations by tensor). One thread.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.evaluation.bench import interleave
from benchmarks.drawn import SMOLLM2, VOCABULARY, N, converted, drawn
from benchmarks.machine import machine

PAST, BASE = 128, "Inductor, dense float32"  # tokens in a decoder's cache


class Mlp(nn.Module):
    """An MLP and its bypass; a gated one is that of a decoder."""

    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.first, self.down = nn.Linear(width, hidden, bias=not gated), nn.Linear(hidden, width, bias=not gated)
        self.up = nn.Linear(width, hidden, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x)) if self.up is None else F.silu(self.first(x)) * self.up(x)
        return x + self.down(h)


class Step(nn.Module):
    """One more token of a decoder of SmolLM2-135M's sizes, from keys and values [2, layers, B, heads, tokens, 64]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"num_hidden_layers": layers, "vocab_size": 49_152, "tie_word_embeddings": True}
        self.model = LlamaForCausalLM(LlamaConfig(**SMOLLM2, **sizes))

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(zip(*past, strict=True)):
            cache.update(keys, values, layer)
        return self.model(tokens, past_key_values=cache, use_cache=True).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mlp", "vit", "bert", "decoder", "decode"))
    sizes = {"width": 768, "hidden": 3072, "tokens": 1576, "batch": 8, "rounds": 9, "layers": 30}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gated", action="store_true")
    parser.add_argument("--weights", choices=("int8", "int4"), nargs="+", default=("int8",))
    parser.add_argument("--rest", action="store_true")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--bfloat16-attention", action="store_true")
    parser.add_argument("--sites", choices=("mlp", "attn"), nargs="+", default=("mlp", "attn"))
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        dense, x = built(chosen)
        base = torch.compile(dense.eval())
        calls: dict[str, Callable[[], object]] = {BASE: lambda: base(*x)}
        for to in chosen.weights:
            options = {"bfloat16_attention": chosen.bfloat16_attention}
            calls |= contenders(quantised(dense, x, chosen, to), x, to, options)
        calls |= in_onnxruntime(dense, x, Path(folder))
        for name, timing in interleave(calls, base=BASE, rounds=chosen.rounds).items():
            print(f"| {name} | {timing.time_ms:.1f} ms | {timing.ratio:.3f} |", flush=True)


def built(chosen: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The dense model and its inputs."""
    if chosen.what == "mlp":
        return Mlp(chosen.width, chosen.hidden, chosen.gated), (torch.randn(chosen.tokens, chosen.width),)
    if chosen.what == "decode":
        past = torch.randn(2, chosen.layers, chosen.batch, SMOLLM2["num_key_value_heads"], PAST, 64)
        return Step(chosen.layers), (torch.randint(0, VOCABULARY, (chosen.batch, 1)), past)
    return drawn(chosen.what, batch=chosen.batch, tokens=chosen.tokens)


def quantised(dense: nn.Module, x: tuple[Tensor, ...], chosen: argparse.Namespace, to: Any) -> nn.Module:
    """The model with ACMs whose gates choose every k, quantised to that type."""
    model = converted(dense, x, chosen.sites)
    acm.quantize(model, to, rest=chosen.rest, include="model.lm_head" if chosen.head else ())
    if chosen.what == "decode":  # a prompt was read, for which weights were packed
        for k in range(1, N + 1):
            acm.set_k(model, k)
            model(x[0].expand(-1, 32 // chosen.batch + 1), x[1])
    return model


def contenders(
    model: nn.Module, x: tuple[Tensor, ...], to: str, options: dict[str, bool]
) -> dict[str, Callable[[], object]]:
    """The quantised model at every k and, as its gates choose, mixed."""
    compiled = torch.compile(model, backend="acm", options=options)

    def at_k(k: int | None) -> Callable[[], object]:
        def call() -> object:
            acm.set_k(model, k)
            return compiled(*x)

        return call

    return {f"{to}, k = {k} of {N}": at_k(k) for k in range(1, N + 1)} | {f"{to}, mixed": at_k(None)}


def in_onnxruntime(dense: nn.Module, x: tuple[Tensor, ...], folder: Path) -> dict[str, Callable[[], object]]:
    """The dense model in ONNX Runtime; nothing where that is not installed."""
    try:
        import onnxruntime
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        return {}
    file, small = folder / "dense.onnx", folder / "int8.onnx"
    torch.onnx.export(dense, x, file, dynamo=True, verbose=False, external_data=False)
    products = ["MatMul", "Gemm"]  # and no embeddings, which each call would make floats of
    extra = {"DefaultTensorType": 1}
    quantize_dynamic(file, small, op_types_to_quantize=products, weight_type=QuantType.QInt8, extra_options=extra)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    calls: dict[str, Callable[[], object]] = {}
    for name, path in (("ONNX Runtime, float32", file), ("ONNX Runtime, dynamic int8", small)):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = {place.name: tensor.numpy() for place, tensor in zip(session.get_inputs(), x, strict=True)}
        calls[name] = lambda session=session, given=given: session.run(None, given)
    return calls


if __name__ == "__main__":
    main()
