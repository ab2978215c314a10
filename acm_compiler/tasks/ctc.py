"""Text from audio without alignment, for wav2vec2 and its relatives of transformers: CTC loss and error rates.

Shapes: B clips, R samples of the longest one, S frames that the model makes of them, L characters, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.data.batch import Batch, Facts
from acm_compiler.errors import DataError, UsageError, require_packages
from acm_compiler.sources.inputs import Inputs
from acm_compiler.tasks.base import part_of
from acm_compiler.tasks.language import TokenLogits

Unit = Literal["word", "character"]
PADDING = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Ctc(TokenLogits):
    """A `Task`: logits [B, S, V] against `labels` int [B, L], filled up with -100, for audio `input_values` [B, R].

    `vocabulary` is the text of every label, "|" between words; `blank` the label of no character. `frames` turns
    samples into frames as the model does; `masked`: whether the model takes an attention mask.
    `unit`: what errors are counted in.
    """

    vocabulary: Sequence[str]
    blank: int
    frames: Callable[[Tensor], Tensor]
    masked: bool
    unit: Unit = "word"
    lower_is_better: ClassVar[bool] = True
    is_share: ClassVar[bool] = True

    @property
    def metric(self) -> str:
        """`word error rate` or `character error rate`."""
        return f"{self.unit} error rate"

    def inputs(self, batch: Batch) -> Inputs:
        """The audio, and the mask of its real samples where the model was trained with one."""
        names = ("input_values", "attention_mask") if self.masked else ("input_values",)
        return {name: batch[name] for name in names}

    def mask(self, batch: Batch) -> Tensor:
        """bool [B, S]: the frames made of real samples, as the model counts them."""
        frames = int(self.frames(torch.tensor(batch["input_values"].shape[1])))
        place_S = torch.arange(frames, device=batch["input_values"].device)
        return place_S < self._lengths(batch)[:, None]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """CTC in fp32: the mean over clips of each one's loss per character; 0 where no path is long enough."""
        logits_BSV, labels_BL = self.logits(output), _transcripts(batch)
        written_BL = labels_BL != PADDING
        return F.ctc_loss(
            logits_BSV.float().log_softmax(-1).transpose(0, 1),
            labels_BL[written_BL],
            self._lengths(batch),
            written_BL.sum(1),
            blank=self.blank,
            reduction="mean",
            zero_infinity=True,
        )

    def score(self, output: Any, batch: Batch) -> Tensor:
        """Words (characters) to insert, delete or replace, fp32 [B]; greedy decoding."""
        found = self.decode(self.logits(output), batch)
        edits = [_edits(spoken, text, self.unit) for spoken, text in zip(self._references(batch), found, strict=True)]
        return torch.tensor(edits, dtype=torch.float32)

    def units(self, batch: Batch) -> Tensor:
        """Words (characters, spaces too) that were spoken, fp32 [B]."""
        return torch.tensor([_length(text, self.unit) for text in self._references(batch)], dtype=torch.float32)

    def logits(self, output: Any) -> Tensor:
        """The logits [B, S, V]. UsageError when there are none, or for another vocabulary."""
        fix = "use a model with a CTC head (for hf: auto_class AutoModelForCTC)"
        axes = "batch, frames, vocabulary"
        logits = part_of(output, "logits", "logits of frames", axes=axes, task="ctc", fix=fix)
        if logits.shape[2] < len(self.vocabulary):
            raise UsageError(
                "the vocabulary and the model have different sizes",
                where="task ctc",
                found=f"{len(self.vocabulary)} in the data, {logits.shape[2]} in the model",
                fix="use the vocab.json that the model was trained with",
            )
        return logits

    def decode(self, logits_BSV: Tensor, batch: Batch) -> list[str]:
        """The text of each clip: the best label of every real frame, repeats taken once, blanks left out."""
        best_BS = logits_BSV.argmax(-1).tolist()
        lengths = self._lengths(batch).tolist()
        return [
            self._text(label for label, _ in groupby(row[:length]))
            for row, length in zip(best_BS, lengths, strict=True)
        ]

    def _references(self, batch: Batch) -> list[str]:
        return [self._text(label for label in row if label != PADDING) for row in _transcripts(batch).tolist()]

    def _text(self, labels: Any) -> str:
        known = (label for label in labels if label != self.blank and label < len(self.vocabulary))
        letters = "".join(self.vocabulary[label] for label in known)
        return " ".join(letters.replace("|", " ").split())

    def _lengths(self, batch: Batch) -> Tensor:
        """Frames of real samples, int64 [B]."""
        samples_B = batch["attention_mask"].sum(1)
        return self.frames(samples_B).clamp_min(0).long()


def _transcripts(batch: Batch) -> Tensor:
    """Labels [B, L], which `acm.evaluate` calls `label`."""
    return batch["labels"] if "labels" in batch else batch["label"]


def open_ctc(dataset: Any, model: nn.Module | None, *, unit: Unit = "word") -> Ctc:
    """The task for this data set's vocabulary and this model's way of making frames. DataError, UsageError."""
    vocabulary = Facts.of(dataset).vocabulary
    if not vocabulary:
        raise DataError("the data set has no vocabulary", where="task ctc", expected="`vocabulary`, the text of labels")
    frames = getattr(model, "_get_feat_extract_output_lengths", None)
    config = getattr(model, "config", None)
    if frames is None or config is None:
        raise UsageError(
            "no facts on how this model makes frames of audio",
            where="task ctc",
            found=type(model).__name__,
            expected="a wav2vec2, HuBERT or WavLM with a CTC head, from transformers",
        )
    return Ctc(
        vocabulary=tuple(vocabulary),
        blank=config.pad_token_id,
        frames=frames,
        # the others normalise over time without regard to padding, and were trained on zeros instead of a mask
        masked=getattr(config, "feat_extract_norm", "layer") == "layer",
        unit=unit,
    )


def _length(text: str, unit: Unit) -> int:
    return len(text.split()) if unit == "word" else len(text)


def _edits(spoken: str, found: str, unit: Unit) -> int:
    require_packages(("jiwer",), "the count of word errors", "audio")
    import jiwer

    if not spoken:  # all that is found is too much
        return _length(found, unit)
    counts = (jiwer.process_words if unit == "word" else jiwer.process_characters)(spoken, found)
    return counts.substitutions + counts.deletions + counts.insertions
