"""CPU times of int8 learners, as ratios to what Inductor makes of the dense float32 model, interleaved in one run.

    python benchmarks/int8.py mlp [--width 768 --hidden 3072 --tokens 1576 --gated]     one MLP
    python benchmarks/int8.py vit [--batch 8]       all of ViT-B, MLPs and q, k, v, o converted
    python benchmarks/int8.py bert [--batch 8]      six BERT layers of width 384, 128 tokens an example
    python benchmarks/int8.py decoder [--tokens 512]     six decoder layers of SmolLM2-135M's sizes, without a cache
    python benchmarks/int8.py decode [--batch 8]    one more token after 128 cached ones, all of SmolLM2-135M's sizes

--sites mlp converts MLPs alone; --rest makes the linears around the ACMs int8, too, but for output heads, --head
those as well; --weights int8 int4 measures both; --bfloat16-attention is the backend's option of that name.

Weights are drawn: time does not depend on their values, only on k. Where onnxruntime can be imported, the dense model
runs in it too, in float32 and with its dynamic int8 (weights signed, activations by tensor). One thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.evaluation.bench import clock

N = 4
KEY_HEADS, PAST = 3, 128  # of a decoder: heads of keys and values, and tokens in its cache


class Mlp(nn.Module):
    """An MLP and its bypass; a gated one is that of a decoder."""

    def __init__(self, width: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.first, self.down = nn.Linear(width, hidden, bias=not gated), nn.Linear(hidden, width, bias=not gated)
        self.up = nn.Linear(width, hidden, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x)) if self.up is None else F.silu(self.first(x)) * self.up(x)
        return x + self.down(h)


class Bert(nn.Module):
    """transformers' BERT of the size of MiniLM, which gives one tensor."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
        self.model = BertModel(BertConfig(**sizes), add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens).last_hidden_state


class Decoder(nn.Module):
    """Layers of a decoder of the sizes of SmolLM2-135M, which give one tensor."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 6, "vocab_size": 49_152}
        config = LlamaConfig(**sizes, num_attention_heads=9, num_key_value_heads=3, use_cache=False)
        self.model = LlamaModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).last_hidden_state


class Step(nn.Module):
    """One more token of a decoder of SmolLM2-135M's sizes, from keys and values [2, layers, B, heads, tokens, 64]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": layers, "vocab_size": 49_152}
        heads = {"num_attention_heads": 9, "num_key_value_heads": KEY_HEADS, "tie_word_embeddings": True}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))

    def forward(self, tokens: Tensor, past: Tensor) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(zip(*past, strict=True)):
            cache.update(keys, values, layer)
        return self.model(tokens, past_key_values=cache, use_cache=True).logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("mlp", "vit", "bert", "decoder", "decode"))
    for name, default in (
        ("width", 768),
        ("hidden", 3072),
        ("tokens", 1576),
        ("batch", 8),
        ("rounds", 9),
        ("layers", 30),
    ):
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
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, 1 thread, {clock()[0]}, {os.getloadavg()[0]}"
    )
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        dense, x = built(chosen)
        base = torch.compile(dense.eval())
        calls: dict[str, Callable[[], object]] = {"Inductor, dense float32": lambda: base(*x)}
        for to in chosen.weights:
            converted = quantised(dense, x, chosen, to)
            calls |= contenders(converted, x, to, {"bfloat16_attention": chosen.bfloat16_attention})
        report(calls | in_onnxruntime(dense, x, Path(folder)), chosen.rounds)


def built(chosen: argparse.Namespace) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The dense model and its inputs."""
    if chosen.what == "bert":
        return Bert(), (torch.randint(0, 30_000, (chosen.batch, 128)),)
    if chosen.what == "decoder":
        return Decoder(), (torch.randint(0, 30_000, (1, chosen.tokens)),)
    if chosen.what == "decode":
        past = torch.randn(2, chosen.layers, chosen.batch, KEY_HEADS, PAST, 64)
        return Step(chosen.layers), (torch.randint(0, 30_000, (chosen.batch, 1)), past)
    if chosen.what == "vit":
        from torchvision.models import vit_b_16

        return vit_b_16(), (torch.randn(chosen.batch, 3, 224, 224),)
    return Mlp(chosen.width, chosen.hidden, chosen.gated), (torch.randn(chosen.tokens, chosen.width),)


def quantised(dense: nn.Module, x: tuple[Tensor, ...], chosen: argparse.Namespace, to: Any) -> nn.Module:
    """The model with ACMs whose gates choose every k, quantised to that type."""
    plan = acm.plan(dense, x, sites=tuple(chosen.sites), learners=N, init="random")
    converted = acm.rewrite(dense, plan).eval()
    for site in acm.sites(converted).values():
        site.gate.outer.weight.mul_(30)
    acm.quantize(converted, to, rest=chosen.rest, include="model.lm_head" if chosen.head else ())
    if chosen.what == "decode":  # a prompt was read, for which weights were packed
        for k in range(1, N + 1):
            acm.set_k(converted, k)
            converted(x[0].expand(-1, 32 // chosen.batch + 1), x[1])
    return converted


def contenders(
    converted: nn.Module, x: tuple[Tensor, ...], to: str, options: dict[str, bool]
) -> dict[str, Callable[[], object]]:
    """The quantised model at every k and, as its gates choose, mixed."""
    compiled = torch.compile(converted, backend="acm", options=options)

    def at_k(k: int | None) -> Callable[[], object]:
        def call() -> object:
            acm.set_k(converted, k)
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


def report(calls: dict[str, Callable[[], object]], rounds: int) -> None:
    """Print median CPU times, in turn, so that other work on the machine meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    base = median(next(iter(times.values())))
    for name, measured in times.items():
        print(f"| {name} | {median(measured) * 1e3:.1f} ms | {median(measured) / base:.3f} |", flush=True)


if __name__ == "__main__":
    main()
