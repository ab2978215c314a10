"""A release of Common Voice on disk: `train.tsv` (or dev, test, …) beside `clips/`."""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from acm_compiler.data.audio import LeftOutLedger, collate_clips, promised_seconds, read_clip, standardise
from acm_compiler.data.batch import Batch, sorted_in_pools
from acm_compiler.errors import DataError, UnusableClip, excluded_text, nearest
from acm_compiler.files import parse_json

if TYPE_CHECKING:
    from acm_compiler.recipe.datasets import CommonVoiceData

RATE = 16_000
_SHORTEST = 0.05  # seconds: no frame of wav2vec2's is made of less than half of it
LABEL_PADDING = -100
_WORDLESS = "without a letter"
FAULTS = ("missing", "unreadable", "empty", "too short", "too long")
_LOOKED_AT = 20_000  # headers that are read when a table is opened, in 5 s from a disk's memory: all of most test sets
_POOL = 50  # batches that are sorted by length together
_SPECIAL = re.compile(r"<.*>|\[.*\]")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording: its row among those with a transcript, its file, that file's size, the labels of what was said."""

    row: int
    path: Path
    size_bytes: int
    labels: tuple[int, ...]


class CommonVoice(Dataset[dict[str, Any] | None]):
    """`input_values` float [samples] at 16 kHz, standardised, and `labels`, the transcript's characters.

    Left out when the set is opened, and counted: clips whose transcript holds no letter, and those that are missing, or
    by their headers unreadable, empty, or not of .05 to `max_seconds` seconds (the headers of 20,000 clips are read).
    A clip that turns out to be so only when it is its turn is None, and counted too. More than `max_broken` of all
    these but the transcripts are a DataError, as is a vocabulary that lacks more than `max_unknown` of the letters.
    """

    rate = RATE

    def __init__(self, config: CommonVoiceData) -> None:
        self.config = config
        self.vocabulary = read_vocabulary(Path(config.vocabulary))
        self._wordless: list[str] = []
        rows = self._transcribed(_read_rows(Path(config.root), config.split))
        self._ledger = LeftOutLedger([path.name for path, _ in rows], FAULTS)
        self.clips = self._usable(self._present(rows))
        self._refuse_too_many()  # not before all are checked: faults are reported together
        if self.left_out:
            _LOG.warning("%s: excluded clips: %s", config.split, excluded_text(self.left_out))
        if not self.clips:
            raise self._no_clip()

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """The names of the clips excluded so far, by fault."""
        return self._ledger.by_fault() | ({_WORDLESS: tuple(self._wordless)} if self._wordless else {})

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        clip = self.clips[index]
        try:
            return {"input_values": standardise(self._samples(clip)), "labels": clip.labels}
        except UnusableClip as error:
            if self._leave_out(clip, error):
                _LOG.warning("%s: left out, number %d (%s)", clip.path, len(self._ledger), error.what)
            return None

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Clips and transcripts of different lengths as one batch."""
        return collate_clips(examples, label_padding=LABEL_PADDING)

    def group(self, order: Sequence[int], batch: int) -> list[int]:
        """The same order, with clips of like length (size on disk) brought together within every 50 batches."""
        return sorted_in_pools(order, _POOL * batch, lambda index: -self.clips[index].size_bytes)

    def _transcribed(self, rows: Sequence[tuple[str, str]]) -> list[tuple[Path, tuple[int, ...]]]:
        """Files and labels of the rows whose transcript holds letters."""
        known = {letter: label for label, letter in enumerate(self.vocabulary) if letter}
        folder, found, unknown, letters = Path(self.config.root) / "clips", [], Counter[str](), 0
        for name, sentence in rows:
            text = self._normalise(sentence)
            letters += len(text)
            unknown.update(letter for letter in text if letter not in known)
            readable = "".join(letter for letter in text if letter in known).split("|")
            labels = tuple(known[letter] for letter in "|".join(word for word in readable if word))
            if labels:
                found.append((folder / name, labels))
            else:
                self._wordless.append(name)
        self._judge(unknown, letters)
        return found

    def _present(self, rows: Sequence[tuple[Path, tuple[int, ...]]]) -> list[Clip]:
        """The clips whose files are there."""
        found = []
        for row, (path, labels) in enumerate(rows):
            if path.is_file():
                found.append(Clip(row, path, path.stat().st_size, labels))
            else:
                self._ledger.add(row, "missing")
        return found

    def _usable(self, clips: Sequence[Clip]) -> list[Clip]:
        """The clips without those of which their headers show that they are unusable."""
        looked_at, usable = range(0, len(clips), max(1, -(-len(clips) // _LOOKED_AT))), []
        for number, clip in enumerate(clips):
            try:
                seconds = promised_seconds(clip.path) if number in looked_at else _SHORTEST
                if not _SHORTEST <= seconds <= self.config.max_seconds:  # a guess, for some mp3 files
                    self._samples(clip)
                usable.append(clip)
            except UnusableClip as error:
                self._ledger.add(clip.row, error.fault)
        return usable

    def _samples(self, clip: Clip) -> np.ndarray:
        """The decoded clip. UnusableClip."""
        samples = read_clip(str(clip.path), rate=RATE, name=str(clip.path))
        seconds = len(samples) / RATE
        if seconds < _SHORTEST:
            raise UnusableClip("too short", where=str(clip.path), found=f"{seconds:.3g} s", expected=f"{_SHORTEST:g} s")
        if seconds > (most := self.config.max_seconds):
            raise UnusableClip("too long", where=str(clip.path), found=f"{seconds:.3g} s", expected=f"{most:g} s")
        return samples

    def _leave_out(self, clip: Clip, error: UnusableClip) -> bool:
        """Note an unusable clip; False where it was known. DataError where it is one too many, or the last."""
        if not self._ledger.add(clip.row, error.fault):
            return False
        self._refuse_too_many()
        if len(self._ledger) == len(self._ledger.names):
            raise self._no_clip()
        return True

    def _refuse_too_many(self) -> None:
        most = self.config.max_broken
        if len(self._ledger) > most:
            found = self._ledger.by_fault()
            long = ", or max_seconds" if "too long" in found else ""
            raise DataError(
                "too many clips cannot be used",
                where=f"{self.config.root}, {self.config.split}",
                found=excluded_text(found),
                expected=f"at most {most:,} together",
                fix=f"repair the release, or raise max_broken{long}",
            )

    def _no_clip(self) -> DataError:
        return DataError(
            "the data set is empty",
            where=self.config.root,
            found=f"no usable clip in {self.config.split}.tsv; {excluded_text(self.left_out) or 'no rows'}",
            fix="check root and split; or raise max_seconds",
        )

    def _normalise(self, sentence: str) -> str:
        text = re.sub(self.config.remove, "", sentence)
        text = text.lower() if self.config.case == "lower" else text.upper() if self.config.case == "upper" else text
        return "|".join(text.split())

    def _judge(self, unknown: Counter[str], letters: int) -> None:
        """Report what was excluded; refuse where it is too much."""
        lost = sum(unknown.values())
        if lost > self.config.max_unknown * max(letters, 1):
            common = " ".join(letter for letter, _ in unknown.most_common(10))
            raise DataError(
                "the vocabulary lacks letters of the transcripts",
                where=self.config.vocabulary,
                found=f"{lost:,} of {letters:,} letters unknown: {common}",
                expected=f"at most {self.config.max_unknown:.1%}",
                fix="give the vocab.json of the model, and `case` and `remove` as in its training",
            )
        if lost:
            _LOG.warning("%s: %d letters outside the vocabulary left out", self.config.split, lost)


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """The text of every label of a `vocab.json`, empty for special ones such as <pad>. DataError."""
    try:
        labels = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fix = "give the vocab.json that lies in the folder of the model, from its training"
        raise DataError("the vocabulary cannot be read", where=str(path), found=error, fix=fix) from error
    if not isinstance(labels, dict) or sorted(labels.values()) != list(range(len(labels))):
        expected = "a JSON object from letters to 0, 1, 2, … as vocab.json"
        raise DataError("this is not a vocabulary", where=str(path), expected=expected)
    letters = {label: "" if _SPECIAL.fullmatch(letter) else letter for letter, label in labels.items()}
    return tuple(letters[label] for label in range(len(letters)))


def _read_rows(root: Path, split: str) -> list[tuple[str, str]]:
    """(file name, sentence) of every row."""
    table = root / f"{split}.tsv"
    if not table.is_file():
        others = [path.stem for path in root.glob("*.tsv")]
        there = ", ".join(dict.fromkeys([*nearest(split, others), *sorted(others)]))
        raise DataError(
            "the table of the split is missing",
            where=str(table),
            found=f"tables of {there}" if others else "no tables",
            fix="check root and split",
        )
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if not {"path", "sentence"} <= set(rows.fieldnames or ()):
            raise DataError(
                "this is not a table of Common Voice",
                where=str(table),
                found=", ".join(rows.fieldnames or ()),
                expected="columns path and sentence",
            )
        return [(row["path"], row["sentence"] or "") for row in rows]
