"""All methods by name, and what is refused before any of them is fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from acm_compiler.baselines.acms import Converted, Shuffled, Static
from acm_compiler.baselines.low_rank import LowRank
from acm_compiler.baselines.merged_tokens import ToMe
from acm_compiler.baselines.method import Method
from acm_compiler.baselines.pruned_neurons import Cmoe, Flap
from acm_compiler.baselines.sparse_activations import Teal, Wina
from acm_compiler.baselines.trained.acms import ABLATIONS, Distilled, Paper
from acm_compiler.baselines.trained.early_exit import EarlyExit
from acm_compiler.baselines.trained.experts import D2dmoe, Moefication
from acm_compiler.baselines.trained.halted_tokens import Avit
from acm_compiler.baselines.trained.thin import Thin
from acm_compiler.errors import UsageError, did_you_mean
from acm_compiler.evaluation.wording import percent
from acm_compiler.planning.plan import Plan

METHODS: dict[str, type[Method]] = {
    "acm": Converted,
    "random": Shuffled,
    "width": Static,
    "teal": Teal,
    "wina": Wina,
    "svd": LowRank,
    "flap": Flap,
    "cmoe": Cmoe,
    "tome": ToMe,
    "acm_distilled": Distilled,
    "acm_paper": Paper,
    "thin": Thin,
    "moefication": Moefication,
    "d2dmoe": D2dmoe,
    "ztw": EarlyExit,
    "avit": Avit,
}
# those that run what the recipe has converted
OURS = ("acm", "random", "width", "acm_distilled")
ALL = "all"
_ABLATED = {method.name: method for method in ABLATIONS.values()}


def method_named(name: str) -> type[Method]:
    """The method or ablation of this name."""
    return METHODS.get(name) or _ABLATED[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The methods to run, each with the budgets that it reaches, and a sentence on each method or budget left out."""

    budgets: dict[str, tuple[float, ...]]
    left_out: dict[str, str] = field(default_factory=dict)


def choose(
    model: nn.Module,
    plan: Plan,
    *,
    names: Sequence[str] | None,
    ablations: Sequence[str] | None = None,
    budgets: Sequence[float] | None,
    usual: Sequence[float],
) -> Chosen:
    """Methods and budgets to run on a model, weights or not. UsageError for what was asked for by name and cannot be.

    names: None for every method without training; "all" for every one. ablations: None for none, "all", too.
    budgets: None for the `usual` ones. What was not asked for by name is left out where it does not fit.
    """
    asked = _known(names, METHODS, "method", "--methods")
    ablated = _known(ablations, ABLATIONS, "ablation", "--ablate")
    free = [name for name, method in METHODS.items() if not method.trains]
    wanted = free if names is None else list(METHODS) if ALL in names else asked
    wanted = [*wanted, *(ABLATIONS[key].name for key in (ABLATIONS if ALL in (ablations or ()) else ablated))]
    shares = sorted(usual if budgets is None else set(budgets))
    found: dict[str, tuple[float, ...]] = {}
    left_out: dict[str, str] = {}
    for name in wanted:
        reason = method_named(name).refuses(model, plan)
        if reason is not None:
            if name in asked:
                raise UsageError(
                    f"{name} cannot be applied to this model", where="--methods", found=reason, fix="leave it out"
                )
            left_out[name] = reason
            continue
        low = method_named(name).floor(model, plan)
        found[name] = tuple(share for share in shares if share >= low - 1e-6)
        if len(found[name]) < len(shares):
            below = [percent(share, 0) for share in shares if share < low - 1e-6]
            sentence = f"its least on this model is {percent(low)} of the dense MACs, above {', '.join(below)}"
            if budgets is not None:
                raise _below(name, sentence, asked=bool(asked))
            left_out[name] = sentence
    if not any(found.values()):
        least = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise UsageError("no method reaches any of these budgets", where="--budgets", found=least, fix="ask for more")
    return Chosen(budgets={name: reached for name, reached in found.items() if reached}, left_out=left_out)


def _known(names: Sequence[str] | None, known: Mapping[str, object], what: str, option: str) -> list[str]:
    """Names of `known` that were given, each once, without "all". UsageError for others."""
    if names is not None and not names:
        raise UsageError(f"no {what} was named", where=option, expected=", ".join((ALL, *known)))
    asked = [name for name in dict.fromkeys(names or ()) if name != ALL]
    for name in asked:
        if name not in known:
            hint = did_you_mean(name, (ALL, *known))
            raise UsageError(f"unknown {what}{hint}", where=option, found=name, expected=", ".join((ALL, *known)))
    return asked


def _below(name: str, sentence: str, *, asked: bool) -> UsageError:
    fix = "ask for budgets from there on" + (", or leave the method out" if asked else ", or name methods: --methods")
    return UsageError(f"a budget below the floor of {name}: {sentence}", where="--budgets", fix=fix)
