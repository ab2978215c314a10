"""Time and MACs of a converted model against the dense one, per budget and batch size, after its outputs were verified.

Contenders run in turns, so that other load on the machine hits all of them alike. With one thread the clock is the
processor time of this process; with several it is the wall clock.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm.precision import to_float64
from acm_compiler.backend.explanation import without_remarks
from acm_compiler.calibration.answer import without_masked
from acm_compiler.errors import VerificationFailed
from acm_compiler.evaluation.times import BASE, OURS, Row
from acm_compiler.passes.capture.forward import output_of
from acm_compiler.passes.capture.normalize import disable_fast_path
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.runtime.control import set_budget, set_k
from acm_compiler.runtime.usage import record
from acm_compiler.sources.inputs import Inputs, call_model

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative norm of the difference between compiled and eager outputs of a whole model, k given."""

INT8_TOLERANCE = 1e-2
"""The same for quantised learners: rounded otherwise, a value between two integers becomes the other one."""

Answer = Callable[[Any], Tensor]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Contenders: the dense and the converted model, each as it is and compiled with the same settings."""

    dense: nn.Module
    converted: nn.Module
    dense_compiled: Any
    compiled: Any
    quantized: nn.Module | None
    answer: Answer

    @staticmethod
    def of(dense: nn.Module, converted: nn.Module, answer: Answer) -> Contest:
        """The contest between two models in eval mode; nothing is compiled before the first call."""
        return Contest(
            dense=dense.eval(),
            converted=converted.eval(),
            dense_compiled=torch.compile(dense, backend="inductor", dynamic=True),
            compiled=torch.compile(converted, backend="acm", dynamic=True),
            quantized=int8(dense),
            answer=answer,
        )


@without_remarks()
def check_answers(contest: Contest, inputs: Inputs) -> float:
    """The largest relative error of the compiled converted model against the eager one, over every k.

    VerificationFailed, naming the k, when it exceeds the tolerance of the outputs' type.
    """
    largest = max(acm.count for acm in sites(contest.converted).values())
    limit, worst = TOLERANCE[next(contest.converted.parameters()).dtype], 0.0
    if conversion(contest.converted).quantized is not None:
        limit = max(limit, INT8_TOLERANCE)
    with torch.no_grad():
        for k in range(largest + 1):
            set_k(contest.converted, k)
            error = _error(contest, inputs)
            if not error <= limit:
                raise VerificationFailed(
                    "the compiled model's outputs differ from the eager one's",
                    where=f"k = {k}",
                    found=f"relative error {error:.1e}",
                    expected=f"at most {limit:.0e}",
                    fix="ACM_CHECK=1 names the first site that differs",
                )
            worst = max(worst, error)
    set_k(contest.converted, None)
    return worst


@without_remarks()
def measure_model(
    contest: Contest,
    batches: Iterable[tuple[int, Inputs]],
    *,
    budgets: Sequence[float],
    rounds: int = 11,
    progress: Progress | None = None,
) -> list[Row]:
    """One row per contender, batch size and budget; the dense ones stand in the first budget's run.

    batches: (batch size, inputs). The budget of the converted model is left as the last one measured.
    """
    rows = []
    with torch.no_grad():
        for batch, inputs in batches:
            for place, budget in enumerate(budgets):
                set_budget(contest.converted, budget)
                if progress is not None:
                    progress(f"batch {batch}, budget {budget:g}")
                rows += _measure(contest, inputs, batch=batch, budget=budget, with_dense=place == 0, rounds=rounds)
    return rows


def break_even(rows: Sequence[Row], budget: float) -> int | None:
    """The smallest measured batch from which on compiled ACMs are faster than dense Inductor, upper quartiles too."""
    found = None
    ours = [row for row in rows if row.contender == OURS and row.budget == budget]
    for row in sorted(ours, key=lambda row: -row.batch):
        if row.ratio_q3 >= 1:
            break
        found = row.batch
    return found


def _measure(
    contest: Contest, inputs: Inputs, *, batch: int, budget: float, with_dense: bool, rounds: int
) -> list[Row]:
    contenders: dict[str, Any] = {BASE: contest.dense_compiled}
    if with_dense:
        contenders["dense eager"] = contest.dense
        if contest.quantized is not None:
            contenders["dense int8"] = contest.quantized
    contenders |= {"acm eager": contest.converted, OURS: contest.compiled}
    calls = {name: partial(call_model, model, inputs) for name, model in contenders.items()}
    share, error = _mac_ratio(contest.converted, inputs), _error(contest, inputs)
    device = next(contest.converted.parameters()).device
    timings = interleave(calls, base=BASE, rounds=rounds, device=str(device))
    shown = [name for name in timings if with_dense or name.startswith("acm")]
    return [_row(name, timings[name], batch, budget, (share, error)) for name in shown]


def _row(name: str, timing: Timing, batch: int, budget: float, facts: tuple[float, float]) -> Row:
    ours = name.startswith("acm")
    share, error = facts
    return Row(
        batch=batch,
        budget=budget if ours else None,
        contender=name,
        mac_ratio=share if ours else 1.0,
        error=error if name == OURS else None,
        **asdict(timing),
    )


def _mac_ratio(model: nn.Module, inputs: Inputs) -> float:
    """Executed MACs over the dense model's, gates included, on these inputs."""
    with record(model) as usage:
        call_model(model, inputs)
    return usage.model_share


def _error(contest: Contest, inputs: Inputs) -> float:
    """Relative norm of the difference between the compiled and the eager converted model."""
    eager = to_float64(contest.answer(output_of(contest.converted, inputs)))
    compiled = to_float64(contest.answer(call_model(contest.compiled, inputs)))
    compiled, eager = without_masked(compiled, eager)
    return float((compiled - eager).norm() / eager.norm().clamp_min(1e-30))


def int8(dense: nn.Module) -> nn.Module | None:
    """The dense model with int8 linears (dynamic), what a user might pick instead; None where torch cannot.

    torch's int8 linears take float32 on a CPU. Their `weight` and `bias` are methods; here they are the dense model's
    tensors, since models read them to find a type or a device.
    """
    quantization = getattr(torch.ao, "quantization", None)
    linears = [module for module in dense.modules() if isinstance(module, nn.Linear)]
    if quantization is None or next(dense.parameters()).device.type != "cpu":
        return None
    if any(linear.weight.dtype != torch.float32 for linear in linears):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # torch's own call of a function that torch deprecates
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        quantized: nn.Module = quantization.quantize_dynamic(copy.deepcopy(dense), {nn.Linear}, dtype=torch.qint8)
    disable_fast_path(quantized)  # it would compute with those tensors, not in int8
    for name, module in quantized.named_modules():
        if isinstance(module, torch.ao.nn.quantized.dynamic.Linear):
            linear = dense.get_submodule(name)
            vars(module).update(weight=linear.weight, bias=linear.bias)
    return quantized


Call = Callable[[], object]
_LEAST_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender: median milliseconds of a call, and quartiles of its ratio to the base measured right before."""

    time_ms: float
    ratio: float
    ratio_q1: float
    ratio_q3: float


def interleave(
    calls: Mapping[str, Call], *, base: str, rounds: int = 11, warmup: int = 2, device: str = "cpu"
) -> dict[str, Timing]:
    """Every contender in turn, right after a run of `base`, `rounds` times; times of short calls are means of many.

    The ratio of a round is the contender's time over the mean of the base runs before and after it. device: where the
    calls run.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    repeats = max(1, round(_LEAST_S / max(_seconds(calls[base], 1, device), 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    before = _seconds(calls[base], repeats, device)
    for turn in range(rounds):
        names = [name for name in calls if name != base]
        for name in names if turn % 2 == 0 else reversed(names):
            seconds = _seconds(calls[name], repeats, device)
            after = _seconds(calls[base], repeats, device)
            times[name].append(seconds)
            times[base].append(after)
            ratios[name].append(2 * seconds / (before + after))
            before = after
    ratios[base] = [1.0]
    return {name: _summary(times[name] or [before], ratios[name]) for name in calls}


def clock(device: str = "cpu") -> tuple[str, Callable[[], float]]:
    """The clock's name and the clock."""
    alone = device == "cpu" and torch.get_num_threads() == 1
    return ("processor time", time.process_time) if alone else ("wall time", time.perf_counter)


def _seconds(call: Call, repeats: int, device: str) -> float:
    _, now = clock(device)
    _finish(device)
    start = now()
    for _ in range(repeats):
        call()
    _finish(device)
    return (now() - start) / repeats


def _finish(device: str) -> None:
    """Wait for what an accelerator was given; its calls return before they are done."""
    if device != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def _summary(times: list[float], ratios: list[float]) -> Timing:
    q1, middle, q3 = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return Timing(time_ms=1000 * statistics.median(times), ratio=middle, ratio_q1=q1, ratio_q3=q3)
