"""One k for every token: what a rewritten model is where its gates choose nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.reference import prefix_output
from acm_compiler.errors import BudgetUnreachable, UsageError
from acm_compiler.exporting.controls import measured
from acm_compiler.exporting.traced import given_to
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.planning.cost import learner_macs
from acm_compiler.runtime.budgets import TOLERANCE
from acm_compiler.runtime.control import refuse_unfitted, spend
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.runtime.usage import PADDING, recorded


class Called(nn.Module):
    """A model, called with what it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class FirstLearners(nn.Module):
    """The first k learners of an ACM as a dense region; it holds copies of their weights alone."""

    def __init__(self, acm: ACM, k: int) -> None:
        super().__init__()
        self.weights, self.k = _first(acm.learners.weights(), k), k

    def forward(self, x: Tensor) -> Tensor:
        y_TO = prefix_output(x.reshape(-1, x.shape[-1]), self.weights, self.k)
        return y_TO.reshape(*x.shape[:-1], y_TO.shape[-1])


def fixed_ks(found: Rewritten, k: Any) -> dict[str, int]:
    """The k of every site where all tokens run `k`, as `acm.set_k` bounds it; UsageError for what cannot be."""
    refuse_unfitted(found, "a fixed k")
    most = max(acm.count for acm in found.acms.values())
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
        fix = "or budget=0.5 (--budget 0.5): a k per site, as its gates choose there" if k is None else None
        where, expected = "fixed_k (--fixed-k)", f"from 1 to {most}"
        raise UsageError("this export needs one k", where=where, found=repr(k), expected=expected, fix=fix)
    return {name: acm.within(k, k)[0] for name, acm in found.acms.items()}


def ks_of_budget(found: Rewritten, budget: float | str, run: Callable[[], Any]) -> dict[str, int]:
    """One k for every site, from what its gates choose at `budget` in the mean over the tokens of the call `run`.

    Rounded so that together they cost no more. BudgetUnreachable where one learner per site is above it.
    """
    refuse_unfitted(found, "a fixed k")
    measured(found)
    with undisturbed(found), recorded(found) as usage:
        spend(found, budget)
        share = found.owner.budget
        run()
    assert isinstance(share, float)
    means = {name: float(k_BS[k_BS != PADDING].double().mean()) for name, k_BS in usage.k.items()}
    if idle := [name for name in found.acms if name not in means]:
        raise UsageError("the example inputs do not reach a site", where=idle[0], fix="give inputs that run all of it")
    return _rounded(found, means, share)


def _rounded(found: Rewritten, means: Mapping[str, float], share: float) -> dict[str, int]:
    """Whole numbers from 1 on near `means` that cost `share` at most: those that lose most by it are rounded up."""
    low = {name: max(1, acm.k_min) for name, acm in found.acms.items()}
    ks = {name: max(low[name], int(mean)) for name, mean in means.items()}
    while learner_share(found, ks) > share + TOLERANCE:
        above = [name for name in ks if ks[name] > low[name]]
        if not above:
            least = f"from {learner_share(found, ks):.4g} on, which is one learner at every site"
            raise BudgetUnreachable("no fixed k is within this budget", found=f"{share:.4g}", expected=least)
        ks[max(above, key=lambda name: ks[name] - means[name])] -= 1
    for name in sorted(ks, key=lambda name: ks[name] - means[name]):
        more = ks | {name: ks[name] + 1}
        if ks[name] < means[name] and learner_share(found, more) <= share + TOLERANCE:
            ks = more
    return ks


def learner_share(found: Rewritten, ks: Mapping[str, int]) -> float:
    """The share of learner MACs where all tokens of a site run as many learners as `ks` says."""
    sites = [found.plan.site(name) for name in ks]
    run, full = learner_macs((site, ks[site.name] * site.runs, site.runs) for site in sites)
    return run / full


def hold(found: Rewritten, ks: Mapping[str, int]) -> None:
    """Make every token of a site run as many learners as `ks` says."""
    for name, k in ks.items():
        found.acms[name].set_choices(knob=0.0, k_lo=k, k_hi=k)


def as_dense_layers(found: Rewritten, ks: Mapping[str, int]) -> AbstractContextManager[None]:
    """Inside, the dense region of every ACM is its first learners, as `ks` says, and runs as if none were fitted."""
    acms = {found.acms[name]: k for name, k in ks.items()}
    return given_to({acm: {"dense": FirstLearners(acm, k), "state": "dense"} for acm, k in acms.items()})


def _first(weights: Weights, k: int) -> Weights:
    """Copies of what the first k learners need; slices of a dense weight keep them all, as their places count N."""
    if weights.w_out is None or k == 0:
        return weights
    held = {name: getattr(weights, name) for name in ("w_in", "b_in", "w_up", "b_up")}
    cut: Any = {name: None if tensor is None else tensor[:k].clone() for name, tensor in held.items()}
    w_out = (weights.w_out[k - 1] if weights.w_out.dim() == 4 else weights.w_out)[:, :k]
    top = weights.w_top if k == weights.learners else None
    return replace(weights, w_out=w_out.clone(), b_out=weights.b_out[: k + 1].clone(), w_top=top, **cut)
