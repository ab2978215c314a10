"""`acmc plan WHAT`: find sites and print the cost report, without weights and without data.

WHAT is a recipe or a model reference; of a saved model, the plan it has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acm_compiler.cli.options import CodeOption, JsonOption, SetOption
from acm_compiler.cli.output import Output, error_facts
from acm_compiler.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from acm_compiler.evaluation.advice import Advice
    from acm_compiler.planning.plan import Plan
    from acm_compiler.recipe import ModelConfig, Recipe
    from acm_compiler.recipe.schema import TargetConfig
    from acm_compiler.sources.build import BuiltModel


AutoClassOption = Annotated[
    str | None, typer.Option(metavar="CLASS", help="For hf: the transformers class, such as AutoModelForCausalLM.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="For hf: run the Python files that come with the model.")
]

GpuOption = Annotated[
    str | None, typer.Option(metavar="GPU", help="Add times expected on it, by a roofline: a100, h100, h200.")
]


def plan(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="A recipe, or a model such as torchvision:vit_b_16.")],
    sites: Annotated[
        str | None, typer.Option(help="What to convert: mlp, attn, attn.q, names, globs, re:...; by commas.")
    ] = None,
    include: Annotated[str | None, typer.Option(help="Of these only what also matches; by commas.")] = None,
    exclude: Annotated[str | None, typer.Option(help="What not to convert; by commas.")] = None,
    learners: Annotated[int | None, typer.Option(min=1, help="Learners per site.")] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="B", help="A budget to show, such as .4, 60% or 11GMACs; exit 4 if out of reach."),
    ] = None,
    example: Annotated[
        str | None, typer.Option("--input", metavar="SHAPE", help="One example, such as 1x3x224x224 or 1x128:int.")
    ] = None,
    auto_class: AutoClassOption = None,
    trust_remote_code: TrustOption = False,
    allow_code: CodeOption = False,
    per_site: Annotated[bool, typer.Option("--per-site", help="Add a row for every site.")] = False,
    device: GpuOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan as JSON.")] = None,
    overrides: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Print the cost report of a recipe, a model or a saved model."""
    from acm_compiler.files import write_file
    from acm_compiler.runs.given import parse_budgets

    output, target = Output(json=json), _target(device)
    named = parse_budgets(",".join(budget), "--budget") if budget else []
    settings = {"auto_class": auto_class} if auto_class else {}
    source = read_what(what, overrides or [], **settings, **({"trust_remote_code": True} if trust_remote_code else {}))
    given = {"sites": sites, "include": include, "exclude": exclude, "learners": learners}
    built, made, advice, budgets = _make(source, what, example, given, allow_code=allow_code)
    if built is None:
        output.note(f"{what} holds a converted model, whose plan this is; --sites plans the original model anew")
    if out is not None:
        write_file(out, made.to_json() + "\n")
    table, times = _times(made, target or getattr(source, "target", None))
    facts = made.as_json() | {"advice": [entry.as_json() for entry in advice]} | times
    if not json:
        output.say(_cost_table(built, made, named, per_site=per_site) + table)
        for entry in advice:
            output.say(f"advice: {entry}")
    _conclude(made, [*budgets, *((None, value) for value in named)], facts, output)


def _cost_table(built: BuiltModel | None, made: Plan, named: Sequence[float | str], *, per_site: bool) -> str:
    """The cost report at these budgets, or at the usual ones; torch's own count needs the model."""
    from acm_compiler.passes.survey import torch_macs
    from acm_compiler.planning.cost_table import BUDGETS, cost_table
    from acm_compiler.runs.pipeline import example_of
    from acm_compiler.runtime.budgets import parse_budget

    shown = [parse_budget(value, made) for value in named] if made.sites else []
    counted = None if built is None else torch_macs(built.model, example_of(built))
    return cost_table(made.cost, budgets=shown or BUDGETS, per_site=per_site, torch_macs=counted)


def _target(device: str | None) -> TargetConfig | None:
    """The target of that name, for calls like the example; UsageError for an unknown one."""
    from acm_compiler.planning.site_times import device_of
    from acm_compiler.recipe.schema import TargetConfig

    return None if device is None else TargetConfig.model_validate({"device": device_of(device).name.lower()})


def _times(made: Plan, config: TargetConfig | None) -> tuple[str, dict[str, Any]]:
    """Times of the sites on a device, measured or else expected: as text below the costs, and for the document."""
    if config is None:
        return "", {}
    from acm_compiler.planning.cost_table import BUDGETS
    from acm_compiler.planning.site_times import time_table
    from acm_compiler.planning.target import Target

    target = Target.of(config, share=1.0)
    times, device = target.times(made.sites, made.model.batch, BUDGETS), target.device
    facts = {"device": device.name, "shares": list(BUDGETS), "sites": [time.as_json() for time in times]}
    return "\n" + time_table(times, device, BUDGETS), {"times": facts}


def _conclude(made: Plan, budgets: list[tuple[str | None, float | str]], facts: dict[str, Any], output: Output) -> None:
    """One document in any case: what was found and, where the plan cannot do what is asked, why that is refused."""
    from acm_compiler.errors import AcmError
    from acm_compiler.runtime.budgets import refuse_unreachable

    try:
        refuse_unreachable(made, budgets)
    except AcmError as error:
        output.error(str(error))
        output.document(facts | {"error": error_facts(error)})
        raise typer.Exit(error.exit_code) from error
    output.document(facts)


def _make(
    named: Recipe | ModelConfig, what: str, example: str | None, given: dict[str, Any], *, allow_code: bool
) -> tuple[BuiltModel | None, Plan, list[Advice], list[tuple[str | None, float | str]]]:
    """The model without weights, its plan by the options `given`, advice, and the budgets that a recipe asks for.

    Of a saved model, without options, the plan that it has; no model is built for it.
    """
    from acm_compiler.checkpoint import saved_conversion
    from acm_compiler.errors import UsageError
    from acm_compiler.recipe import Recipe
    from acm_compiler.runs.pipeline import plan_model, plan_recipe, rules_of
    from acm_compiler.sources.inputs import parse_input

    spec = None if example is None else parse_input(example)
    chosen = {key: value for key, value in given.items() if value is not None}
    if isinstance(named, Recipe):
        if chosen:
            options = ", ".join(f"--{option}" for option in chosen)
            raise UsageError(f"{options} is for models", where=what, fix="use --set sites[0].learners=8")
        return *plan_recipe(named, example=spec), named.named_budgets()
    if named.source == "directory" and not chosen and spec is None:
        return None, saved_conversion(named.name).plan, [], []
    listed = {key: _listed(value) for key, value in chosen.items() if key != "learners"}
    rules = rules_of(**{"sites": ("mlp", "attn"), **chosen, **listed})
    return *plan_model(named, rules, example=spec, allow_code=allow_code), []


def _listed(text: str) -> tuple[str, ...]:
    """The parts between commas; those in brackets belong to a pattern."""
    return tuple(part.strip() for part in re.split(r",(?![^\[{(]*[\]})])", text))


def read_what(text: str, overrides: Sequence[str] = (), **settings: Any) -> Recipe | ModelConfig:
    """The recipe, or the model, that `text` names; `settings` are keys of a model that is named without a recipe.

    UsageError when it is neither, or for settings beside a recipe.
    """
    from acm_compiler.recipe import load_recipe, shipped_recipes
    from acm_compiler.sources.build import FORMS, parse_reference

    if text.endswith((".yaml", ".yml")) or text in shipped_recipes():
        if settings:
            raise UsageError(
                f"{', '.join(settings)} is for models", where=text, fix=f"use --set model.{next(iter(settings))}=…"
            )
        return load_recipe(text, overrides)
    if overrides:
        raise UsageError("--set changes recipes, and this is not one", where=text, fix="leave it out, or give a recipe")
    if ":" not in text and not Path(text).is_dir():
        hint = did_you_mean(text, shipped_recipes())
        expected = f"a recipe ({', '.join(shipped_recipes())}, FILE.yaml), {FORMS}"
        raise UsageError(f"{text!r} is neither a recipe nor a model reference{hint}", expected=expected)
    return parse_reference(text, **settings)
