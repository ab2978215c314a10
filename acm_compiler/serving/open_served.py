"""From a saved folder to a model that can be served: task, reader and budgets, without opening any data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm.quantized.integers import To
from acm_compiler.calibration.quantized.quantize import quantize
from acm_compiler.checkpoint import load
from acm_compiler.errors import UsageError
from acm_compiler.evaluation.results import Evaluation
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.passes.rewrite.revert import finalize
from acm_compiler.planning.plan import Plan
from acm_compiler.recipe import Recipe, expand_paths
from acm_compiler.recipe.datasets import DataConfig, ImageFolderData, PictureData, TextData, TextRowsData
from acm_compiler.recipe.tasks import AUDIO_RATES, ClassifyTask, EmbedTask, TaskConfig
from acm_compiler.runs.given import Given, parse_budgets
from acm_compiler.runs.opened import saved_recipe
from acm_compiler.runtime.meter import meter
from acm_compiler.serving.readers import Audio, Images, Reader, Texts
from acm_compiler.serving.served import Kind, RecentUsage, Served
from acm_compiler.sources.build import build
from acm_compiler.tasks.open_task import open_task
from acm_compiler.training.machine import find_device

_TOKENIZER = "tokenizer.json"
_LONGEST = 512  # tokens of a text, where the model takes as many
_ENGINES = "language models are served by vLLM and by `transformers serve`: see docs/vllm.md and docs/serve.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of the model that is served: its device, None for the recipe's; what is done to it; the longest text."""

    device: str | None = None
    compiled: bool = False
    quantized: To | None = None
    longest: int | None = None
    allow_code: bool = False


def open_served(directory: Path, given: Given, options: ModelOptions) -> Served:
    """The model saved in `directory`, without its dense regions. UsageError for a task that is not served."""
    recipe = saved_recipe(directory)
    recipe = recipe and expand_paths(recipe)
    given = given.over(recipe)
    kind = _kind(given.task, directory)
    base = None if given.base is None else build(given.base).model
    model = finalize(load(directory, base_model=base, allow_code=options.allow_code))
    model = model.to(find_device(options.device or (recipe.run.device if recipe else "auto"), where="--device"))
    found = rewritten(model)
    if options.quantized is not None and found.owner.quantized is None:
        quantize(model, options.quantized)
    use = RecentUsage(meter(model))
    assert given.task is not None
    return Served(
        name=recipe.name if recipe else directory.absolute().name,
        kind=kind,
        model=model,
        call=torch.compile(model, backend="acm", dynamic=True) if options.compiled else model,
        task=open_task(given.task, None, model),
        reader=_reader(directory, model, found.owner.plan, recipe, given.data, options),
        found=found,
        use=use,
        classes=_classes(model, given.data),
    )


def _kind(task: TaskConfig | None, directory: Path) -> Kind:
    if isinstance(task, EmbedTask):
        return "embed"
    if isinstance(task, ClassifyTask):
        return "classify"
    found = "none was named" if task is None else task.kind
    fix = _ENGINES if task is not None and task.kind == "causal_lm" else "name one: --task embed"
    raise UsageError("no task that is served", where=str(directory), found=found, expected="embed, classify", fix=fix)


def _reader(
    directory: Path, model: Any, plan: Plan, recipe: Recipe | None, data: DataConfig | None, options: ModelOptions
) -> Reader:
    """The reader of requests: of images or audio by what the model takes, of texts where there is a tokenizer."""
    size = plan.model.image_size
    if size is not None:
        channels = int(plan.model.inputs.split(" x ")[1])
        return Images((channels, *size), _transform(data, size))
    config = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) == "input_values" and hasattr(config, "conv_stride"):
        return _audio(config, recipe, data)
    tokenizer = directory / _TOKENIZER
    named = data.tokenizer if isinstance(data, (TextData, TextRowsData)) else None
    if not tokenizer.is_file() and named is None:
        raise UsageError(
            "requests to this model cannot be read",
            where=str(directory),
            found=f"an example of {plan.model.inputs}, and no {_TOKENIZER}",
            expected="images, audio as wav2vec2 and its like take it, or texts and their tokenizer",
            fix="put the tokenizer's file into the folder, or name it: "
            "--data '{kind: texts, split: eval, tokenizer: PATH}'",
        )
    most = min(_LONGEST, getattr(model.config, "max_position_embeddings", None) or _LONGEST)
    vocabulary = model.get_input_embeddings().num_embeddings
    longest = min(options.longest or most, most)
    return Texts(str(tokenizer) if tokenizer.is_file() else str(named), longest=longest, vocabulary=vocabulary)


def _audio(config: Any, recipe: Recipe | None, data: DataConfig | None) -> Audio:
    """The reader of clips, by the convolutions that make frames of them; files: at the data's rate, or the recipe's."""
    fewest, frame = 1, 1
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        fewest, frame = (fewest - 1) * stride + kernel, frame * stride
    rate = AUDIO_RATES.get(data.kind) if data else None
    if rate is None and recipe is not None and recipe.input is not None:
        rate = recipe.input.sample_rate
    return Audio(frame=frame, fewest=fewest, rate=rate)


def _transform(data: DataConfig | None, size: tuple[int, int]) -> Callable[[Any], Tensor] | None:
    """The function from files to images, where the data are files."""
    if not isinstance(data, PictureData):
        return None
    from acm_compiler.data.images import picture_transform

    return picture_transform(data, size)


def _classes(model: nn.Module, data: DataConfig | None) -> Mapping[int, str]:
    """Names of the classes: those of the data set where they can be read without opening it, else the model's own."""
    if isinstance(data, ImageFolderData) and (root := Path(data.root)).is_dir():
        return dict(enumerate(sorted(path.name for path in root.iterdir() if path.is_dir())))
    if isinstance(data, TextData) and data.classes:
        return dict(enumerate(data.classes))
    return getattr(getattr(model, "config", None), "id2label", None) or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The budgets that a controller may choose, as shares of learner MACs, and the words for why it goes no lower."""

    low: float
    high: float
    why: str


def budget_range(
    served: Served, evaluation: Evaluation | None, budgets: str | None, most_loss: float | None, *, slo: bool
) -> Range:
    """The budgets from --budgets and --max-loss. UsageError and BudgetUnreachable for what cannot be.

    Without either a model that has an objective goes no lower than it was ever evaluated at, and one without keeps the
    budget it has.
    """
    assert served.found is not None
    owner, why = served.found.owner, "the lowest budget allowed"
    if budgets is None:
        low = owner.table_min
        if most_loss is None and evaluation is not None and evaluation.budgets:
            low, why = max(low, min(row.asked for row in evaluation.budgets)), "the lowest budget evaluated"
        kept = owner.budget if isinstance(owner.budget, float) else owner.default_budget
        high = 1.0 if slo or kept is None else kept
        if not slo:
            low = high
    else:
        first, _, last = budgets.partition(":")
        low, high = (served.share(parse_budgets(text)[0], option="--budgets") for text in (first, last or first))
    if most_loss is not None:
        least = _least_budget(evaluation, most_loss)
        if least > high:
            expected = f"budget {least:.3g}"
            raise UsageError(
                "no allowed budget keeps the loss that low", where="--max-loss", found=most_loss, expected=expected
            )
        if least > low:
            low, why = least, f"the lowest measured budget that loses at most {most_loss:g}"
    return Range(low=low, high=high, why=why)


def _least_budget(found: Evaluation | None, most_loss: float) -> float:
    """The lowest evaluated budget from which on no budget loses more of the metric against the dense model."""
    if found is None or found.metric.dense is None:
        what = "no evaluation of this model" if found is None else "no metric of the dense model"
        fix = "measure it: acmc eval DIR, which needs the dense model, too"
        raise UsageError("the metric at each budget is not known", where="--max-loss", found=what, fix=fix)
    if found.metric.is_share and most_loss > 1:
        fix = f"{most_loss:g} points of a hundred are {most_loss / 100:g}"
        raise UsageError(
            "a share cannot lose that much", where="--max-loss", found=most_loss, expected="0 to 1", fix=fix
        )
    sign = -1 if found.metric.lower_is_better else 1
    least = None
    for row in sorted(found.budgets, key=lambda row: -row.asked):
        if sign * (found.metric.dense - row.metric) > most_loss:
            break
        least = row.asked
    if least is None:
        losses = [sign * (found.metric.dense - row.metric) for row in found.budgets]
        expected = f"{min(losses):.3g} at least" if losses else "an evaluation with budgets"
        raise UsageError("every budget loses more than that", where="--max-loss", found=most_loss, expected=expected)
    return least
