"""`acm.load`: a saved folder as a running model again."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from acm_compiler.checkpoint.documents import (
    FORMATS,
    check_budgets,
    check_description,
    choices_in_words,
    restore_choices,
    restore_document,
)
from acm_compiler.checkpoint.folder import BUDGETS, MODEL, PLAN, WEIGHTS
from acm_compiler.checkpoint.hf_files import restore_generation
from acm_compiler.checkpoint.save import digest, file_digest, graph_digest
from acm_compiler.checkpoint.source import first_difference, other_functions
from acm_compiler.checkpoint.tensors import Stored, fill, left_on_meta, read_tensors, renew_run_time
from acm_compiler.errors import PlanMismatch, StorageError, check_bool
from acm_compiler.evaluation.times import load_times
from acm_compiler.files import folder_at, parse_json
from acm_compiler.passes.rewrite.build_acm import mark_initialized
from acm_compiler.passes.rewrite.conversion import Conversion, rewritten, sites
from acm_compiler.passes.rewrite.revert import finalize
from acm_compiler.passes.rewrite.rewrite import check_convertible, convert, copied
from acm_compiler.planning.call_times import CallTimes
from acm_compiler.planning.plan import Plan, fits, warn_of_class
from acm_compiler.runtime.control import set_budget
from acm_compiler.runtime.quantized_linear import replace_linears
from acm_compiler.sources.build import build_from_record

_LOG = logging.getLogger(__name__)
_STATE = "state"
_OUR_FOLDER = "a folder that acm.save or acmc rewrite wrote"


class _Saved(NamedTuple):
    """A saved model as its folder holds it."""

    folder: Path
    description: dict[str, Any]
    plan: Plan
    budgets: dict[str, Any]
    stored: Stored

    @property
    def rest(self) -> Sequence[str]:
        """The linears outside of ACMs that are quantised."""
        return self.budgets.get("quantized_rest", ())


@torch.inference_mode(False)
def load(
    directory: str | os.PathLike[str], *, base_model: nn.Module | None = None, allow_code: bool = False
) -> nn.Module:
    """The model that `save` wrote to `directory`, on the CPU, in eval mode, with what was set on it when it was saved.

    That is its budget, its cap, a fixed k; where none was set, the budget of the recipe that made it; else every token
    runs all learners. The log says which, and so does `acm.status`.
    base_model: the model before the rewrite, for classes that only the user can build (its structure is compared),
    and for dense regions, which `revert`, calibration and distillation need; they are taken from it if its weights
    and activations are those that were replaced. It is not changed. allow_code: whether a function named in the
    directory is imported.
    Raises StorageError, PlanMismatch for a base model of another structure, ModelSourceError.
    """
    check_bool(allow_code, "allow_code")
    folder = folder_at(directory)
    description, plan, budgets = read_folder(folder)
    digests = description["digests"]
    # folders written before there was a digest of weights have them in one file
    names = [name for name in digests if name.endswith(Path(WEIGHTS).suffix)] or [WEIGHTS]
    stored = read_tensors(folder / name for name in names)
    if stored.save_id != description["save"]:
        raise _mixed(folder, WEIGHTS)
    for name in names:
        _check_weights(folder / name, digests.get(name))
    saved = _Saved(folder, description, plan, budgets, stored)
    model = _from_source(saved, allow_code=allow_code) if base_model is None else _from_base(base_model, saved)
    _restore_budgets(model, budgets, folder)
    rewritten(model).owner.times = _times(folder, description["save"])
    restore_generation(model, folder)
    return model.eval()


def saved_conversion(directory: str | os.PathLike[str]) -> Conversion:
    """The plan, budget table and default budget of a saved model, without its weights. StorageError as `load`."""
    _, plan, budgets = read_folder(directory)
    owner = Conversion(plan=plan)
    restore_document(owner, {}, budgets)
    return owner


def build_dense(directory: str | os.PathLike[str], *, allow_code: bool = False) -> nn.Module:
    """The model before conversion with random weights, by what the directory says of how it is built. StorageError and
    ModelSourceError as `load`."""
    folder = Path(directory)
    description, _, _ = read_folder(folder)
    return build_from_record(_source_of(description, folder), device="cpu", allow_code=allow_code)


def read_folder(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], Plan, dict[str, Any]]:
    """model.json, the plan and budgets.json, of one save and of a format that is known here; else StorageError."""
    folder = folder_at(directory)
    description = _description(folder)
    texts = {name: _text(folder, name) for name in (PLAN, BUDGETS)}
    for name, text in texts.items():
        if digest(text) != description["digests"].get(name):
            raise _mixed(folder, name)
    plan = Plan.from_json(texts[PLAN])
    check_budgets(texts[BUDGETS], plan, str(folder / BUDGETS))
    return description, plan, parse_json(texts[BUDGETS])


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        unfinished = (folder / _STATE).is_dir()
        fix = "continue it: acmc rewrite, with its own options and --resume" if unfinished else f"name {_OUR_FOLDER}"
        found = f"the {_STATE} of an unfinished run" if unfinished else None
        raise StorageError(
            "no saved model here", where=str(folder), found=found, expected=f"{name} in it", fix=fix
        ) from None
    except NotADirectoryError:
        raise StorageError("this is a file, not a folder", where=str(folder), fix=f"name {_OUR_FOLDER}") from None
    except (OSError, ValueError) as error:
        raise StorageError(
            "the file cannot be read",
            where=str(folder / name),
            found=getattr(error, "strerror", None) or error,
            fix="check its permissions, or save the model again",
        ) from error


def _description(folder: Path) -> dict[str, Any]:
    """The content of model.json. StorageError for another format, and for another kind of file."""
    text, path = _text(folder, MODEL), folder / MODEL
    try:
        document = parse_json(text)
    except ValueError:
        document = None
    number = document.get("format") if isinstance(document, dict) else None
    if isinstance(number, int) and number not in FORMATS:
        versions = document.get("versions")
        written_by = versions.get("acm_compiler", "unknown") if isinstance(versions, dict) else "unknown"
        raise StorageError(
            "the model was saved in a format that this version does not read",
            where=str(path),
            found=f"format {number}, written by acm_compiler {written_by}",
            expected=f"format {' or '.join(map(str, FORMATS))}",
            fix=f"pip install 'acm_compiler>={written_by}'",
        )
    check_description(text, str(path))
    return document


def _mixed(folder: Path, name: str) -> StorageError:
    return StorageError(
        "the files here are not of one save",
        where=str(folder),
        found=f"another {name} than the one model.json names",
        fix="save the model again; a save may have been interrupted, or a file was changed by hand",
    )


def _check_weights(path: Path, expected: str | None) -> None:
    """Refuse weights with other bytes than were saved; folders written before there was a digest say nothing of it."""
    if expected is not None and (found := file_digest(path)) != expected:
        raise StorageError(
            "the weights are not the bytes that were saved: the file is damaged, or was changed",
            where=str(path),
            found=f"SHA-256 {found[:16]}…",
            expected=f"{expected[:16]}… as model.json says",
            fix="copy or download the file again from where it is whole, or save the model again",
        )


def _from_source(saved: _Saved, *, allow_code: bool) -> nn.Module:
    record = _source_of(saved.description, saved.folder)
    model = _filled(build_from_record(record, device="meta", allow_code=allow_code), saved)
    if without := left_on_meta(model):
        _LOG.info("built with values, which tensors outside parameters and buffers need: %s", ", ".join(without[:3]))
        model = _filled(build_from_record(record, device="cpu", allow_code=allow_code), saved)
    return model


def _source_of(description: dict[str, Any], folder: Path) -> dict[str, Any]:
    if description["source"] is None:
        raise StorageError(
            f"nothing here says how to build {description['class']}",
            where=str(folder),
            fix="build it yourself: acm.load(directory, base_model=model), or --base-model python:my_module:my_model",
        )
    return description["source"]


def _filled(model: nn.Module, saved: _Saved) -> nn.Module:
    """`model` with the plan's ACMs and the stored tensors; without dense regions, but those that forwards run."""
    _check_structure(
        model,
        saved,
        what=f"the installed libraries build another {type(model).__name__} than the one that was saved",
        fix="install the versions named in model.json, or pass base_model=",
    )
    convert(model, saved.plan, empty=True)
    finalize(model)
    _give_values(model, saved)
    return model


def _from_base(base: nn.Module, saved: _Saved) -> nn.Module:
    """A copy of `base` with the plan's ACMs and the stored tensors, dense regions included where they are the same."""
    _check_structure(
        base,
        saved,
        what="base_model is not built as the model that was saved",
        fix="build it as that model was built, with the same sizes; its weights may be others",
    )
    if graph_digest(base.graph if isinstance(base, fx.GraphModule) else None) != saved.description["graph"]:
        raise PlanMismatch("the base model's graph is not the one that was rewritten", fix="trace the model as before")
    model = copied(base)
    other = other_functions(base, saved.plan)
    owner = convert(model, saved.plan, empty=True)
    if owner.teacher is None or owner.teacher != saved.budgets["teacher"]:
        other = "has other weights than the model that was rewritten"
    if other is not None:
        without = "dense regions are left out, which revert, calibration and distillation need"
        _LOG.warning("%s: base_model %s; %s", saved.folder, other, without)
        finalize(model)
    _give_values(model, saved)
    for acm in sites(model).values():
        if acm.dense is not None:
            acm.dense.to(device="cpu", dtype=acm.learners.b_out.dtype)
    return model


def _check_structure(base: nn.Module, saved: _Saved, *, what: str, fix: str) -> None:
    """Raise PlanMismatch unless the parameters of `base` are, by name and shape, those of the saved model.

    The plan knows them as they were when it was made; what was resized since, such as embeddings, the weights know.
    """
    plan, refusal = saved.plan, None
    try:
        check_convertible(base, plan, resized=True)
    except PlanMismatch as error:
        refusal = error
    found = None if refusal is None and fits(plan, base) else first_difference(base, plan, saved.stored, saved.rest)
    if found is not None:
        raise PlanMismatch(what, where=str(saved.folder), found=found[0], expected=found[1], fix=fix) from refusal
    if refusal is not None:
        raise refusal
    warn_of_class(plan, base)


def _give_values(model: nn.Module, saved: _Saved) -> None:
    if (to := saved.budgets.get("quantized")) is not None:
        for acm in sites(model).values():
            if acm.learners.can_quantize(to):
                acm.learners.quantize(to)  # what it holds is of the right kind then, and about to be replaced
        replace_linears(model, saved.rest, to)
    fill(model, saved.stored, where=str(saved.folder / WEIGHTS))
    for acm in sites(model).values():
        renew_run_time(acm)
        mark_initialized(acm)


def _times(folder: Path, save: str) -> CallTimes | None:
    """Times of the model that lies here, None where none were measured or they cannot be read, which the log says."""
    try:
        times = load_times(folder)
    except StorageError as error:
        _LOG.warning("%s", error)
        return None
    return times.of_calls if times is not None and times.save == save else None


def _restore_budgets(model: nn.Module, budgets: dict[str, Any], folder: Path) -> None:
    found = rewritten(model)
    restore_document(found.owner, found.acms, budgets)
    # folders that were written before there were choices may have budgets of phases
    if phases := budgets.get("phase_budgets"):
        set_budget(model, phases)
    else:
        restore_choices(found, budgets.get("choices"), where=folder / BUDGETS)
    _LOG.info("%s: %s", folder, choices_in_words(found))
