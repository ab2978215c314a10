"""CPU times of ONNX files in ONNX Runtime beside the dense model's, per budget, in turn in one run; one thread.

    python -m benchmarks.onnx_times mlps [--batch 8]     two MLPs of ViT-B's width, 197 tokens each, drawn weights
    python -m benchmarks.onnx_times vit [--batch 8]      ViT-B, MLPs and q, k, v, o converted, drawn weights
    python -m benchmarks.onnx_times DIR [--batch 8]      what `acmc rewrite` wrote of minilm_embed, or the like

Files: the dense model; the export whose budget is an input; the same with all learners run, those not chosen times
zero (`masked`); a fixed k; and the first two after ONNX Runtime's `quantize_dynamic`, gates left as they are. Beside
them the converted model in torch, compiled. For an int8 file the relative error of its output to that of its floats.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import acm_compiler as acm
from acm_compiler.acm.arguments import LearnersArguments, Weights
from acm_compiler.acm.ops import LEARNERS
from acm_compiler.acm.reference import branchless_output
from acm_compiler.evaluation.bench import Timing, interleave
from acm_compiler.exporting.fixed import Plain
from acm_compiler.exporting.onnx import OPERATORS
from acm_compiler.runs.opened import open_saved_run
from benchmarks.drawn import N, converted, drawn
from benchmarks.machine import machine
from benchmarks.tokens_per_second import prompts

TOKENS = 128
BUDGETS = tuple(k / N for k in range(1, N + 1))
Call = Callable[[], Any]
Key = tuple[str, float | None]  # name and budget, None of the dense model
DENSE = "dense", None


class Mlps(nn.Module):
    """Two residual MLPs of the width of ViT-B."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return x


def of_random_weights(what: str, batch: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """A model of drawn weights, a converted copy whose gates choose every k, and an input."""
    dense, (x,) = drawn("vit", batch=batch)
    if what == "mlps":
        dense, x = Mlps(), torch.randn(batch, 197, 768)
    model = converted(dense, (x,), ("mlp",) if what == "mlps" else ("mlp", "attn"))
    acm.recalibrate(model, [torch.randn(2, *x.shape[1:]) for _ in range(3)], tokens=1_000)
    return dense, model, {"x": x}


def saved(folder: Path, batch: int) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """The dense model of a saved one, the converted model, and held-out text in rows of 128 tokens."""
    run = open_saved_run(folder)
    assert run.dense is not None
    ids = prompts(run, batch, TOKENS)
    return run.dense.eval(), run.model.eval(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def masked(x: Tensor, *tensors: Any, form: str, act: str) -> Tensor:
    """`acm::learners` as all learners for all tokens, those not chosen times zero."""
    call = LearnersArguments(x, *tensors)
    return branchless_output(call.x, call.k, Weights.of(call, form=form, act=act))


def as_int8(file: Path) -> Path:
    """The file after `quantize_dynamic`, gates left as they are."""
    small = file.with_name("int8.onnx")
    nodes = onnx.load(file, load_external_data=False).graph.node
    gates = [node.name for node in nodes if any(".gate." in name for name in node.input)]
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(file, small, weight_type=QuantType.QInt8, nodes_to_exclude=gates, extra_options=options)
    return small


def session(file: Path, inputs: dict[str, Tensor], budget: float | None = None) -> Call:
    """A call of the file in ONNX Runtime, which gives its first output."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    run = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    given = {value.name: tensor.numpy() for value, tensor in zip(run.get_inputs(), inputs.values(), strict=False)}
    if budget is not None:
        given["budget"] = torch.tensor(budget).numpy()
    return lambda: torch.from_numpy(run.run(None, given)[0])


def files(dense: nn.Module, model: nn.Module, inputs: dict[str, Tensor], folder: Path) -> dict[str, Path]:
    """All files by their names in the table."""
    made = {"dense": folder / "dense.onnx"}
    torch.onnx.export(
        Plain(dense).eval(), (), made["dense"], kwargs=inputs, dynamo=True, verbose=False, external_data=False
    )
    started = time.process_time()
    made["budget"] = acm.export(model, folder / "budget", inputs, "onnx")
    print(f"the export took {time.process_time() - started:.0f} s of the processor", flush=True)
    for k in range(1, N + 1):
        made[f"k = {k}"] = acm.export(model, folder / f"k{k}", inputs, "onnx", fixed_k=k)
    ours = OPERATORS[LEARNERS.default]
    OPERATORS[LEARNERS.default] = masked
    made["masked"] = acm.export(model, folder / "masked", inputs, "onnx")
    OPERATORS[LEARNERS.default] = ours
    return made | {f"{name} int8": as_int8(made[name]) for name in ("dense", "budget")}


def in_torch(model: nn.Module, inputs: dict[str, Tensor], budget: float | None = None) -> Call:
    """A call of a compiled model, of the converted one at a budget."""
    compiled = torch.compile(Plain(model).eval(), backend="inductor" if budget is None else "acm")

    def call() -> Any:
        if budget is not None:
            acm.set_budget(model, budget)
        return pytree.tree_leaves(compiled(**inputs))[0]

    return call


def main() -> None:
    """Print a line for each file: times in ms, and ratios to the dense file's, per budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="mlps, vit, or a folder")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"onnxruntime {onnxruntime.__version__}, {machine()}")
    is_drawn = chosen.what in ("mlps", "vit")
    make = of_random_weights if is_drawn else saved
    dense, model, inputs = make(chosen.what if is_drawn else Path(chosen.what), chosen.batch)
    print({name: tuple(tensor.shape) for name, tensor in inputs.items()}, flush=True)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        made = files(dense, model, inputs, Path(folder))
        calls = contenders(made, dense, model, inputs)
        outputs = {key: call() for key, call in calls.items()}
        for key, timing in interleave(calls, base=DENSE, rounds=chosen.rounds).items():
            print(row(key, timing, outputs, made), flush=True)


def contenders(made: dict[str, Path], dense: nn.Module, model: nn.Module, inputs: dict[str, Tensor]) -> dict[Key, Call]:
    """Calls by name and budget."""
    calls: dict[Key, Call] = {}
    for name in ("dense", "dense int8"):
        calls[name, None] = session(made[name], inputs)
    calls["torch dense", None] = in_torch(dense, inputs)
    for k, budget in enumerate(BUDGETS, 1):
        calls["fixed k", budget] = session(made[f"k = {k}"], inputs)
        for name in ("budget", "budget int8", "masked"):
            calls[name, budget] = session(made[name], inputs, budget)
        calls["torch", budget] = in_torch(model, inputs, budget)
    return calls


def row(key: Key, timing: Timing, outputs: dict[Key, Tensor], made: dict[str, Path]) -> str:
    """A line of the table."""
    name, budget = key
    plain = outputs.get((name.removesuffix(" int8"), budget))
    off = f"{float((outputs[key] - plain).norm() / plain.norm()):.4f}" if name.endswith("int8") else "-"
    size = f"{made[name].stat().st_size / 1e6:.1f} MB" if name in made else "-"
    return f"| {name} | {budget or '-'} | {timing.time_ms:.1f} ms | {timing.ratio:.2f} | {size} | {off} |"


if __name__ == "__main__":
    main()
