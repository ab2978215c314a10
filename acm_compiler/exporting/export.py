"""`acm.export`: a rewritten model as something that runs, or loads, without the Python code that made it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from acm_compiler.acm.intact import refuse_in_parts, refuse_skips
from acm_compiler.checkpoint.folder import checked_extra
from acm_compiler.errors import UsageError, check_bool, did_you_mean, require_packages
from acm_compiler.exporting import aoti, checkpoint, onnx
from acm_compiler.exporting.calls import (
    Axes,
    Call,
    Outputs,
    batch_of,
    copied_tensors,
    example_call,
    free_axes,
    names_of,
    plain_output,
    tensors_alone,
    widened,
    with_signature,
)
from acm_compiler.exporting.controls import Controlled, asserted, check_controls, example_controls
from acm_compiler.exporting.fixed import Called, as_dense_layers, fixed_ks, hold, ks_of_budget
from acm_compiler.exporting.folder import check_folder, describe, moves, size_of, write_export
from acm_compiler.exporting.traced import (
    Traced,
    check_answers,
    counters_kept,
    drawn,
    refuse_python,
    refusing,
    trace,
    with_products_of_torch,
    without_dense_regions,
)
from acm_compiler.files import write_file
from acm_compiler.passes.rewrite.conversion import Rewritten, wholly_rewritten
from acm_compiler.passes.rewrite.revert import rewritten_root
from acm_compiler.runtime.control import spend
from acm_compiler.runtime.measure_budgets import undisturbed
from acm_compiler.sources.inputs import Inputs

FORMATS = ("pt2", "aoti", "onnx", "checkpoint")
_PROGRAM = "program.pt2"


@torch.inference_mode(False)
def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Inputs,
    format: str = "pt2",
    *,
    controls: str | Sequence[str] = ("budget",),
    per_example: bool = False,
    dynamic: Axes | None = None,
    fixed_k: int | None = None,
    budget: float | str | None = None,
    extra: Mapping[str, bytes | str] | None = None,
) -> Path:
    """Export a rewritten model to the folder `path` and return the file in it that holds the model.

    format "pt2": a program of torch.export that takes its budget as one more input, `budget=torch.tensor(0.4)`, in one
    graph for all budgets; torch.export.load reads it once acm_compiler.acm is imported.
    format "aoti": the same as a package of AOTInductor, which runs in C++ programs and where this package is not
    installed: for CPUs with the operators of ACMs in a library beside it, for a GPU with their Triton kernels in it;
    needs a C++ compiler.
    format "onnx": the same in standard operators of ONNX, which sort tokens by k and compute what each of them runs;
    with `fixed_k` or `budget`, the dense layers of the first learners alone, for any model.
    format "checkpoint": an ordinary checkpoint of the model's transformers class in which every token runs as many
    learners, merged into thinner layers; from_pretrained loads it where this package is not installed.
    example_inputs: what the model is called with; the number of examples is free, and so is the length of texts.
    dynamic: further axes of any length, {"x": 1}, or {"x": (1, 2)}, by the names of the model's inputs.
    per_example: the budget has one value per example, [batch]. controls: further inputs beside the budget: "cap", a
    bound on every token's k as a share of N, and "k_lo" and "k_hi", in learners.
    fixed_k: learners that every token runs. budget: a fixed k for each site instead, the mean that its gates choose
    at that budget on the example inputs, rounded so that all cost no more. extra: further files of a checkpoint's
    folder by name, such as those of its tokenizer.
    The folder also holds export.json: inputs, budgets, metrics, versions. It is written whole or not at all, once the
    program's outputs were compared with the model's, which is left as it was.
    Raises UsageError for what cannot be exported, SitesNotFitted, BudgetUnreachable, StorageError, NotRewritten,
    LayoutUnknown for budgets per example where a site's tokens cannot be told apart, VerificationFailed.
    """
    check_bool(per_example, "per_example")
    folder = check_folder(path)
    check_format(format, fixed_k, budget, extra)
    files = checked_extra(extra)
    if format == "onnx":
        require_packages(onnx.PACKAGES, "ONNX", "onnx")
    found = wholly_rewritten(rewritten_root(model), "an export")
    refuse_in_parts(model, "an export")
    refuse_skips(found.acms, "an export")
    if format == "onnx":
        onnx.check_weights(found)
    if format == "aoti":
        aoti.check_sites(found)
    call = example_call(found.model, example_inputs)
    if format == "checkpoint":
        return _write_checkpoint(found, folder, call, _chosen_ks(found, call, fixed_k, budget), files)
    with undisturbed(found), without_dense_regions(found), counters_kept(found, traced=format == "pt2"):
        outputs = {"pt2": plain_output, "aoti": tensors_alone, "onnx": copied_tensors}[format]
        if fixed_k is not None or budget is not None:
            ks = _chosen_ks(found, call, fixed_k, budget)
            traced = _of_any_batch(call, lambda call: _with_fixed_k(found, call, ks, dynamic=dynamic, outputs=outputs))
            return _write_files(found, traced, folder, format, ks)
        named = check_controls(controls, inputs=names_of(found.model, call))
        require = aoti.required if format == "aoti" else asserted
        made = partial(Controlled, found, named, per_example=per_example, require=require)
        traced = _of_any_batch(call, lambda call: _with_budgets(found, made(), call, dynamic=dynamic, outputs=outputs))
        if format == "pt2":
            return _write_pt2(found, traced, folder)
        return _write_files(found, traced, folder, format, {})


def _write_pt2(found: Rewritten, traced: Traced, folder: Path) -> Path:
    with_products_of_torch(traced.program)
    error = traced.check(traced.program.module(), where="pt2")
    for acm in found.acms.values():
        if acm.counts is not None:  # the program's own, which the check has added to
            acm.counts.zero_()
    # the import of this package registers the program's operators
    usage = f'import torch, acm_compiler.acm; model = torch.export.load("{_PROGRAM}").module()'
    usage += f"; model({', '.join(traced.words)})"
    facts = describe(found, "pt2", traced.inputs, usage=usage, error=error, clamps=traced.clamps)
    writers = {_PROGRAM: partial(torch.export.save, traced.program)}
    write_export(folder, writers, facts, size_bytes=traced.size_bytes)
    return folder / _PROGRAM


def _write_files(found: Rewritten, traced: Traced, folder: Path, format: str, ks: Mapping[str, int]) -> Path:
    """Write the files of a format that others than torch run, and try them."""
    refuse_python(traced.program, format)
    made: Any = {"aoti": aoti, "onnx": onnx}[format]
    with tempfile.TemporaryDirectory() as name:
        aside = Path(name)
        made.write(traced, aside)
        error = traced.check(made.runner(aside), where=format)
        clamps = format == "onnx" or traced.clamps
        facts = describe(found, format, traced.inputs, usage=made.usage(traced), error=error, fixed=ks, clamps=clamps)
        if format == "aoti":
            facts |= aoti.facts(traced)
        write_export(folder, moves(aside), facts, size_bytes=size_of(aside))
    return folder / made.FILE


def _write_checkpoint(
    found: Rewritten, folder: Path, call: Call, ks: Mapping[str, int], extra: dict[str, bytes | str]
) -> Path:
    args, kwargs = call
    checkpoint.check_class(found, ks)
    built: Any = checkpoint.build(found, ks)
    with undisturbed(found):
        hold(found, ks)
        answers = [plain_output(drawn(partial(each, *args, **kwargs))) for each in (built, found.model)]
        error = check_answers(*answers, where="checkpoint")
    facts = describe(found, "checkpoint", [], usage=checkpoint.usage(found.model), error=error, fixed=ks)
    with tempfile.TemporaryDirectory() as aside:
        built.save_pretrained(aside)
        for name, content in extra.items():
            if (Path(aside) / name).exists():
                raise UsageError(
                    "an extra file has the name of one of the checkpoint's", where="extra", found=name, fix="rename it"
                )
            write_file(Path(aside) / name, content)
        write_export(folder, moves(Path(aside)), facts, size_bytes=size_of(Path(aside)))
    return folder / checkpoint.FILE


def _chosen_ks(found: Rewritten, call: Call, fixed_k: int | None, budget: float | str | None) -> dict[str, int]:
    """The fixed k of every site; UsageError for example inputs that the model does not take, too."""
    _check_runs(found.model, call)
    if budget is None:
        return fixed_ks(found, fixed_k)
    return ks_of_budget(found, budget, lambda: found.model(*call[0], **call[1]))


def check_format(format: str, fixed_k: int | None = None, budget: float | str | None = None, extra: Any = None) -> None:
    """UsageError unless there is such a format, and these options go with it and with each other."""
    if format not in FORMATS:
        raise UsageError(
            f"no such format{did_you_mean(str(format), FORMATS)}", found=repr(format), expected=", ".join(FORMATS)
        )
    if format in ("pt2", "aoti") and (fixed_k is not None or budget is not None):
        fix = "controls=('k_lo', 'k_hi') makes k an input"
        where = "fixed_k" if budget is None else "budget"
        raise UsageError("a fixed k is for the formats onnx and checkpoint", where=where, found=format, fix=fix)
    if fixed_k is not None and budget is not None:
        raise UsageError("a k and a budget to take k from", found=f"fixed_k={fixed_k}, budget={budget}", expected="one")
    if extra and format != "checkpoint":
        raise UsageError("extra files must be None but for the format checkpoint", where="extra", found=format)


def _of_any_batch(call: Call, trace_call: Callable[[Call], Traced]) -> Traced:
    """The program of `call` for any number of examples; for that of the call alone where the model takes no other."""
    if (wide := widened(call)) is not call:
        with contextlib.suppress(UsageError):  # of the call as it was given, it is raised below
            traced = trace_call(wide)
            tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
            pairs = zip(tensors, traced.inputs, strict=False)  # those of the controls come last
            if all("batch" in free.shape for given, free in pairs if given.shape[:1] == (1,)):
                return traced
    return trace_call(call)


def _with_budgets(
    found: Rewritten, module: Controlled, call: Call, *, dynamic: Axes | None, outputs: Outputs
) -> Traced:
    """The program whose budget is an input."""
    model = found.model
    _check_runs(model, call)
    extra = example_controls(module, batch=batch_of(*call) if module.per_example else None)
    args, kwargs = call[0], call[1] | extra
    names = [*names_of(model, call), *extra]

    def answer(budget: float) -> Any:
        spend(found, budget)
        return plain_output(model(*call[0], **call[1]))

    axes = free_axes(names, (args, kwargs), dynamic)
    program = trace(with_signature(module.eval(), names, outputs), (args, kwargs), axes)
    return Traced(
        program=program,
        call=(args, kwargs),
        names=tuple(names),
        answer=answer,
        low=module.low,
        quantized=found.owner.quantized is not None,
    )


def _with_fixed_k(
    found: Rewritten, call: Call, ks: Mapping[str, int], *, dynamic: Axes | None, outputs: Outputs
) -> Traced:
    """The program in which every token of a site runs as many learners as `ks` says."""
    model, names = found.model, names_of(found.model, call)

    def answer(_: float) -> Any:
        hold(found, ks)
        return plain_output(model(*call[0], **call[1]))

    with as_dense_layers(found, ks):
        module = with_signature(Called(model).eval(), names, outputs)
        program = trace(module, call, free_axes(names, call, dynamic))
    return Traced(program=program, call=call, names=tuple(names), answer=answer, low=None, quantized=False)


def _check_runs(model: nn.Module, call: Call) -> None:
    """UsageError for example inputs that the model itself does not take."""
    with refusing("the model does not run on the example inputs"):
        model(*call[0], **call[1])
