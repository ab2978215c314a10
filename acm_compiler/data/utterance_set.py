"""Spoken digits as a data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from acm_compiler.data.audio import collate_clips, standardise
from acm_compiler.data.batch import Batch
from acm_compiler.data.common_voice import LABEL_PADDING
from acm_compiler.data.spoken_digits import RATE, VOCABULARY, Split, layout, utterance, voices


class UtteranceSet(Dataset[dict[str, Any]]):
    """Utterances 0 … count-1 of a split, made when they are asked for.

    An example: `input_values` float [samples] at 8 kHz, standardised; `labels`, the transcript's characters;
    `foreground` bool [samples], where a word is said; `source`, the voice. PackageMissing without espeak-ng.
    """

    vocabulary = VOCABULARY
    rate = RATE

    def __init__(self, split: Split, *, count: int, most_words: int, seed: int = 0) -> None:
        self.split, self.count, self.most_words, self.seed = split, count, most_words, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        made = utterance(self.split, index, seed=self.seed, most_words=self.most_words)
        return {
            "input_values": standardise(made.samples),
            "labels": made.labels,
            "foreground": torch.from_numpy(made.speech),
            "source": made.voice,
        }

    def collate(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Utterances of different lengths as one batch."""
        speech = [example["foreground"] for example in examples]
        return {
            **collate_clips(examples, label_padding=LABEL_PADDING),
            "foreground": torch.nn.utils.rnn.pad_sequence(speech, batch_first=True),
            "source": torch.tensor([example["source"] for example in examples]),
        }

    def group(self, order: Sequence[int], batch: int) -> list[int]:
        """The same order, with utterances of as many words brought together within every 8 batches."""
        pools = [order[start : start + 8 * batch] for start in range(0, len(order), 8 * batch)]
        return [index for pool in pools for index in sorted(pool, key=self._words)]

    def prepare(self) -> None:
        """Let all voices speak now."""
        voices(self.split)

    def _words(self, index: int) -> int:
        return -len(layout(self.split, index, seed=self.seed, most_words=self.most_words).words)
