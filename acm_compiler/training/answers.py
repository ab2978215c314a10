"""Rows of numbers for each example of a data set, computed once and kept on disk.

    state/answers/facts.json                 what they belong to
                  <rank>-<batch>.safetensors  those of some batches, up to the one before this number

A file is written whole or not at all, so that an interrupted run goes on after the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_leaves

from acm_compiler.errors import StorageError, UsageError
from acm_compiler.files import parse_json, storing, whole_file, write_file
from acm_compiler.sources.inputs import Inputs

_NAME = re.compile(r"(\d+)-(\d+)\.safetensors")
_FACTS = "facts.json"
_FILE_BYTES = 32 << 20
_FIX = "continue with what the run was started with, or remove that folder to compute the answers anew"


class AnswerStore:
    """Rows [R, D] by example, written as process `rank` and read as any; an example is known by its inputs' digest."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self._new: list[tuple[int, int, Tensor]] = []
        self._files: list[Any] = []
        self._places: dict[int, tuple[int, int, int, int]] = {}

    def open(self, facts: Mapping[str, Any]) -> int:
        """Note what the rows belong to, and return how many batches this process has written.

        UsageError where the rows that are there belong to something else, StorageError where they are damaged.
        """
        path = self.directory / _FACTS
        if path.is_file():
            found = self._read_facts(path)
            other = next((name for name in facts if found.get(name) != facts[name]), None)
            if other is not None:
                raise UsageError(
                    f"the answers that were kept are of another {other}",
                    where=str(self.directory),
                    found=found.get(other),
                    expected=facts[other],
                    fix=_FIX,
                )
        elif self.rank == 0:
            with storing(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(dict(facts), indent=1))
        return max((number for rank, number in self._written() if rank == self.rank), default=0)

    def _read_facts(self, path: Path) -> dict[str, Any]:
        try:
            return dict(parse_json(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise self._damaged(error) from error

    def _written(self) -> list[tuple[int, int]]:
        """(rank, number of the batch after it) of each file."""
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        return sorted((int(name[1]), int(name[2])) for name in map(_NAME.fullmatch, names) if name)

    def add(self, index: Iterable[int], digests: Iterable[int], rows: Iterable[Tensor], *, after: int) -> None:
        """Keep the rows of a batch's examples; `after`: the number of the next batch. StorageError."""
        self._new += zip(index, digests, rows, strict=True)
        if sum(rows_RD.nbytes for _, _, rows_RD in self._new) >= _FILE_BYTES:
            self.flush(after)

    def flush(self, after: int) -> None:
        """Put on disk what was added since the last file. StorageError."""
        if not self._new:
            return
        index, digests, rows = zip(*self._new, strict=True)
        tensors = {
            "rows": torch.cat(rows).cpu().contiguous(),
            "ends": torch.tensor([len(part) for part in rows]).cumsum(0),
            "index": torch.tensor(index),
            "digests": torch.tensor(digests),
        }
        path = self.directory / f"{self.rank}-{after}.safetensors"
        with storing(path, "the answers of the original cannot be kept"), whole_file(path) as beside:
            save_file(tensors, beside)
        self._new = []

    def read(self) -> None:
        """Look up what all processes have written. StorageError where it is damaged."""
        try:
            for number, (rank, after) in enumerate(self._written()):
                file = safe_open(self.directory / f"{rank}-{after}.safetensors", framework="pt")
                self._files.append(file.get_slice("rows"))
                ends = file.get_tensor("ends").tolist()
                facts = zip(
                    file.get_tensor("index").tolist(),
                    [0, *ends],
                    ends,
                    file.get_tensor("digests").tolist(),
                    strict=False,
                )
                self._places |= {index: (number, first, end, digest) for index, first, end, digest in facts}
        except (OSError, KeyError, SafetensorError) as error:
            raise self._damaged(error) from error

    def rows(self, index: int, digest: int) -> Tensor | None:
        """The rows [R, D] of one example, None where there are none. UsageError where its inputs were others."""
        if index not in self._places:
            return None
        file, first, end, known = self._places[index]
        if known != digest:
            raise UsageError(
                f"example {index} is not the one that the original has answered",
                where=str(self.directory),
                fix="continue with the data that the run was started with, or remove that folder to compute them anew",
            )
        found: Tensor = self._files[file][first:end]
        return found

    def _damaged(self, error: Exception) -> StorageError:
        return StorageError(
            "the answers that were kept are damaged",
            where=str(self.directory),
            found=error,
            fix="remove that folder to compute them anew",
        )


def digests_of(inputs: Inputs, real_BR: Tensor | None) -> list[int]:
    """A digest of each example's own numbers among a model's inputs, without what `real_BR` marks as padding."""
    leaves = [leaf.cpu() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    real_BR = None if real_BR is None else real_BR.cpu().bool()
    return [_digest(_own_rows(leaves, real_BR, number)) for number in range(len(leaves[0]))]


def _own_rows(leaves: Sequence[Tensor], real_BR: Tensor | None, number: int) -> Iterable[Tensor]:
    for leaf in leaves:
        padded = real_BR is not None and leaf.shape[:2] == real_BR.shape
        yield leaf[number][real_BR[number]] if padded and real_BR is not None else leaf[number]


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def model_digest(tensors: Iterable[Tensor]) -> str:
    """A digest of a model's tensors."""
    return f"{_digest(tensor.cpu() for tensor in tensors):016x}"
