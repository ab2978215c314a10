"""Passes of the unmodified model over calibration data: one forward and one backward per batch feed all records."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, tokens
from acm_compiler.acm.precision import own_types
from acm_compiler.calibration.damage import Answer, answers, energy, random_projection
from acm_compiler.calibration.examples import mask_in, run
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.errors import TrainingFailed, UsageError
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.dense_region import broken_weights
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.masks import real_tokens
from acm_compiler.runtime.measure_budgets import Example

# torch's words for an operator without a gradient: of a library, of `torch.library.custom_op`, of its own
_UNREGISTERED = "an autograd kernel was not registered"
_NO_FORMULA = re.compile(
    rf"(\S+): {_UNREGISTERED}|backward through (\S+)\.\w+ but no autograd formula|"
    r"derivative for (\S+) is not implemented"
)


@dataclass(slots=True, kw_only=True)
class Seen:
    """Totals of a pass: examples, the squared norm of the model's outputs, and the presence of gradients."""

    examples: int = 0
    energy: float = 0.0
    has_gradients: bool = False


def observe(
    found: Rewritten,
    examples: Iterable[Example],
    records: Mapping[str, SiteRecord],
    *,
    answer: Answer,
    seed: int,
    projections: int = 1,
) -> Seen:
    """Run the unmodified model on every example and let `records` (by site name) see their sites.

    Gradients are those of so many random `projections` of the output, one after the other, each over the root of their
    number: squares of gradients, summed up, expect what those of one would, with less noise.
    The model must be in eval mode. No tap, hook, gradient or flag stays on it. TrainingFailed on values that are not
    finite.
    """
    seen = Seen()
    with tapped(found.acms, records) as taps, _differentiable(found) as carriers:
        for example in examples:
            taps.mask_BS, taps.first = mask_in(found.model, example), seen.examples
            with batch_context(found.model, mask=example[1]):
                outputs = answers(run(found, example[0]), answer, taps.mask_BS)
                for number in range(projections):
                    loss = random_projection(outputs, taps.mask_BS, first=seen.examples, seed=seed, number=number)
                    if loss.requires_grad:
                        seen.has_gradients = True
                        wanted, more = [*carriers, *taps.leaves], number < projections - 1
                        _differentiate(loss / projections**0.5, wanted, more)
            taps.leaves.clear()
            _settle(found, records)
            seen.examples += outputs[0].shape[0]
            seen.energy += energy([t.detach() for t in outputs], taps.mask_BS)
    return seen


def _differentiate(loss: Tensor, wanted: list[Tensor], more: bool) -> None:
    """Run the gradient's hooks; UsageError where the model overwrote what a gradient needs, or an operator has none."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", f".*{_UNREGISTERED}")  # torch goes on, with no gradient or a wrong one
            torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=more)
    except (RuntimeError, UserWarning) as error:
        if without := _NO_FORMULA.search(str(error)):
            operator = next(filter(None, without.groups())).replace(".", "::")  # as it is registered
            raise UsageError(
                "an operator of the model has no gradient, and calibration asks for gradients",
                found=operator,
                fix=f"register one: torch.library.register_autograd({operator!r}, backward); or plan without the sites "
                "before it: acm.plan(..., exclude=...)",
            ) from error
        if "modified by an inplace operation" not in str(error):
            raise
        raise UsageError(
            "the model overwrites values that its gradients need, and calibration asks for gradients",
            found=str(error).partition(". Hint:")[0],
            fix="write x = x + f(x) in the model's forward where it says x += f(x)",
        ) from error


def _settle(found: Rewritten, records: Mapping[str, SiteRecord]) -> None:
    """After a batch: TrainingFailed where a site saw what is not finite, at the weights that this came from, if any."""
    try:
        for record in records.values():
            record.settle()
    except TrainingFailed as seen:
        broken = broken_weights(found)
        if not broken:
            raise
        name, tensor = next(iter(broken.items()))
        more = f"; {len(broken) - 1} more of the model's weights are broken" if len(broken) > 1 else ""
        raise TrainingFailed(
            "the model's own weights are not finite",
            where=name,
            found=f"nan or infinity in {int((~tensor.isfinite()).sum()):,} of {tensor.numel():,} values{more}",
            fix="load or train the model anew before the rewrite: nothing can be fitted to such weights",
        ) from seen


class _Taps:
    """State shared by the taps of one pass."""

    def __init__(self, records: Mapping[str, SiteRecord]) -> None:
        self.records = records
        self.mask_BS: Tensor | None = None
        self.first = 0
        self.leaves: list[Tensor] = []

    def __call__(self, acm: ACM, x: Tensor, output: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint's recomputation
        if torch.is_grad_enabled() and not output.requires_grad:
            self.leaves.append(output.requires_grad_())
        record = self.records.get(acm.name)
        if record is not None:
            x_TD, real_T = x.detach().reshape(-1, x.shape[-1]), real_tokens(acm, x, self.mask_BS)
            example_T = tokens.examples(x.shape[:-1], acm.layout, site=acm.name).to(x.device) + self.first
            with own_types():  # the model may autocast by itself
                record.take(x_TD, output, real_T, example_T)


@contextmanager
def tapped(acms: Mapping[str, ACM], records: Mapping[str, SiteRecord]) -> Iterator[_Taps]:
    """While open, every ACM passes its dense region's output on, and `records` see theirs."""
    taps = _Taps(records)
    try:
        for acm in acms.values():
            acm.tap = taps
        yield taps
    finally:
        for acm in acms.values():
            acm.tap = None


@contextmanager
def _differentiable(found: Rewritten) -> Iterator[list[nn.Parameter]]:
    """Inside, gradients flow from the model's output to every ACM's, and to as few parameters as that takes.

    One small parameter per dense region requires gradients, so that the region's output has a graph and may be worked
    on in place; no other does. Yields those parameters.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in found.model.parameters()]
    carriers = {id(p): p for acm in found.acms.values() if (p := _smallest(acm.dense)) is not None}
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in carriers)
        with torch.enable_grad():
            yield list(carriers.values())
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _smallest(region: nn.Module | None) -> nn.Parameter | None:
    parameters = [] if region is None else [p for p in region.parameters() if p.is_floating_point()]
    return min(parameters, key=lambda p: p.numel(), default=None)


def reading(examples: Iterable[Example], report: Callable[[int], None]) -> Iterator[Example]:
    """The same examples; `report` is called with the number of each once it has been used."""
    for number, example in enumerate(examples, start=1):
        yield example
        report(number)
