"""The state of one training on disk, from which it goes on at the very step where it was cut.

    compare/METHOD/state/TRAINING.pt    what is trained, buffers, optimizer, generators, and what they belong to

A file is written whole or not at all. Those of a method's finished trainings stay until the method is measured.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from acm_compiler.errors import StorageError
from acm_compiler.files import storing, whole_file
from acm_compiler.training.live_state import generator_states, restore_generators
from acm_compiler.training.loop import Optimization


def state_path(directory: Path, name: str) -> Path:
    """The file of the training called `name` of the method whose folder this is."""
    return directory / "state" / f"{re.sub(r'[^A-Za-z0-9_.]+', '-', name).strip('-')}.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """A training kept in one file. tensors: all that it changes; facts: what another training would differ in."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Sequence[Tensor]
    optimization: Optimization
    device: torch.device

    def save(self, step: int, *, is_last: bool) -> None:
        """Keep what `step` optimizer steps have made; of a finished training all but the optimizer. StorageError."""
        document = {
            "facts": dict(self.facts),
            "step": step,
            "tensors": [tensor.detach() for tensor in self.tensors],
            "optimization": None if is_last else self.optimization.state_dict(),
            "generators": generator_states(self.device),
        }
        with storing(self.path, "the state of a training cannot be saved"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as beside:
                torch.save(document, beside)

    @torch.no_grad()
    def load(self) -> int:
        """Go back to what was saved, and return how many steps are done: 0 where nothing of this training was.

        StorageError where the file is damaged.
        """
        if not self.path.is_file():
            return 0
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            if found["facts"] != dict(self.facts):
                return 0
            for tensor, saved in zip(self.tensors, found["tensors"], strict=True):
                tensor.copy_(saved)
            if found["optimization"] is not None:
                self.optimization.load_state_dict(found["optimization"])
            restore_generators(found["generators"], self.device)
            return int(found["step"])
        except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
            raise StorageError(
                "the state of a training is damaged",
                where=str(self.path),
                found=error,
                fix="remove that file: this training then starts over",
            ) from error
