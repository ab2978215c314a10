"""A release of Common Voice on disk: `train.tsv` (or dev, test, …) beside `clips/`."""

from __future__ import annotations

import csv
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from acm_compiler.data.batch import Batch
from acm_compiler.data.clips import collate_clips, load_clip, standardise
from acm_compiler.errors import DataError, nearest

if TYPE_CHECKING:
    from acm_compiler.recipe.datasets import CommonVoiceData

RATE = 16_000
_SHORTEST = 0.05  # seconds: no frame of wav2vec2's is made of less than half of it
LABEL_PADDING = -100
_POOL = 50  # batches that are sorted by length together
_SPECIAL = re.compile(r"<.*>|\[.*\]")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clip:
    """One recording: its file, the file's size, and the labels of what was said."""

    path: Path
    size_bytes: int
    labels: tuple[int, ...]


class CommonVoice(Dataset[dict[str, Any]]):
    """`input_values` float [samples] at 16 kHz, standardised, and `labels`, the transcript's characters.

    Clips that are missing, and transcripts with nothing in them, are left out and counted when the set is opened.
    A clip that turns out to be unreadable, empty or longer than `max_seconds` when it is its turn is named, counted,
    and replaced by the next one; more than `max_broken` of them are a DataError. So is a vocabulary that lacks more
    than `max_unknown` of the letters.
    """

    rate = RATE

    def __init__(self, config: CommonVoiceData) -> None:
        self.config = config
        self.vocabulary = read_vocabulary(Path(config.vocabulary))
        rows = _read_rows(Path(config.root), config.split)
        self.clips = self._clips(rows)
        if not self.clips:
            raise DataError("the data set is empty", where=config.root, found=f"no usable clip in {config.split}.tsv")
        # one memory for all processes that load: each counts the clips that others found, too
        self._broken_C = torch.zeros(len(self.clips), dtype=torch.bool).share_memory_()

    @property
    def broken(self) -> list[str]:
        """The names of the clips that turned out to be of no use so far, whichever process found them."""
        return [self.clips[i].path.name for i in self._broken_C.nonzero().flatten().tolist()]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        for step in range(len(self.clips)):
            number = (index + step) % len(self.clips)
            clip = self.clips[number]
            try:
                samples = load_clip(clip.path, rate=RATE)
                self._refuse_length(clip, len(samples) / RATE)
            except DataError as error:
                self._count_broken(number, error)
                continue
            return {"input_values": standardise(samples), "labels": clip.labels}
        raise DataError("no clip of the data set can be used", where=self.config.root)

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Clips and transcripts of different lengths as one batch."""
        return collate_clips(examples, label_padding=LABEL_PADDING)

    def group(self, order: Sequence[int], batch: int) -> list[int]:
        """The same order, with clips of like length (size on disk) brought together within every 50 batches."""
        pools = [order[start : start + _POOL * batch] for start in range(0, len(order), _POOL * batch)]
        return [i for pool in pools for i in sorted(pool, key=lambda i: -self.clips[i].size_bytes)]

    def _clips(self, rows: Sequence[tuple[str, str]]) -> list[Clip]:
        known = {letter: label for label, letter in enumerate(self.vocabulary) if letter}
        folder, clips, unknown, letters = Path(self.config.root) / "clips", [], Counter[str](), 0
        missing: list[str] = []
        silent = 0
        for name, sentence in rows:
            text = self._normalise(sentence)
            letters += len(text)
            unknown.update(letter for letter in text if letter not in known)
            readable = "".join(letter for letter in text if letter in known).split("|")
            labels = tuple(known[letter] for letter in "|".join(word for word in readable if word))
            path = folder / name
            if not labels:
                silent += 1
            elif not path.is_file():
                missing.append(name)
            else:
                clips.append(Clip(path, path.stat().st_size, labels))
        self._judge(unknown, letters, missing, silent)
        return clips

    def _normalise(self, sentence: str) -> str:
        text = re.sub(self.config.remove, "", sentence)
        text = text.lower() if self.config.case == "lower" else text.upper() if self.config.case == "upper" else text
        return "|".join(text.split())

    def _judge(self, unknown: Counter[str], letters: int, missing: Sequence[str], silent: int) -> None:
        """Say what was left out; refuse where it is too much."""
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
        if len(missing) > self.config.max_broken:
            raise _too_many(self.config, missing)
        for count, what in ((lost, "letters outside the vocabulary"), (silent, "transcripts without a letter")):
            if count:
                _LOG.warning("%s: %d %s left out", self.config.split, count, what)
        if missing:
            _LOG.warning("%s: %d clips are missing (%s, …)", self.config.split, len(missing), missing[0])

    def _refuse_length(self, clip: Clip, seconds: float) -> None:
        if _SHORTEST <= seconds <= self.config.max_seconds:
            return
        long = seconds > self.config.max_seconds
        raise DataError(
            "the clip is too long" if long else "the clip is too short",
            where=str(clip.path),
            found=f"{seconds:.3g} s",
            expected=f"at most {self.config.max_seconds:g} s" if long else f"at least {_SHORTEST:g} s",
        )

    def _count_broken(self, number: int, error: DataError) -> None:
        if self._broken_C[number]:
            return
        self._broken_C[number] = True
        count = int(self._broken_C.sum())
        _LOG.warning("%s: left out, number %d (%s)", self.clips[number].path, count, error.what)
        if count > self.config.max_broken:
            raise _too_many(self.config, self.broken) from error


def _too_many(config: CommonVoiceData, names: Sequence[str]) -> DataError:
    return DataError(
        "too many clips cannot be used",
        where=config.root,
        found=f"{len(names):,}: {', '.join(names[:3])}, …",
        expected=f"at most {config.max_broken:,}",
        fix="repair the release, or raise max_broken",
    )


def read_vocabulary(path: Path) -> tuple[str, ...]:
    """The text of every label of a `vocab.json`, empty for special ones such as <pad>. DataError."""
    try:
        labels = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError("the vocabulary cannot be read", where=str(path), found=error) from error
    if not isinstance(labels, dict) or sorted(labels.values()) != list(range(len(labels))):
        raise DataError(
            "this is no vocabulary", where=str(path), expected="a JSON object from letters to 0, 1, 2, … as vocab.json"
        )
    letters = {label: "" if _SPECIAL.fullmatch(letter) else letter for letter, label in labels.items()}
    return tuple(letters[label] for label in range(len(letters)))


def _read_rows(root: Path, split: str) -> list[tuple[str, str]]:
    """(file name, sentence) of every row."""
    table = root / f"{split}.tsv"
    if not table.is_file():
        others = [path.stem for path in root.glob("*.tsv")]
        hint = f"; there are {', '.join(nearest(split, others) or sorted(others))}" if others else ""
        raise DataError(f"the table of the split is missing{hint}", where=str(table), fix="check root and split")
    with table.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        if not {"path", "sentence"} <= set(rows.fieldnames or ()):
            raise DataError(
                "this is no table of Common Voice",
                where=str(table),
                found=", ".join(rows.fieldnames or ()),
                expected="columns path and sentence",
            )
        return [(row["path"], row["sentence"] or "") for row in rows]
