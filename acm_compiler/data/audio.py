"""Audio files as waveforms of one sample rate, batches of them, and the count of examples that are excluded.

Excluded examples are collected across loader processes. Shapes: E examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from acm_compiler.errors import UnusableClip, require_packages

_QUIET = 1e-7  # the variance that silence is divided by


def promised_seconds(path: Path) -> float:
    """Length of a clip by its header, without decoding it: a guess for some mp3 files. UnusableClip: unreadable."""
    soundfile, _ = _libraries()
    try:
        return float(soundfile.info(str(path)).duration)
    except (OSError, RuntimeError) as error:
        raise UnusableClip("unreadable", where=str(path), found=_reason(error)) from error


def read_clip(file: str | BinaryIO, *, rate: int, name: str) -> np.ndarray:
    """The clip as float32 [samples], one channel, at `rate` per second. UnusableClip: unreadable, empty.

    Any format of libsndfile, mp3 included; other rates are resampled. name: of a path or an open file, for messages.
    """
    soundfile, soxr = _libraries()
    try:
        samples, found = soundfile.read(file, dtype="float32", always_2d=True)
    except (OSError, RuntimeError) as error:  # soundfile's own error is a RuntimeError
        raise UnusableClip("unreadable", where=name, found=_reason(error)) from error
    if not len(samples):
        raise UnusableClip("empty", where=name, found="0 samples")
    mono = samples.mean(axis=1)
    if not np.isfinite(mono).all():
        raise UnusableClip("unreadable", where=name, found="samples that are not finite")
    return mono if found == rate else soxr.resample(mono, found, rate).astype(np.float32)


def _reason(error: Exception) -> str:
    """The words of libsndfile without those before them, which name an open file by its address in memory."""
    return getattr(error, "error_string", str(error)).strip()


def standardise(samples: np.ndarray) -> np.ndarray:
    """The clip with mean 0 and variance 1, as the feature extractors of wav2vec2 make it; silence stays silent."""
    return (samples - samples.mean()) / np.sqrt(samples.var() + _QUIET)


def collate_clips(examples: Sequence[dict[str, Any]], *, label_padding: int) -> dict[str, Tensor]:
    """`input_values` [B, R] and `labels` [B, L], filled up on the right; `attention_mask` [B, R], 1 at real samples."""
    audio = [torch.as_tensor(example["input_values"]) for example in examples]
    labels = [torch.as_tensor(example["labels"], dtype=torch.long) for example in examples]
    return {
        "input_values": torch.nn.utils.rnn.pad_sequence(audio, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence([torch.ones(len(a)).long() for a in audio], batch_first=True),
        "labels": torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=label_padding),
    }


def _libraries() -> tuple[Any, Any]:
    require_packages(("soundfile", "soxr"), "audio", "audio")
    import soundfile
    import soxr

    return soundfile, soxr


class LeftOutLedger:
    """Excluded ones among `names`, each with one of `faults`; one memory for all processes that load."""

    def __init__(self, names: Sequence[str], faults: Sequence[str]) -> None:
        self.names, self._faults = names, faults
        self._fault_E = torch.zeros(len(names), dtype=torch.uint8).share_memory_()  # 0: none

    def __len__(self) -> int:
        return int(self._fault_E.count_nonzero())

    def add(self, number: int, fault: str) -> bool:
        """Note what is wrong with an example; False where it was known."""
        new = not self._fault_E[number]
        self._fault_E[number] = 1 + self._faults.index(fault)
        return new

    def by_fault(self) -> dict[str, tuple[str, ...]]:
        """The names of what was found so far, whichever process found it, by what is wrong."""
        found = {
            fault: tuple(self.names[i] for i in (self._fault_E == 1 + number).nonzero().flatten().tolist())
            for number, fault in enumerate(self._faults)
        }
        return {fault: names for fault, names in found.items() if names}
