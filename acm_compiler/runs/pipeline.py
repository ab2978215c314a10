"""The compiler on one page: load, survey, plan, check, rewrite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import nn

from acm_compiler.errors import SelectionError, UsageError, did_you_mean
from acm_compiler.evaluation.advice import Advice, advise
from acm_compiler.files import dump
from acm_compiler.passes.find.skips import kept_dense
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.passes.rewrite.rewrite import rewrite, rewrite_beside
from acm_compiler.passes.survey import Findings, analyze
from acm_compiler.planning.check_schedule import check_schedule
from acm_compiler.planning.pack import pack_sites
from acm_compiler.planning.plan import Plan
from acm_compiler.planning.planner import NOT_SELECTED, choose_rules, matches_name, notes_on, too_narrow
from acm_compiler.planning.target import Target, plan_sites_for
from acm_compiler.progress import Say
from acm_compiler.recipe import expand_paths
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.recipe.phases import FinetunePhase
from acm_compiler.recipe.schema import GateConfig, Recipe, SiteRule
from acm_compiler.recipe.tasks import PythonTask, fitting_classes, refuse_other_head
from acm_compiler.runtime.budgets import refuse_unreachable
from acm_compiler.site import Skip
from acm_compiler.sources.build import BuiltModel, build
from acm_compiler.sources.from_python import PREFIX, check_call
from acm_compiler.sources.inputs import Inputs, InputSpec

Rule = SiteRule | Mapping[str, Any]


def plan(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    sites: str | Rule | Iterable[str | Rule] = ("mlp", "attn"),
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    learners: int = 4,
    lossless: bool = False,
    init: Literal["auto", "random"] = "auto",
    gate: GateConfig | Mapping[str, Any] | None = None,
    source: Mapping[str, Any] | None = None,
) -> Plan:
    """Find the sites of `model` and decide what becomes of each; nothing stays on the model, weights are not needed.

    example_inputs: tensor | tuple | dict of keyword arguments; MACs are for exactly these.
    sites: what to convert: "mlp", "attn", "attn.q", a name of a site or of a part of the model, a glob, "re:...", or
    rules as in a recipe ({"match": "mlp", "learners": 8}, or `SiteRule`s), of which the last that matches a site
    decides. Of those given as text only what also matches one of `include` is meant, if there are any, and nothing
    that matches one of `exclude`; learners, lossless and init hold for them too.
    gate: the size of the gates, {"hidden": 4} or {"share": 0.02} (of the site's MACs), or a `GateConfig`.
    source: how the base model is built again, for models that `acm.load` shall rebuild by itself.
    A model without sites gives a plan without sites, whose `skipped` say why.
    Raises CaptureFailed, SelectionError, UsageError, AlreadyRewritten.
    """
    rules = rules_of(sites, include=include, exclude=exclude, learners=learners, lossless=lossless, init=init)
    size = _gate(gate)
    if source is not None and not isinstance(source, Mapping):
        expected = 'such as {"source": "hf", "name": "…"}'
        raise UsageError("source must be a mapping", found=type(source).__name__, expected=expected)
    found = analyze(model, example_inputs, source=source)
    return decide(found, rules, size)


def decide(
    found: Findings,
    rules: Sequence[SiteRule],
    gate: GateConfig,
    *,
    target: Target | None = None,
    place: Callable[..., str] | None = None,
) -> Plan:
    """findings -> plan, by the rules, whose `place` a refusal names.

    What would be dearer as an ACM, or slower on a target, stays dense.
    """
    sites, chosen = pack_sites(found.sites, found.reads, choose_rules(found.sites, rules, place=place))
    dearer = too_narrow(sites, chosen)
    chosen = {name: rule for name, rule in chosen.items() if name not in dearer}
    planned, slower = plan_sites_for(target, sites, chosen, gate, examples=found.model.batch)
    notes = notes_on(planned, chosen, found.zeroed)
    if target is not None and slower:
        notes = (*notes, target.note(list(slower)))
    kept, reasons = {site.name for site in planned}, dearer | slower
    left = [
        Skip(name=s.name, reason=reasons.get(s.name, NOT_SELECTED), macs=0, source=s.source)
        for s in sites
        if s.name not in kept
    ]
    made = Plan(
        model=found.model,
        sites=planned,
        skipped=(*found.skipped, *left),
        kept=tuple(kept_dense(found.flow, planned, (*found.skipped, *left))),
        notes=notes,
    )
    dump("20_plan.json", made.to_json)
    return made


def plan_model(
    model: ModelConfig, rules: Sequence[SiteRule], *, example: InputSpec | None = None, allow_code: bool = False
) -> tuple[BuiltModel, Plan, list[Advice]]:
    """The model that a reference names, without weights, its plan, and what converting more would buy."""
    built = build(model, device="meta", example=example, allow_code=allow_code)
    found = _survey(built)
    made = decide(found, rules, GateConfig())
    return built, made, advise(found, made, rules, GateConfig())


def plan_recipe(recipe: Recipe, *, example: InputSpec | None = None) -> tuple[BuiltModel, Plan, list[Advice]]:
    """The model of a recipe, without weights, the plan that its rules make, and advice; needs no data."""
    recipe = expand_paths(recipe.model_copy(update={"data": None}))
    built = build(recipe.model, device="meta", example=example or recipe.input)
    found = _survey(built)
    made = _decide_by(recipe, found)
    return built, made, advise(found, made, recipe.sites, recipe.gate)


def target_of(recipe: Recipe) -> Target | None:
    """The device that a recipe's plan is for, if it names one."""
    return None if recipe.target is None else Target.of(recipe.target, recipe.budgets.train)


def _decide_by(recipe: Recipe, found: Findings) -> Plan:
    place = partial(recipe.place, "sites")
    return decide(found, recipe.sites, recipe.gate, target=target_of(recipe), place=place)


def _survey(built: BuiltModel) -> Findings:
    return analyze(built.model, example_of(built), source=built.record)


def convert(recipe: Recipe, say: Say) -> tuple[nn.Module, nn.Module]:
    """load -> survey -> plan -> check -> rewrite: the dense model and its rewritten copy.

    `say` is given the cost report. Raises as `check_recipe`.
    """
    torch.manual_seed(recipe.run.seed)
    built = build(recipe.model, device="cpu", example=recipe.input)
    found = _survey(built)
    made = _decide_by(recipe, found)
    say(str(made))
    for name in check_recipe(recipe, built.model, made):
        built.model.get_parameter(name).requires_grad_(False)
    rewrite_copy = rewrite if _changes_weights(recipe) else rewrite_beside
    model = rewrite_copy(built.model, made, offload=recipe.run.offload)
    conversion(model).default_budget = recipe.budgets.train
    dump("30_rewritten.txt", lambda: str(model))
    return built.model, model


def _changes_weights(recipe: Recipe) -> bool:
    """True where a run may write to weights beside the ACMs, or share them out."""
    trained = any(isinstance(phase, FinetunePhase) and phase.update == "all" for phase in recipe.schedule)
    return trained or recipe.run.quantize is not None or bool(recipe.run.sharded)


def check_recipe(recipe: Recipe, model: nn.Module, made: Plan) -> list[str]:
    """Refuse what a run of the recipe could not carry out on its model, weights or not, and its plan, before it begins.

    What needs the data is not looked at. Returns the parameters that the recipe keeps out of every training.
    Raises as `check_schedule`, `refuse_unreachable` and `check_call`, SelectionError for patterns of no parameter, and
    UsageError for a task that does not fit the model.
    """
    check_schedule(recipe.schedule, made.sites)
    if recipe.task is not None and recipe.data is not None and not isinstance(recipe.task, PythonTask):
        fit = fitting_classes(recipe.task.kind, recipe.data.train)
        refuse_other_head(recipe.task.kind, type(model).__name__, auto_class=" or ".join(fit))
    refuse_unreachable(made, recipe.named_budgets())
    for section in (recipe.task, *((recipe.data.train, recipe.data.eval) if recipe.data else ())):
        for name in (getattr(section, "kind", ""), getattr(section, "rows", "")):
            if name.startswith(PREFIX):
                check_call(name, getattr(section, "args", {}))
    return _frozen_parameters(recipe, model)


def _frozen_parameters(recipe: Recipe, model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_parameters()]
    frozen = []
    for i, pattern in enumerate(recipe.model.freeze):
        found = [name for name in names if matches_name(pattern, name)]
        if not found:
            modules = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
            raise SelectionError(
                f"no parameter matches {pattern!r}{did_you_mean(pattern, modules)}",
                where=recipe.place("model", "freeze", i),
                expected='a parameter, a module, a glob over names of parameters, or "re:" and an expression',
            )
        frozen += found
    return frozen


def example_of(built: BuiltModel) -> Inputs:
    """The example inputs of a model that was built; UsageError when nothing said what they are."""
    if built.example_inputs is None:
        raise UsageError(
            "the shape of one example of this model is unknown",
            where=str(built.record.get("name")),
            fix="give --input 1x3x224x224 (1x128:int for a text's tokens), or the recipe's `input:`",
        )
    return built.example_inputs


def rules_of(sites: str | Rule | Iterable[str | Rule], **options: Any) -> list[SiteRule]:
    """The rules that `sites` are, texts with the keys of `options`; UsageError where they cannot be."""
    one = isinstance(sites, (str, SiteRule, Mapping)) or not isinstance(sites, Iterable)
    given: list[Any] = [sites] if one else list(sites)
    return [_rule(rule, options) for rule in given]


def _gate(given: GateConfig | Mapping[str, Any] | None) -> GateConfig:
    """The size of gates that `given` means; UsageError where it means none."""
    if given is None or isinstance(given, GateConfig):
        return given or GateConfig()
    if not isinstance(given, Mapping):
        raise UsageError("gate must be a mapping or a GateConfig", found=repr(given), expected='such as {"hidden": 4}')
    return GateConfig(**_known_keys(given, GateConfig, "gate"))


def _rule(given: Any, options: Mapping[str, Any]) -> SiteRule:
    if isinstance(given, SiteRule):
        return given
    if isinstance(given, str):
        return SiteRule(match=(given,), **options)
    if not isinstance(given, Mapping):
        rule = '"mlp", "attn", a name or pattern, or a rule such as {"match": "mlp", "learners": 8}'
        raise UsageError("sites must be a rule or several", found=repr(given), expected=rule)
    return SiteRule(**_known_keys(given, SiteRule, "a rule for sites"))


def _known_keys(given: Mapping[Any, Any], kind: type[BaseModel], what: str) -> dict[str, Any]:
    for key in given:
        if key not in kind.model_fields:
            raise UsageError(
                f"no such key of {what}{did_you_mean(str(key), kind.model_fields)}",
                found=key,
                expected=f"one of {', '.join(kind.model_fields)}",
            )
    return dict(given)
