"""The three terms that lead gates to a budget, one function per equation (docs/semantics.md), and `acm.losses`.

Shapes: B examples, S tokens of an example at one site, C gate columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from acm_compiler.acm.context import Choices
from acm_compiler.errors import NothingRecorded, UsageError
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.planning.cost import by_example, learner_macs
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime import ranks

_Taken = dict[str, tuple[Choices, ...]]


def budget_loss(share_B: Tensor, budget: float) -> Tensor:
    """L_b = | mean_i b_i - beta |, for the shares of learner MACs b_i of all examples; 0 where there is none."""
    return (share_B.mean() - budget).abs() if len(share_B) else share_B.sum()


def diversity_loss(share_B: Tensor) -> Tensor:
    """L_d = - mean over all pairs (i, m), i = m included, of | b_i - b_m |: examples that differ are encouraged.

    0 where there is no example.
    """
    return -(share_B[:, None] - share_B[None, :]).abs().mean() if len(share_B) else share_B.sum()


def entropy_loss(frequency: Sequence[Tensor], tokens: Sequence[Tensor]) -> Tensor:
    """L_e = mean over examples i and sites l of sum_c a log max(a, 1/T_i) / log C; lowest for choices used alike.

    frequency: per site, how often each choice was taken by the tokens of each example, a [B, C].
    tokens: per site, the number of real tokens of each example, T [B]; examples without any are left out.
    A site with one choice contributes 0; where there is no example it is 0.
    """
    values = torch.cat([_negative_entropy(a_BC, t_B)[t_B > 0] for a_BC, t_B in zip(frequency, tokens, strict=True)])
    return values.mean() if len(values) else values.sum()


def _negative_entropy(a_BC: Tensor, tokens_B: Tensor) -> Tensor:
    choices = a_BC.shape[1]
    if choices == 1:
        return a_BC.sum(1) * 0.0
    least_B1 = 1 / tokens_B.clamp_min(1)[:, None]
    return (a_BC * torch.maximum(a_BC, least_B1).log()).sum(1) / math.log(choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteChoices:
    """The relaxed choices of one site in one forward, all its calls; real is 1 at real tokens, 0 at padding.

    nu [B, S, C], real [B, S].
    """

    site: PlannedSite
    nu: Tensor
    real: Tensor

    @property
    def tokens(self) -> Tensor:
        """Real tokens of each example, [B]."""
        return self.real.sum(1)

    @property
    def frequency(self) -> Tensor:
        """Frequency of each choice among the real tokens of each example, a [B, C]."""
        # sums of products, not matrix products: autocast would round counts to 8 bits
        taken_BC = (self.nu * self.real[..., None]).sum(1)
        return taken_BC / self.tokens.clamp_min(1)[:, None]

    @property
    def learners(self) -> Tensor:
        """k of each example's real tokens added up, [B]."""
        k_C = torch.arange(self.site.k_min, self.site.learners + 1, device=self.nu.device, dtype=self.nu.dtype)
        return ((self.nu * k_C).sum(-1) * self.real).sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedChoices:
    """All relaxed choices since they were last taken: one tuple of sites per forward.

    `macs` are the learner MACs run, and at k = N, of each example of all forwards, each [B]; examples without real
    tokens are left out.
    """

    forwards: tuple[tuple[SiteChoices, ...], ...]
    macs: tuple[Tensor, Tensor]

    @property
    def shares(self) -> Tensor:
        """b_i, the share of learner MACs run on each example, [B]; weighted by MACs."""
        run_B, full_B = self.macs
        return run_B / full_B

    @property
    def counts(self) -> dict[str, Tensor]:
        """Number of real tokens that took each choice, [C] per site."""
        counts: dict[str, Tensor] = {}
        for site in (site for forward in self.forwards for site in forward):
            taken_C = (site.nu.detach() * site.real[..., None]).sum((0, 1))
            counts[site.site.name] = counts.get(site.site.name, 0) + taken_C
        return counts

    def losses(self, budget: float) -> dict[str, Tensor]:
        """L_b, L_e and L_d; budget and diversity see the examples of all processes."""
        every = [site for forward in self.forwards for site in forward]
        share_B = gather_examples(self.shares)
        return {
            "budget": budget_loss(share_B, budget),
            "entropy": entropy_loss([site.frequency for site in every], [site.tokens for site in every]),
            "diversity": diversity_loss(share_B),
        }


def losses(model: nn.Module, budget: float) -> dict[str, Tensor]:
    """`{"budget": L_b, "entropy": L_e, "diversity": L_d}`, scalars over the relaxed forwards since the last call.

    Values are those of the hard choices, gradients are straight-through. Padded tokens count nowhere: the mask is that
    of `acm.batch`, or else the call's own, as in `acm.record`; of compiled calls one of tokens, none of audio.
    A forward of padding alone gives 0. `budget` is a share of learner MACs in (0, 1]. NothingRecorded when no relaxed
    forward ran since the last call.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        raise UsageError("budget must be a share of learner MACs in (0, 1]", found=repr(budget))
    return take_choices(model).losses(budget)


def take_choices(model: nn.Module) -> RelaxedChoices:
    """The relaxed choices of `model` since the last call, which are forgotten. NothingRecorded when there are none."""
    found = rewritten(model)
    taken = {name: tuple(acm.choices) for name, acm in found.acms.items()}
    for acm in found.acms.values():
        acm.choices.clear()
    if not any(taken.values()):
        raise NothingRecorded(
            "no relaxed forward ran since the last call of losses",
            fix="acm.relax(model, temperature), then model.train() and a forward with gradients, which checkpoints "
            "keep with use_reentrant=False alone, and losses after it",
        )
    if len({call.thread for calls in taken.values() for call in calls}) > 1:
        raise UsageError(
            "several threads ran relaxed forwards of this model since the last call of losses",
            fix="train from one thread, and call acm.losses after every forward",
        )
    plan, grouped = found.plan, []
    for forward in _by_forward(taken, plan):
        grouped.append(tuple(_site_choices(plan.site(name), calls) for name, calls in forward.items() if calls))
    return RelaxedChoices(forwards=tuple(grouped), macs=_macs(grouped))


def _by_forward(taken: _Taken, plan: Plan) -> list[_Taken]:
    """The calls of each forward: by its number, or where that is not known by how many calls the plan has of a site."""
    numbers = sorted({call.forward for calls in taken.values() for call in calls})
    if numbers[0]:
        return [{name: tuple(c for c in calls if c.forward == n) for name, calls in taken.items()} for n in numbers]
    forwards = _count_forwards({name: len(calls) / plan.site(name).calls for name, calls in taken.items()})
    return [{name: _part(calls, i, forwards) for name, calls in taken.items()} for i in range(forwards)]


def _macs(forwards: Sequence[tuple[SiteChoices, ...]]) -> tuple[Tensor, Tensor]:
    pairs = []
    for forward in forwards:
        batch = _batch(forward)
        values = ((c.site, by_example(_wide(c.learners), batch), by_example(_wide(c.tokens), batch)) for c in forward)
        pairs.append(learner_macs(values))
    run_B, full_B = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    real_B = full_B > 0
    return run_B[real_B], full_B[real_B]


def _wide(values: Tensor) -> Tensor:
    """Convert to float32, or keep what is wider: MACs are too large for half precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _count_forwards(calls: dict[str, float]) -> int:
    """Number of forwards, from each site's number of calls over the plan's; sites may be left out of a lone one."""
    most = max(1, int(max(calls.values())))
    uneven = [name for name, count in calls.items() if count != most]
    if most > 1 and uneven:
        raise UsageError(
            "several forwards ran since the last call of losses, and not all of them called this site",
            where=uneven[0],
            found=f"{calls[uneven[0]]:g} forwards",
            expected=f"{most}",
            fix="call acm.losses after every forward",
        )
    return most


def _part(calls: tuple[Choices, ...], index: int, parts: int) -> tuple[Choices, ...]:
    size = len(calls) // parts if parts > 1 else len(calls)
    return calls[index * size : (index + 1) * size]


def _site_choices(site: PlannedSite, calls: tuple[Choices, ...]) -> SiteChoices:
    """The calls of one forward as one: repeated calls follow each other along the token axis."""
    real = [torch.ones_like(c.nu[..., 0]) if c.mask is None else c.mask.to(c.nu) for c in calls]
    return SiteChoices(
        site=site,
        nu=torch.cat([c.nu for c in calls], dim=1),
        real=torch.cat([r.detach() for r in real], dim=1),
    )


def _batch(forward: tuple[SiteChoices, ...]) -> int:
    """The number of examples, by the sites that tell them apart."""
    sizes = {c.nu.shape[0]: c.site.name for c in forward if c.site.layout and not c.site.layout.is_pooled}
    if len(sizes) > 1:
        raise UsageError("sites saw batches of different sizes", found=sizes, fix="call acm.losses after every forward")
    return next(iter(sizes), 1)


def gather_examples(share_B: Tensor) -> Tensor:
    """The values of all processes' examples in the order of ranks, with gradients to each; as given when alone.

    Every process must then use them in the same way; averaged over processes, as DDP does, the gradients are those
    of one process with the whole batch. The numbers of examples may differ.
    """
    return share_B if ranks.world() == 1 else _Gather.apply(share_B)


class _Gather(torch.autograd.Function):
    """All-gather whose backward sums over processes what each one's loss asks of this one's values."""

    @staticmethod
    def forward(ctx: Any, share_B: Tensor) -> Tensor:
        world = ranks.world()
        size = torch.tensor([share_B.shape[0]], device=share_B.device)
        every = [torch.zeros_like(size) for _ in range(world)]
        dist.all_gather(every, size)
        sizes = [int(s) for s in every]
        padded = share_B.new_zeros(max(sizes))
        padded[: share_B.shape[0]] = share_B
        rows = [torch.zeros_like(padded) for _ in range(world)]
        dist.all_gather(rows, padded)
        ctx.start, ctx.size = sum(sizes[: ranks.rank()]), share_B.shape[0]
        return torch.cat([row[:n] for row, n in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total[ctx.start : ctx.start + ctx.size]
