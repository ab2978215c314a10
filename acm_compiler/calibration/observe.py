"""Passes of the unmodified model over calibration data: one forward and one backward per batch feed all records."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from acm_compiler.acm import ACM, tokens
from acm_compiler.acm.context import examples_of
from acm_compiler.acm.precision import FastLinears, exactly, no_autocast
from acm_compiler.calibration.answer import answers, energy, mask_in, random_directions, run
from acm_compiler.calibration.examples import Options, Share, shares, tokens_shape
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.dense_region import DenseWeights, dense_regions_run
from acm_compiler.passes.rewrite.freed_memory import has_room
from acm_compiler.passes.rewrite.offload import trim
from acm_compiler.runtime import ranks
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.sources.inputs import Example, ForwardEnded

# torch's words for an operator without a gradient: of a library, of `torch.library.custom_op`, of its own
_UNREGISTERED = "an autograd kernel was not registered"
_NO_FORMULA = re.compile(
    rf"(\S+): {_UNREGISTERED}|backward through (\S+)\.\w+ but no autograd formula|"
    r"derivative for (\S+) is not implemented"
)


@dataclass(slots=True, kw_only=True)
class PassTotals:
    """Totals of a pass: examples, those judged by their outputs, whose squared norm, and the presence of gradients."""

    examples: int = 0
    judged: int = 0
    energy: float = 0.0
    has_gradients: bool = False


def observe(
    found: Rewritten,
    examples: Iterable[Example],
    records: Mapping[str, SiteRecord],
    options: Options,
    *,
    enough: Callable[[], bool] = lambda: False,
    apart: bool = False,
) -> PassTotals:
    """Run the unmodified model on every example and let `records` (by site name) see their sites.

    Gradients are those along a random direction of the answer for each of the `backward_passes`, over the root of
    their number: squares of gradients, summed up, expect what those of one would, with less noise. Once `enough()` is
    true before a batch, it and the rest are run forward alone, for the moments, and no further than to the last site
    if every batch before called the sites as often as the plan says. `apart` runs batches with gradients in parts, and
    several processes run a share of each batch, see `shares`: records and totals are then of what each saw, but for
    numbers of examples and tokens, until they are joined.
    The model must be in eval mode. No tap, hook, gradient or flag stays on it. TrainingFailed on values that are not
    finite.
    """
    seen = PassTotals()
    with _tapped(found.acms, records) as taps, _differentiable(found):
        for share, alone in _in_turn(examples, taps, enough, apart=apart):
            mask_BS = None if share.example is None else mask_in(found.model, share.example)
            taps.begin(mask_BS, first=seen.examples + share.before, forward_alone=alone)
            if share.example is not None:
                _observe_share(found, share.example, taps, seen, options)
            _flush(records, taps, seen, share)
    return seen


def _in_turn(
    examples: Iterable[Example], taps: _Taps, enough: Callable[[], bool], *, apart: bool
) -> Iterator[tuple[Share, bool]]:
    """Shares of batches that are run at once, and True with those that are run forward alone."""
    lengths: set[tuple[int, ...]] = set()
    for example in examples:
        alone = taps.forward_alone or enough()
        takes_any_length = len(lengths) > 1
        for share in shares(example, apart=apart, forward_alone=alone, shortened=takes_any_length):
            yield share, alone
        lengths.add(tokens_shape(example)[1:])


def _observe_share(found: Rewritten, example: Example, taps: _Taps, seen: PassTotals, options: Options) -> None:
    """Run the model on what is run at once, and add up what its output and its gradients say."""
    grads = torch.set_grad_enabled(not taps.forward_alone)
    with batch_context(found.model, mask=example[1]), grads, suppress(ForwardEnded):
        with FastLinears() if options.precision == "bf16" else nullcontext():
            output = run(found, example[0])
        if not taps.forward_alone:
            taps.as_planned &= taps.calls == taps.planned
            outputs = answers(output, options.answer, taps.mask_BS)
            del output  # may be the largest tensor of all, and this batch's is of no use to the next
            draw = partial(random_directions, outputs, taps.mask_BS, first=taps.first, seed=options.seed)
            seen.has_gradients |= _differentiate_all(outputs, draw, options.backward_passes, taps.edges)
            seen.judged += outputs[0].shape[0]
            seen.energy += energy([t.detach() for t in outputs], taps.mask_BS)


def _flush(records: Mapping[str, SiteRecord], taps: _Taps, seen: PassTotals, share: Share) -> None:
    """Let records take in what all processes ran at once."""
    examples = 0 if share.example is None else share.before + taps.examples
    every = ranks.gathered((examples, {name: record.calls for name, record in records.items()}))
    for name, record in records.items():
        stream = ranks.stream([calls[name] for _, calls in every], cut=share.cut)
        record.flush(stream, forward_alone=taps.forward_alone)
    trim(hold=taps.forward_alone or has_room())
    seen.examples += max(examples for examples, _ in every)


def _differentiate_all(
    outputs: list[Tensor], draw: Callable[..., list[Tensor]], count: int, wanted: list[GradientEdge]
) -> bool:
    """Run the gradient's hooks for each of `count` directions that are drawn; False where outputs have no gradient."""
    places = [place for place, output in enumerate(outputs) if output.requires_grad]
    if not places or not wanted:
        return False
    for number in range(count):
        drawn = draw(number=number)
        scaled = [drawn[place].div_(count**0.5) for place in places]
        _differentiate([outputs[place] for place in places], scaled, wanted, more=number < count - 1)
        del drawn, scaled  # before the next ones are drawn
    return True


def _differentiate(outputs: Sequence[Tensor], along: Sequence[Tensor], wanted: list[GradientEdge], more: bool) -> None:
    """Run the hooks of gradients at the sites' outputs: where only these are wanted, none of a weight is computed.

    UsageError where the model overwrote what a gradient needs, or an operator has none.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", f".*{_UNREGISTERED}")  # torch goes on, with no gradient or a wrong one
            torch.autograd.grad(outputs, wanted, along, allow_unused=True, retain_graph=more)
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


class _Taps:
    """State shared by the taps of one pass."""

    def __init__(self, records: Mapping[str, SiteRecord]) -> None:
        self.records = records
        self.planned = sum(record.site.calls for record in records.values())
        self.as_planned, self.forward_alone = True, False
        self.hidden: dict[str, Tensor] = {}
        self.begin(None, first=0, forward_alone=False)

    def begin(self, mask_BS: Tensor | None, *, first: int, forward_alone: bool) -> None:
        """Expect examples with this mask, the first of which has the number `first`."""
        self.mask_BS, self.first, self.forward_alone = mask_BS, first, forward_alone
        self.examples = self.calls = 0
        self.edges: list[GradientEdge] = []

    def __call__(self, acm: ACM, x: Tensor, output: Tensor) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint's recomputation
        if torch.is_grad_enabled():
            # an edge names the value as it is now, even where the model works on it in place afterwards
            self.edges.append(get_gradient_edge(output if output.requires_grad else output.requires_grad_()))
        record = self.records.get(acm.name)
        if record is not None:
            x_TD, real_T = x.detach().reshape(-1, x.shape[-1]), _real_tokens(acm, x, self.mask_BS)
            layout = acm.layout_of(x.shape[:-1])
            example_T = tokens.examples(x.shape[:-1], layout, site=acm.name)
            packed = layout is not None and layout.is_packed  # then the call alone tells
            count = examples_of(acm.conversion) if packed else int(example_T[-1:].sum()) + 1
            self.examples = max(self.examples, count or 1)
            self.calls += 1
            h_TF = self.hidden.pop(acm.name, None)
            with no_autocast(), exactly():  # the model may autocast by itself
                if self.forward_alone:
                    record.add_moments(x_TD, real_T, h_TF)
                else:
                    record.take(x_TD, output, real_T, example_T.to(x.device) + self.first, h_TF)
            if self.forward_alone and self.as_planned and self.calls == self.planned:
                raise ForwardEnded

    def watch(self, acm: ACM) -> RemovableHandle | None:
        """Keep what the last linear of an MLP's dense region is given, where that is a module.

        Not what another floating type had a part in: the model's, which the record's is wider than, or autocast's.
        """
        record = self.records.get(acm.name)
        last = None if record is None or acm.dense is None else _last_module(acm.dense, record.dense)

        def keep(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            same = record is not None and inputs and inputs[0].dtype == record.dense.first[0][0].dtype
            if same and not torch.is_autocast_enabled(inputs[0].device.type):
                self.hidden[acm.name] = inputs[0].detach().flatten(0, -2)

        return None if last is None else last.register_forward_pre_hook(keep)


def _fits(acm: ACM, shape: torch.Size, mask_BS: Tensor) -> bool:
    """True if `mask_BS` masks the tokens of an input [*shape, D] of this site."""
    return mask_BS.shape == tokens.size_of_mask(shape, acm.layout_of(shape))


def _real_tokens(acm: ACM, x: Tensor, mask_BS: Tensor | None) -> Tensor | None:
    """True at the real tokens of `x` [..., D], flat [T]; None: all are.

    A mask given by `acm.batch` must fit. That of the call, `mask_BS`, need not: it may speak of the other half
    of an encoder-decoder; then all tokens count here.
    """
    given_T = acm.mask_of(x.shape[:-1])
    if given_T is not None or mask_BS is None or not _fits(acm, x.shape[:-1], mask_BS):
        return given_T
    return tokens.of_mask(mask_BS.to(x.device), x.shape[:-1], acm.layout_of(x.shape[:-1]), site=acm.name)


@contextmanager
def _tapped(acms: Mapping[str, ACM], records: Mapping[str, SiteRecord]) -> Iterator[_Taps]:
    """While open, every ACM passes its dense region's output on, and `records` see theirs."""
    taps = _Taps(records)
    with dense_regions_run(acms.values(), taps), ExitStack() as watched:
        for handle in filter(None, map(taps.watch, acms.values())):
            watched.callback(handle.remove)
        yield taps


def _last_module(region: nn.Module, dense: DenseWeights) -> nn.Module | None:
    """The nn.Linear of the region that computes its output from the hidden activation, None where there is none."""
    if dense.last is None:
        return None
    linears = (module for module in region.modules() if type(module) is nn.Linear)
    return next((linear for linear in linears if linear.weight.data_ptr() == dense.last[0].data_ptr()), None)


@contextmanager
def _differentiable(found: Rewritten) -> Iterator[None]:
    """Inside, gradients flow from the model's output to every ACM's.

    One small parameter per dense region requires gradients, so that the region's output has a graph and may be worked
    on in place; no other does.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in found.model.parameters()]
    carriers = {id(p) for acm in found.acms.values() if (p := _smallest(acm.dense)) is not None}
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in carriers)
        with torch.enable_grad():
            yield
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
