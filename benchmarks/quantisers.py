"""Vectors per budget, size on disk: torchao on a model's learners and around: python -m benchmarks.quantisers DIR

DIR: what `acmc rewrite` wrote of a model of task embed. For each way the mean cosine of a text's vector with the dense
model's at each budget. Needs torchao.
"""

from __future__ import annotations

import argparse
import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torchao import quantization

import acm_compiler as acm
from acm_compiler.acm import ACM
from acm_compiler.data import Batch
from acm_compiler.recipe import expand_paths, load_recipe
from acm_compiler.runs.recipe_run import OpenedRecipe
from acm_compiler.sources.build import build
from acm_compiler.sources.inputs import call_model
from acm_compiler.tasks import Task

BUDGETS = (0.25, 0.4, 0.6, 0.75, 1.0)


def around(model: nn.Module, config: str) -> nn.Module:
    """Have torchao quantise the linears outside of ACMs, weight only."""
    kept = {part for site in acm.sites(model).values() for part in site.modules()}
    chosen = getattr(quantization, config)(set_inductor_config=False)
    quantization.quantize_(model, chosen, filter_fn=lambda m, name: isinstance(m, nn.Linear) and m not in kept)
    return model


def on_learners(model: nn.Module, config: str) -> nn.Module:
    """Have torchao quantise the learners, weight only."""
    chosen = getattr(quantization, config)(set_inductor_config=False)
    names = quantization.FqnToConfig({r"re:.*\.learners\.w_(in|up|out|top)": chosen})
    quantization.quantize_(model, names, filter_fn=None)
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "floats": lambda model: model,
    "acm.quantize(model)": acm.quantize,
    "acm.quantize(model, rest=True)": lambda model: acm.quantize(model, rest=True),
    "torchao int8 around float learners": lambda model: around(model, "Int8WeightOnlyConfig"),
    "torchao fp8 around float learners": lambda model: around(model, "Float8WeightOnlyConfig"),
    "torchao int8 on learners": lambda model: on_learners(model, "Int8WeightOnlyConfig"),
    "torchao fp8 on learners": lambda model: on_learners(model, "Float8WeightOnlyConfig"),
    "torchao int8 on learners and around": lambda model: around(
        on_learners(model, "Int8WeightOnlyConfig"), "Int8WeightOnlyConfig"
    ),
    "torchao fp8 on learners and around": lambda model: around(
        on_learners(model, "Float8WeightOnlyConfig"), "Float8WeightOnlyConfig"
    ),
    "torchao int8 around acm.quantize(model)": lambda model: around(acm.quantize(model), "Int8WeightOnlyConfig"),
    "torchao fp8 around acm.quantize(model)": lambda model: around(acm.quantize(model), "Float8WeightOnlyConfig"),
}


def vectors(model: nn.Module, task: Task, batches: list[Batch]) -> Tensor:
    """The vectors of all texts, [texts, D]."""
    found = []
    for batch in batches:
        mask = task.mask(batch)
        with torch.no_grad(), acm.batch(model, mask=mask) if acm_count(model) else nullcontext():
            found.append(task.answer(call_model(model, task.inputs(batch)), mask))
    return torch.cat(found)


def acm_count(model: nn.Module) -> int:
    """Number of ACMs in a model, dense ones too."""
    return sum(isinstance(module, ACM) for module in model.modules())


def kilobytes(model: nn.Module) -> float:
    """Size of the state dict, as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell() / 1e3


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = expand_paths(load_recipe(options.directory / "recipe.yaml"))
    opened, original = OpenedRecipe(recipe), build(recipe.model, device="cpu", example=recipe.input).model.eval()
    model = acm.load(options.directory).eval()
    task = opened.open_task(opened.held_out, model)
    batches = list(opened.first(opened.held_out, options.count, torch.device("cpu")))
    dense = vectors(original, task, batches)
    acm.finalize(model)
    for name, quantise in WAYS.items():
        changed, near = quantise(copy.deepcopy(model)), []
        for budget in BUDGETS:
            acm.set_budget(changed, budget)
            near.append(float(nn.functional.cosine_similarity(vectors(changed, task, batches), dense).mean()))
        print(f"{name}: {kilobytes(changed) / 1e3:.1f} MB", *(f"{value:.4f}" for value in near))


if __name__ == "__main__":
    main()
