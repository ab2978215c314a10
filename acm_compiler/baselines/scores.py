"""The scores of finished methods in the folder of a comparison, so that one that was killed goes on with the next.

compare/run.json    what all of them belong to: the recipe's decisions, the examples
compare/NAME.json   one method's scores and MACs, example by example
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acm_compiler.baselines.measure import Measured
from acm_compiler.errors import UsageError
from acm_compiler.files import parse_json, storing, write_file
from acm_compiler.recipe import first_differences

_FOLDER, _RUN = "compare", "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores kept below one folder, for a run that is `of` this."""

    directory: Path
    of: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of all methods."""
        return self.directory / _FOLDER

    def check(self) -> None:
        """UsageError where the folder holds the scores of another run."""
        before = _read(self.folder / _RUN)
        if before is None:
            return
        if changed := first_differences(before, parse_json(json.dumps(self.of))):
            raise UsageError(
                f"the folder holds the comparison of another run (there -> now):\n  {changed}",
                where=str(self.folder),
                fix="choose another folder by --out; or start over: --force",
            )

    def begin(self, *, anew: bool) -> None:
        """Make the folder; `anew` without what was there."""
        with storing(self.folder):
            if anew and self.folder.exists():
                shutil.rmtree(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
        write_file(self.folder / _RUN, json.dumps(dict(self.of), indent=1))

    def load(self, name: str, budgets: tuple[float, ...], *, steps: int = 0) -> Measured | None:
        """The scores of a method, trained by so many steps, at these budgets; None where they are not whole."""
        found = _read(self.folder / f"{name}.json")
        if found is None or sorted(map(float, (*found["scores"], *found["unreached"]))) != sorted(budgets):
            return None
        if found.get("steps", 0) != steps:
            return None
        return Measured(
            units_E=torch.tensor(found["units"]),
            groups_E=torch.tensor(found["groups"]),
            scores={float(budget): torch.tensor(part) for budget, part in found["scores"].items()},
            macs={float(b): torch.tensor(part, dtype=torch.float64) for b, part in found["macs"].items()},
            seconds={float(budget): spent for budget, spent in found["seconds"].items()},
            unreached=tuple(found["unreached"]),
            steps=steps,
        )

    def save(self, name: str, found: Measured) -> None:
        """Keep a method's scores, whole or not at all. StorageError."""
        document = {
            "units": found.units_E.tolist(),
            "groups": found.groups_E.tolist(),
            "scores": {repr(budget): part.tolist() for budget, part in found.scores.items()},
            "macs": {repr(budget): part.tolist() for budget, part in found.macs.items()},
            "seconds": {repr(budget): spent for budget, spent in found.seconds.items()},
            "unreached": list(found.unreached),
            "steps": found.steps,
        }
        write_file(self.folder / f"{name}.json", json.dumps(document))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
