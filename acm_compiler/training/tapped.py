"""Phases that train each site by itself against the unmodified network: one pass of it feeds all of them.

The model runs under no_grad in eval mode and every ACM passes its dense region's output on. Each site's loss is
computed from that site's input and output when they come by, and its backward runs at once: one site's graph is alive
at a time, whatever the depth. The error of every prefix of the learners is what distill and gate look at.

Shapes: T tokens, D in, O out, N learners, H learner width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.precision import without_autocast
from acm_compiler.acm.reference import hidden, prefix_output
from acm_compiler.data import Batch, BatchStream
from acm_compiler.errors import UsageError, counted
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.passes.rewrite.dense_region import dense_regions_run
from acm_compiler.recipe.phases import TrainedPhase
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.batch_context import padding_watched
from acm_compiler.sources.inputs import call_model, in_mode
from acm_compiler.tasks import Task
from acm_compiler.training.machine import Machine
from acm_compiler.training.phase import Backward, Figures, Group, unique
from acm_compiler.training.sharding import pass_gradients

_LOG = logging.getLogger(__name__)
# site -> its figures as `SiteObjective.loss` gives them, summed over a step
Sums = dict[str, list[float]]


class SiteObjective(Protocol):
    """Parameters that a tapped phase trains, and its loss; `section` is the policy of the phase of that name."""

    name: ClassVar[str]
    section: ClassVar[type[TrainedPhase]]

    def prepare(self, acm: ACM) -> None:
        """Get a site ready when the phase starts."""

    def parameters(self, acm: ACM) -> Iterable[nn.Parameter]:
        """The parameters of one site that are trained."""

    def width(self, acm: ACM) -> int:
        """m, the number of figures that `loss` gives for this site."""

    def loss(self, acm: ACM, x: Tensor, o: Tensor, *, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss summed over real tokens, with its graph, and figures [m] summed over them, for one call of a site.

        x [..., D] is the site's input, o [..., O] the dense region's output, real_T marks real tokens (None: all).
        """

    def figures(self, sums: Sums, losses: dict[str, float]) -> Figures:
        """The figures of a step, from each site's summed figures and its mean loss per token."""

    def complete(self, acm: ACM) -> None:
        """Note on a site that the phase has run to its end."""


class TappedPhase:
    """A `Phase` that trains every site of a model by a `SiteObjective`."""

    answers = False

    def __init__(self, model: nn.Module, objective: SiteObjective, task: Task, machine: Machine, *, batch: int) -> None:
        self.model, self.objective, self.task, self.machine = model, objective, task, machine
        self.name = objective.name
        found = rewritten(model)
        self.every, plan = found.acms, found.plan
        self.acms = _with_targets(self.every, objective)
        # of a sharded model these are parts, in whose place the forward of a site finds whole parameters
        self.parameters = {name: list(objective.parameters(acm)) for name, acm in self.acms.items()}
        self.groups = [Group(parameters=unique(p for own in self.parameters.values() for p in own))]
        # losses are sums until the step ends; a constant near their number of tokens keeps fp16 gradients in range
        self.units = {name: max(1.0, plan.site(name).tokens / plan.model.batch * batch) for name in self.acms}
        self.sums = self._no_sums()

    def prepare(self, batches: BatchStream, steps: int) -> None:
        """Nothing: the unmodified network is in the model."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the model runs as the unmodified network."""
        for acm in self.acms.values():
            self.objective.prepare(acm)
        watched = padding_watched(rewritten(self.model))
        with in_mode(self.model, training=False), dense_regions_run(self.every.values()), watched:
            yield

    def _no_sums(self) -> dict[str, Tensor]:
        """Per site zeros for the loss, the tokens, and the objective's figures."""
        device = self.machine.device
        return {name: torch.zeros(2 + self.objective.width(acm), device=device) for name, acm in self.acms.items()}

    def run(self, batch: Batch, *, backward: Backward, last: bool) -> None:
        """One forward of the unmodified network; a backward at every site on the way."""
        inputs, mask_BS = self.task.call_arguments(batch)
        for acm in self.acms.values():
            acm.tap = self._tap(backward)
        with torch.no_grad(), batch_context(self.model, mask=mask_BS), self.machine.autocast():
            call_model(self.model, inputs)

    def _tap(self, backward: Backward) -> Callable[[ACM, Tensor, Tensor], None]:
        def tap(acm: ACM, x: Tensor, output: Tensor) -> None:
            real_T = acm.mask_of(x.shape[:-1])
            with torch.enable_grad():
                total, shown = self.objective.loss(acm, x, output, real_T=real_T)
                with without_autocast(self.machine.device):
                    backward(total / self.units[acm.name])
            if self.machine.sharded:
                pass_gradients(self.objective.parameters(acm), self.parameters[acm.name])
            tokens = x.shape[:-1].numel() if real_T is None else real_T.sum()
            head = torch.stack([total.detach(), torch.as_tensor(tokens, device=total.device)])
            self.sums[acm.name] += torch.cat([head.float(), shown.detach().float()])

        return tap

    def finish(self) -> Figures:
        """Gradients become those of the mean over all real tokens of all processes, site by site."""
        totals = self.machine.totals(list(self.sums.values()))
        sums: Sums = {name: total.tolist() for name, total in zip(self.sums, totals, strict=True)}
        self.sums = self._no_sums()
        scaled: set[int] = set()
        for name, parameters in self.parameters.items():
            factor = self.units[name] / max(1.0, sums[name][1])
            # what sites share, they share for the same tokens: it is scaled once
            fresh = [p for p in parameters if id(p) not in scaled]
            # sharded gradients were summed as they came
            _scale_gradients(fresh, factor, world=1 if self.machine.sharded else self.machine.world)
            scaled.update(map(id, fresh))
        called = {name: values for name, values in sums.items() if values[1]}
        losses = {name: values[0] / values[1] for name, values in called.items()}
        bad = next((name for name, loss in losses.items() if not math.isfinite(loss)), None)
        if bad is not None:
            return Figures(terms={}, not_finite=f"the loss of site {bad}")
        if not losses:
            return Figures(terms={}, not_finite="no token reached a site; the loss")
        return self.objective.figures({name: values[1:] for name, values in called.items()}, losses)

    def complete(self) -> None:
        """Tell every site."""
        for acm in self.acms.values():
            self.objective.complete(acm)


def _with_targets(acms: Mapping[str, ACM], objective: SiteObjective) -> dict[str, ACM]:
    """The sites whose learners live in the basis of their dense region. UsageError where `objective` needs all sites.

    Slices live in bases of their own, and what they read is turned too: the unmodified network has no target for them.
    """
    own = [name for name, acm in acms.items() if acm.learners.w_out is None]
    if own and (objective.section.teaches_gates or len(own) == len(acms)):
        raise UsageError(
            f"{counted(len(own), 'site')} of slices in a basis of their own, which the unmodified network cannot teach",
            where=own[0],
            fix="leave the phase out: calibrate has fitted their gates, and finetune trains them",
        )
    if own:
        stay = f"{counted(len(own), 'site')} {'stays' if len(own) == 1 else 'stay'}"
        _LOG.info("%s: %s as calibrated, of slices: %s", objective.name, stay, ", ".join(own))
    return {name: acm for name, acm in acms.items() if name not in own}


def _scale_gradients(parameters: list[nn.Parameter], factor: float, *, world: int) -> None:
    """Sum the gradients over processes and multiply them. DDP does not see a backward per site."""
    if world > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world > 1:
        works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
        for work in works:
            assert work is not None
            work.wait()
    if gradients:
        torch._foreach_mul_(gradients, factor)


def prefix_errors(
    x_TD: Tensor, o_TO: Tensor, weights: Weights, k_min: int, *, last_only: bool = False
) -> Iterator[Tensor]:
    """y_k(x) - o [T, O] for k from k_min to N, in fp32 at least.

    `last_only`: gradients of each reach the last learner of its prefix and what belongs to that k alone.
    """
    o_TO = o_TO.to(torch.promote_types(o_TO.dtype, torch.float32))
    if not weights.is_nested:
        for k in range(k_min, weights.learners + 1):
            yield prefix_output(x_TD, _last_alone(weights, k) if last_only else weights, k) - o_TO
    else:
        yield from _running_errors(x_TD, o_TO, weights, k_min, last_only=last_only)


def _running_errors(x_TD: Tensor, o_TO: Tensor, weights: Weights, k_min: int, *, last_only: bool) -> Iterator[Tensor]:
    """The same where prefixes share one second layer: one learner's output is added at a time."""
    assert weights.w_out is not None
    h_TNH = hidden(x_TD, weights, weights.learners).unflatten(-1, weights.w_in.shape[:2])
    sum_TO = -o_TO
    if k_min == 0:
        yield sum_TO + weights.b_out[0]
    parts = zip(h_TNH.unbind(1), weights.w_out.unbind(1), weights.b_out[1:].unbind(), strict=True)
    for k, (h_TH, w_OH, b_O) in enumerate(parts, start=1):
        sum_TO = (sum_TO.detach() if last_only else sum_TO) + F.linear(h_TH, w_OH)
        if k >= k_min:
            yield sum_TO + b_O


def _last_alone(weights: Weights, k: int) -> Weights:
    """The same weights, of which the prefix k trains learner k - 1 and what belongs to that k alone."""
    last = max(k - 1, 0)

    def only_last(w: Tensor) -> Tensor:
        return torch.cat([w[:last].detach(), w[last : last + 1], w[last + 1 :].detach()])

    def only_last_if(w: Tensor | None) -> Tensor | None:
        return None if w is None else only_last(w)

    w_out = weights.w_out
    return replace(
        weights,
        w_in=only_last(weights.w_in),
        b_in=only_last_if(weights.b_in),
        w_up=only_last_if(weights.w_up),
        b_up=only_last_if(weights.b_up),
        w_out=w_out if w_out is None or w_out.dim() == 4 else only_last(w_out.movedim(1, 0)).movedim(0, 1),
    )
