"""Cost of a plan, by arithmetic alone: MACs and parameters, dense and as ACMs.

1 MAC = 1 multiply-add = 2 FLOPs. No model is run. `budget` is the share of learner MACs; `model_share` is the
share of the whole dense model's MACs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from acm_compiler.planning.decisions import PlannedSite

if TYPE_CHECKING:
    from torch import Tensor

    from acm_compiler.planning.plan import Plan


# any size up to this one is cheap, however small the site
_SMALL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCost:
    """MACs of one site over one forward of the example inputs (all calls), and its parameters.

    `learner_macs` is what all N learners cost. What its ACM saves on disk is `acm_params`: learners, output
    biases and gate.
    """

    dense_macs: int
    learner_macs: int
    gate_macs: int
    dense_params: int
    acm_params: int


def site_cost(site: PlannedSite) -> SiteCost:
    """The cost of one site."""
    gate = site.gate_width * (site.d_in + 1) + site.columns * (site.gate_width + 1)
    return SiteCost(
        dense_macs=site.runs * dense_macs_per_token(site),
        learner_macs=site.runs * site.learners * macs_per_learner(site),
        gate_macs=site.runs * gate_macs_per_token(site),
        dense_params=_dense_params(site),
        acm_params=_learner_params(site) + gate,
    )


def dense_macs_per_token(site: PlannedSite) -> int:
    """MACs of the dense region for one token."""
    if site.dense_width is None:
        return site.d_in * site.d_out
    return site.dense_width * (site.d_in * len(site.first) + site.d_out)


def size_limits(site: PlannedSite) -> dict[str, int]:
    """The largest `width` and `gate_width` that make sense at this site, by key.

    No learner is wider than what it replaces, and no gate costs more.
    """
    size = max(_SMALL, site.dense_width or max(site.d_in, site.d_out))
    gate = _SMALL * -(-dense_macs_per_token(site) // (site.d_in * _SMALL))
    return {"width": size, "gate_width": gate}


def macs_per_learner(site: PlannedSite) -> int:
    """MACs of one learner for one token; p_l of docs/semantics.md."""
    if site.is_sliced:
        return site.d_in * site.d_out // site.learners
    branches = 2 if site.kind == "gated_mlp" else 1
    return site.width * (site.d_in * branches + site.d_out)


def learner_macs(runs: Iterable[tuple[PlannedSite, Any, Any]]) -> tuple[Any, Any]:
    """MACs of the learners run, and of all N; the first over the second is the share that budgets are in.

    runs: of each site the k of all tokens added up, and the number of tokens: plain numbers, or tensors [B] of the
    same for every example, and so are the two MACs.
    """
    run = full = 0
    for site, learners, tokens in runs:
        each = macs_per_learner(site)
        run, full = run + learners * each, full + tokens * (site.learners * each)
    return run, full


def by_example(values: Tensor, examples: int) -> Tensor:
    """`values` [R] of the rows of one site as those of `examples` examples.

    Where rows are something else (images, or tokens of all examples packed), an equal part of their sum for each.
    """
    return values if len(values) == examples else (values.sum() / examples).expand(examples)


def gate_macs_per_token(site: PlannedSite) -> int:
    """MACs of the gate for one token."""
    return site.gate_width * (site.d_in + site.columns)


def learner_unit(sites: tuple[PlannedSite, ...]) -> float:
    """Mean over sites of the MACs of one learner, the unit of `choice costs` (docs/semantics.md, Gate and knob)."""
    return sum(macs_per_learner(site) for site in sites) / len(sites)


def _dense_params(site: PlannedSite) -> int:
    widths = site.graft.widths or [site.d_out if site.dense_width is None else site.dense_width] * len(site.first)
    both = zip(site.first, widths, strict=True)
    params = sum(width * (site.d_in + (1 if ref.bias is not None else 0)) for ref, width in both)
    if site.last is not None:
        params += site.d_out * widths[0] + (site.d_out if site.last.bias is not None else 0)
    return params


def _learner_params(site: PlannedSite) -> int:
    if site.is_sliced:
        return site.d_in * site.d_out + (site.learners + 1) * site.d_out
    branches = 2 if site.kind == "gated_mlp" else 1
    hidden = site.learners * site.width
    params = branches * hidden * (site.d_in + (1 if site.has_bias_in else 0))
    params += site.d_out * hidden * (site.learners if site.second_layer == "per_k" else 1)
    params += (site.learners + 1) * site.d_out
    if site.has_top:
        params += site.d_out * (site.d_in if site.kind == "linear" else hidden)
    return params


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """The costs of a plan; `str()` is the table users read, `totals()` the numbers for JSON."""

    plan: Plan
    sites: tuple[SiteCost, ...]

    @property
    def learner_macs(self) -> int:
        """MACs of all learners of all sites."""
        return sum(cost.learner_macs for cost in self.sites)

    @property
    def gate_macs(self) -> int:
        """MACs of all gates, run whatever the budget."""
        return sum(cost.gate_macs for cost in self.sites)

    @property
    def fixed_macs(self) -> int:
        """MACs of what stays dense."""
        return self.plan.model.dense_macs - sum(cost.dense_macs for cost in self.sites)

    @property
    def acm_params(self) -> int:
        """Parameters of the whole rewritten model, dense regions dropped."""
        replaced = sum(cost.dense_params for cost in self.sites)
        return self.plan.model.dense_params - replaced + sum(cost.acm_params for cost in self.sites)

    @property
    def budget_min(self) -> float:
        """The smallest reachable budget: every token at its site's k_min."""
        return self.least_share(0)

    def least_share(self, k: int) -> float:
        """The share of learner MACs when every token runs `k` learners, or its site's k_min where that is above."""
        least, full = learner_macs((s, s.runs * max(s.k_min, min(k, s.learners)), s.runs) for s in self.plan.sites)
        return least / full if full else 1.0

    def macs(self, budget: float) -> float:
        """MACs of the whole model over the example inputs at `budget`, gates included."""
        return self.fixed_macs + self.gate_macs + budget * self.learner_macs

    def model_share(self, budget: float) -> float:
        """`macs(budget)` over the dense model's MACs; 1 where that has none."""
        dense = self.plan.model.dense_macs
        return self.macs(budget) / dense if dense else 1.0

    def budget_of_macs(self, macs: float) -> float:
        """The budget at which the whole model costs `macs` over the example inputs."""
        return (macs - self.fixed_macs - self.gate_macs) / self.learner_macs

    def totals(self) -> dict[str, Any]:
        """The plan's totals, as its JSON names them."""
        return {
            "dense_macs": self.plan.model.dense_macs,
            "fixed_macs": self.fixed_macs,
            "learner_macs": self.learner_macs,
            "gate_macs": self.gate_macs,
            "dense_params": self.plan.model.dense_params,
            "acm_params": self.acm_params,
        }

    def __str__(self) -> str:
        from acm_compiler.planning.cost_table import cost_table  # tabulate is for people alone

        return cost_table(self)
