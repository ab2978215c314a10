"""The folder of an export, written whole or not at all, and its export.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from acm_compiler.checkpoint.folder import Writer, refuse_others, write_folder
from acm_compiler.errors import StorageError, UsageError
from acm_compiler.exporting.fixed import learner_share
from acm_compiler.exporting.traced import TensorInput
from acm_compiler.files import folder_at, parse_json, whole_file, write_file
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.planning.plan import class_of
from acm_compiler.recipe.resolved import installed_versions

DESCRIPTION = "export.json"
FORMAT = 1


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder that `path` is. UsageError unless it is new, empty, or holds an earlier export alone."""
    folder = folder_at(path)
    own = set() if folder.is_file() else _listed(folder)
    refuse_others(folder, own.__contains__, "the folder holds files that no export wrote", UsageError)
    return folder


def write_export(folder: Path, writers: Mapping[str, Writer], facts: Mapping[str, Any], *, size_bytes: int) -> None:
    """Write the files and export.json, all or none; those of an earlier export are removed.

    StorageError when the folder cannot be written.
    """
    before = _listed(folder)
    text = json.dumps({**facts, "files": [*writers, DESCRIPTION]}, indent=1)
    every = {**writers, DESCRIPTION: lambda path: write_file(path, text)}
    write_folder(folder, every, size_bytes=size_bytes, among_others=True)
    for name in before - set(every):
        (folder / name).unlink(missing_ok=True)


def moves(aside: Path) -> dict[str, Writer]:
    """Writers that move the files of the folder `aside`."""
    return {path.name: partial(_move, path) for path in sorted(aside.iterdir())}


def _move(source: Path, target: Path) -> None:
    with whole_file(target) as beside:  # with the permissions of the user's files: safetensors withholds them
        shutil.move(source, beside)


def size_of(aside: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.stat().st_size for path in aside.iterdir())


def describe(
    found: Rewritten,
    format: str,
    inputs: Sequence[TensorInput],
    *,
    usage: str,
    error: float,
    fixed: Mapping[str, int] | None = None,
    clamps: bool = False,
) -> dict[str, Any]:
    """export.json but for the files: `fixed` is k by site, where budgets are no input; clamps: none is refused."""
    table = found.owner.table
    budgets = table and {
        "range": [found.owner.table_min, 1.0],
        "out_of_range": "clamped" if clamps else "refused",
        "examples": table.examples,
        "table": [asdict(point) for point in table.points],
        "metrics": [asdict(budget) for budget in table.evaluated],
    }
    return {
        "format": FORMAT,
        "kind": format,
        "class": class_of(found.model),
        "versions": installed_versions(),
        "usage": usage,
        "inputs": [asdict(tensor) for tensor in inputs],
        "relative_error": error,
        "k": dict(fixed) if fixed else None,
        "learner_share": learner_share(found, fixed) if fixed else None,
        "budgets": budgets,
    }


def _listed(folder: Path) -> set[str]:
    """The files of an earlier export in `folder`, by its export.json; none where there is no such file."""
    try:
        names = parse_json((folder / DESCRIPTION).read_text(encoding="utf-8"))["files"]
        return {name for name in names if Path(name).name == name}
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, TypeError) as error:
        where, fix = str(folder / DESCRIPTION), "choose an empty or new folder"
        raise StorageError("this is not a description of an export", where=where, fix=fix) from error
