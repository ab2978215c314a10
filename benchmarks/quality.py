"""Distance of converted models from the originals, measured: the tables of docs/results.

    python -m benchmarks.quality minilm --sites all --lossless --out runs/quality   one row: calibrate, judge, keep
    python -m benchmarks.quality controls --sites mlp --out runs/quality            what the method has to beat
    python -m benchmarks.quality digits --sites mlp --out runs/quality
    python -m benchmarks.quality table --out runs/quality                           all rows kept so far, as Markdown

MiniLM: real weights (extra `demo-text`); it is calibrated on documentation of some installed packages and judged on
that of others, so figures move a little with what is installed. Digits: the shipped ViT and its 10,800 canvases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.data import BatchStream
from acm_compiler.evaluation.evaluate import evaluate, every_k
from acm_compiler.files import write_file
from acm_compiler.passes.rewrite.conversion import conversion, sites
from acm_compiler.recipe import load_recipe, shipped_recipe
from acm_compiler.recipe.phases import CalibratePhase, DistillPhase
from acm_compiler.recipe.schema import Recipe, SiteRule
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.pipeline import convert
from acm_compiler.runs.run_recipe import RecipeRun
from acm_compiler.runtime.control import FixedK
from acm_compiler.training.machine import open_machine
from acm_compiler.training.schedule import run_schedule

TEXT_BUDGETS = (0.4, 0.6, 0.75, 1.0)
STEPS, BATCH = 300, 16


def main() -> None:
    """Run one measurement and keep its row, or print all rows."""
    options = arguments().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "table":
        sys.stdout.write(table(options.out))
        return
    torch.manual_seed(0)
    measure: Callable[[argparse.Namespace], Iterable[dict[str, Any]]]
    measure = {"minilm": measure_texts, "controls": measure_controls, "digits": measure_digits}[options.what]
    for row in measure(options):
        row |= {"command": " ".join(sys.argv[1:]), "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
        name = "_".join(part.lstrip("-") for part in [*sys.argv[1:2], row["method"]]).replace(" ", "_").replace(",", "")
        write_file(options.out / f"{name}.json", json.dumps(row, indent=1))
        sys.stdout.write(table_row(row) + "\n")
        sys.stdout.flush()


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("minilm", "controls", "digits", "table"))
    parser.add_argument("--sites", choices=("mlp", "all"), default="all")
    parser.add_argument("--lossless", action="store_true")
    parser.add_argument("--form", choices=("auto", "svd", "slices"), help="unset: auto, or the recipe's")
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    return parser


def recipe_for(name: str, options: argparse.Namespace, **rule: Any) -> Recipe:
    """The shipped recipe `name` with the sites that were asked for."""
    recipe = load_recipe(shipped_recipe(name))
    kinds, form = ("mlp",) if options.sites == "mlp" else ("mlp", "attn"), options.form or "auto"
    rules = tuple(
        SiteRule(match=(kind,), lossless=options.lossless, form=form if kind == "attn" else "auto", **rule)
        for kind in kinds
    )
    options.tokens = options.tokens or 20_000
    phases = tuple(
        phase.model_copy(update={"tokens": options.tokens}) if isinstance(phase, CalibratePhase) else phase
        for phase in recipe.schedule
    )
    return recipe.model_copy(update={"sites": rules, "schedule": phases})


def measure_texts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """MiniLM calibrated, at every budget."""
    recipe = recipe_for("minilm_embed", options)
    dense, model, run, seconds = calibrated(recipe, options)
    row = facts(model, options) | {"seconds": round(seconds), "method": label(options)}
    return [row | {"results": judge_texts(model, dense, run, budgets=TEXT_BUDGETS, static=True)}]


def calibrated(recipe: Recipe, options: argparse.Namespace) -> tuple[nn.Module, nn.Module, RecipeRun, float]:
    """The dense model, the converted one, what judges them, and the calibration's CPU seconds, all threads together."""
    dense, model = convert(recipe, quiet)
    run = RecipeRun(recipe, open_machine("fp32", "cpu"), quiet)
    start = time.process_time()
    run_schedule(model, recipe.schedule, run.job(RunOptions(directory=options.out / "run")))
    return dense, model, run, time.process_time() - start


def quiet(text: str) -> None:
    """No progress."""


def judge_texts(
    model: nn.Module, dense: nn.Module, run: RecipeRun, *, budgets: Sequence[float], static: bool
) -> list[dict[str, Any]]:
    """Cosine and Spearman at every budget and, with `static`, every k."""
    dataset = run.dataset(run.data.eval)
    settings: list[float | FixedK] = [*budgets, *(every_k(model) if static else ())]
    # texts of one length share a batch: nothing is spent on padding
    by_length = sorted((dataset[i] for i in range(len(dataset))), key=lambda example: len(example["input_ids"]))
    batches = [dataset.collate(by_length[i : i + 32]) for i in range(0, len(by_length), 32)]
    found = evaluate(model, batches, run.task, budgets=settings, dense=dense)
    results = [dataclasses.asdict(result) for result in (*found.budgets, *found.fixed)]
    for result in results:
        result.pop("per_site")
    return results


def measure_controls(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """MiniLM at static k: learners that no closed form made, the quickest first."""
    controls: dict[str, Callable[[nn.Module, RecipeRun], None]] = {"in the given order": given_order}
    if options.sites == "mlp":
        controls["by magnitude"] = by_magnitude
    for method, prepare in controls.items():
        recipe = recipe_for("minilm_embed", options)
        dense, model = convert(recipe, quiet)
        run = RecipeRun(recipe, open_machine("fp32", "cpu"), quiet)
        prepare(model, run)
        results = judge_texts(model, dense, run, budgets=(), static=True)
        yield facts(model, options) | {"method": f"{options.sites}, {method}", "results": results, "seconds": 0}
    yield distilled(options)


def distilled(options: argparse.Namespace) -> dict[str, Any]:
    """Random learners after some steps of distillation at every site."""
    recipe = recipe_for("minilm_embed", options, init="random")
    phase = DistillPhase(phase="distill", steps=STEPS, batch=BATCH)
    dense, model, run, seconds = calibrated(recipe.model_copy(update={"schedule": (phase,)}), options)
    results = judge_texts(model, dense, run, budgets=(), static=True)
    method = f"{options.sites}, random start, {STEPS} distillation steps"
    return facts(model, options) | {"method": method, "results": results, "seconds": round(seconds)}


@torch.no_grad()
def given_order(model: nn.Module, run: RecipeRun) -> None:
    """MLPs cut as they are; projections by the plain SVD of their weight."""
    for acm in sites(model).values():
        if acm.learners.form == "linear":
            plain_svd(acm)


def plain_svd(acm: ACM) -> None:
    """Learners from the largest singular values of the dense weight."""
    linear: Any = acm.dense
    u, s, vh = torch.linalg.svd(linear.weight)
    rank = acm.learners.w_in.shape[0] * acm.learners.w_in.shape[1]
    acm.learners.w_in.copy_(vh[:rank].view_as(acm.learners.w_in))
    assert acm.learners.w_out is not None
    acm.learners.w_out.copy_((u * s)[:, :rank].reshape(acm.learners.w_out.shape))
    acm.learners.b_out.copy_(linear.bias.expand_as(acm.learners.b_out))
    acm.state = "learners"


@torch.no_grad()
def by_magnitude(model: nn.Module, run: RecipeRun) -> None:
    """MLPs cut in the order of |w_in| |w_out| of their neurons."""
    for acm in sites(model).values():
        learners = acm.learners
        assert learners.b_in is not None and learners.w_out is not None
        size = learners.w_in.flatten(0, 1).norm(dim=1) * learners.w_out.flatten(1).norm(dim=0)
        order = size.argsort(descending=True)
        learners.w_in.copy_(learners.w_in.flatten(0, 1)[order].view_as(learners.w_in))
        learners.b_in.copy_(learners.b_in.flatten()[order].view_as(learners.b_in))
        learners.w_out.copy_(learners.w_out.flatten(1)[:, order].view_as(learners.w_out))


def measure_digits(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The demo's ViT on all of its held-out canvases: every budget, and every token the same k as its control."""
    recipe = digits_recipe(options)
    dense, model, run, seconds = calibrated(recipe, options)
    row = facts(model, options) | {"seconds": round(seconds), "method": label(options)}
    stream = BatchStream(dataset=run.dataset(run.data.eval), batch=300)
    lowest = conversion(model).table_min
    budgets = [budget for budget in recipe.budgets.report if budget >= lowest]
    found = evaluate(model, stream.epoch(), run.task, budgets=[*budgets, *every_k(model)], dense=dense)
    results = [dataclasses.asdict(result) for result in (*found.budgets, *found.fixed)]
    examples = {"dense": found.metric.dense, "examples": found.n, "sources": found.groups}
    return [row | examples | {"results": results}]


def digits_recipe(options: argparse.Namespace) -> Recipe:
    """The shipped recipe as it is, but for the kinds of sites, their forms, and the tokens, where those were asked."""
    recipe = load_recipe(shipped_recipe("digits_vit"))
    kept = [rule for rule in recipe.sites if options.sites == "all" or "mlp" in rule.match]
    asked = {"lossless": options.lossless} | ({} if options.form is None else {"form": options.form})
    rules = [rule.model_copy(update=asked if "attn" in rule.match else {"lossless": options.lossless}) for rule in kept]
    phases = [phase.model_copy(update={"tokens": options.tokens or phase.tokens}) for phase in recipe.schedule]
    options.tokens = phases[0].tokens
    return recipe.model_copy(update={"sites": tuple(rules), "schedule": tuple(phases)})


def label(options: argparse.Namespace) -> str:
    """Name of a row."""
    form = "" if options.form is None else f", {options.form}"
    return f"{options.sites}, {'lossless' if options.lossless else 'default'}{form}"


def facts(model: nn.Module, options: argparse.Namespace) -> dict[str, Any]:
    """Facts that every figure has to be quoted with."""
    owner = conversion(model)
    planned, cost = owner.plan.sites, owner.plan.cost
    forms = [site.form if site.kind == "linear" else site.second_layer for site in planned]
    return {
        "forms": {form: forms.count(form) for form in sorted(set(forms))},
        "gate_width": sorted({site.gate_width for site in planned}),
        "added_params": cost.acm_params / owner.plan.model.dense_params - 1,
        "tokens": options.tokens,
        "k_lo": owner.table.points[0].k_lo if owner.table else None,
        "sites": len(planned),
    }


def table_row(row: dict[str, Any]) -> str:
    """One row as Markdown."""
    cells = []
    for result in row["results"]:
        at = f"k = {result['k']}" if "k" in result else f"{result['asked']:g}"
        text = f"{at}: {result['metric']:.4f} ({result['reached']:.3f})"
        if result.get("likeness") is not None:
            of_texts = row.get("dense") is None
            text += f" ρ {result['likeness']:.3f}" if of_texts else f" agreement {result['likeness']:.4f}"
        if result.get("foreground"):
            use = result["foreground"]
            text += f" digit/background {use['ratio']:.2f}, in MACs {use['macs']:.2f} (shuffled {use['shuffled']:.3f})"
        if row.get("dense") is not None and result.get("difference"):
            text += f" loss {-result['difference']['mean']:.4f} (≤ {-result['difference']['low']:.4f})"
        cells.append(text)
    head = f"{row['method']} | {row['forms']} | {row['gate_width']} | {row['added_params']:+.1%} | {row['tokens']}"
    return f"| {head} | {row['k_lo']} | {row['seconds']} s | " + " · ".join(cells) + " |"


def table(folder: Path) -> str:
    """All rows kept in `folder`."""
    head = "| sites, method | forms | gate width | added parameters | tokens | lowest k | CPU time | results |"
    rows = [table_row(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return "\n".join([head, "|" + " --- |" * 8, *rows, ""])


if __name__ == "__main__":
    main()
