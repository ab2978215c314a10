"""Spoken digits: words synthesised by espeak-ng in several voices, among pauses and noise.

Shapes: R samples of one utterance.
"""

from __future__ import annotations

import functools
import io
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from acm_compiler.data.audio import collate_clips, read_clip, standardise
from acm_compiler.data.batch import Batch, sorted_in_pools
from acm_compiler.data.common_voice import LABEL_PADDING
from acm_compiler.data.draws import normal, uniform
from acm_compiler.errors import DataError, PackageMissing

Split = Literal["train", "eval"]
RATE = 8000  # as on the telephone: enough for ten words, and half the work
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VOCABULARY = ("", "|", *sorted(set("".join(WORDS))))  # label 0 is CTC's blank, and the padding of transcripts
_ACCENTS = ("en-us", "en-gb-scotland", "en-gb-x-rp", "en-029")
_VARIANTS = ("m1", "m2", "m4", "m5", "m6", "m8", "f1", "f3", "f4")
_NAMES = tuple(f"{accent}+{variant}" for accent in _ACCENTS for variant in _VARIANTS)
# what a voice says at one speed and pitch is a take; no take is in both splits
_TAKES: dict[Split, int] = {"train": 2, "eval": 1}
_SPEED, _PITCH = (120, 200), (25, 75)
_VOICE_SEED = 8000  # what a voice sounds like must never depend on a run's seed
_EDGE, _PAUSE = (0.15, 0.7), (0.1, 0.5)  # seconds
_LOUDNESS, _NOISE = (0.05, 0.15), (0.0005, 0.01)  # of full scale, root mean square


@dataclass(frozen=True, slots=True, kw_only=True)
class Voices:
    """`takes[voice][take][word]`, float32 [samples] each, root mean square 1; `names` of the voices."""

    names: tuple[str, ...]
    takes: tuple[tuple[tuple[np.ndarray, ...], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """`samples` float32 [R]; `speech` bool [R], where a word is said; the `words` by number; `voice` by number."""

    samples: np.ndarray
    speech: np.ndarray
    words: tuple[int, ...]
    voice: int

    @property
    def labels(self) -> tuple[int, ...]:
        """The transcript's characters; every word begins with "|", the first one too.

        Written between words only, "|" would ask for a memory: does a word that begins here come after another?
        """
        return tuple(VOCABULARY.index(letter) for word in self.words for letter in "|" + WORDS[word])


@functools.cache
def voices(split: Split) -> Voices:
    """Words of all voices in the split's own takes; about 50 ms for each of two takes (eval: one) of 36 voices.

    PackageMissing without espeak-ng or the libraries that read its sound, DataError where it fails.
    """
    takes = tuple(tuple(_take(split, i, name, take) for take in range(_TAKES[split])) for i, name in enumerate(_NAMES))
    return Voices(names=_NAMES, takes=takes)


def _take(split: Split, number: int, voice: str, take: int) -> tuple[np.ndarray, ...]:
    speed, pitch = uniform(_VOICE_SEED + (split == "eval"), [number * _TAKES[split] + take], 2)[0].tolist()
    spoken = speak_words(
        WORDS, voice=voice, speed=round(_between(speed, _SPEED)), pitch=round(_between(pitch, _PITCH)), rate=RATE
    )
    return tuple(word / np.sqrt(np.mean(word**2)) for word in spoken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Order of an utterance: its words, and pauses in samples before each of them and after the last one."""

    voice: int
    take: int
    words: tuple[int, ...]
    pauses: tuple[int, ...]
    loudness: float
    noise: float


def layout(split: Split, index: int, *, seed: int, most_words: int) -> Layout:
    """Draw the layout of utterance `index`, a function of the arguments alone. Every voice speaks equally often."""
    draw = uniform(2 * seed, [index], 5 + 2 * most_words)[0].tolist()
    count = 1 + int(draw[0] * most_words)
    edges = [_between(draw[i], _EDGE) for i in (1, 2)]
    inner = [_between(share, _PAUSE) for share in draw[5 : 4 + count]]
    return Layout(
        voice=index % len(_NAMES),
        take=int(draw[3] * _TAKES[split]),
        words=tuple(int(share * len(WORDS)) for share in draw[5 + most_words : 5 + most_words + count]),
        pauses=tuple(round(seconds * RATE) for seconds in (edges[0], *inner, edges[1])),
        loudness=_between(draw[4], _LOUDNESS),
        noise=_NOISE[0] * (_NOISE[1] / _NOISE[0]) ** (draw[4] * 97 % 1),  # even in decibels
    )


def utterance(split: Split, index: int, *, seed: int = 0, most_words: int = 3) -> Utterance:
    """Utterance `index` (any int >= 0) of a split: one voice says 1 to `most_words` digits."""
    plan = layout(split, index, seed=seed, most_words=most_words)
    spoken = voices(split).takes[plan.voice][plan.take]
    parts: list[np.ndarray] = [np.zeros(plan.pauses[0], dtype=np.float32)]
    speech = [np.zeros(plan.pauses[0], dtype=bool)]
    for word, pause in zip(plan.words, plan.pauses[1:], strict=True):
        parts += [spoken[word] * plan.loudness, np.zeros(pause, dtype=np.float32)]
        speech += [np.ones(len(spoken[word]), dtype=bool), np.zeros(pause, dtype=bool)]
    clean = np.concatenate(parts)
    noise = normal(2 * seed + 1, [index], len(clean))[0].numpy() * plan.noise
    return Utterance(
        samples=(clean + noise).astype(np.float32), speech=np.concatenate(speech), words=plan.words, voice=plan.voice
    )


def _between(share: float, ends: tuple[float, float]) -> float:
    return ends[0] + (ends[1] - ends[0]) * share


PROGRAM = "espeak-ng"
_PAUSE_MS = 500
_QUIET = 0.005  # of full scale; what a synthesiser leaves between words is silence
_GAP = 0.25  # seconds of quiet that no word holds


def speak_words(words: Sequence[str], *, voice: str, speed: int, pitch: int, rate: int) -> list[np.ndarray]:
    """Each word alone, float32 [samples] at `rate` per second, from its first sound to its last.

    voice: espeak-ng's name, such as `en-us+f2`; speed: words per minute; pitch: 0 to 99.
    PackageMissing without espeak-ng, DataError where it does not say these words.
    """
    text = "".join(f'{word}.<break time="{_PAUSE_MS}ms"/>' for word in words)
    command = [PROGRAM, "-m", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", f"<speak>{text}</speak>"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    except FileNotFoundError as error:
        raise PackageMissing(
            "espeak-ng speaks these words, and it is not installed",
            fix="install the system's package: apt-get install espeak-ng (or brew install espeak-ng)",
        ) from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise DataError(
            "espeak-ng failed",
            where=f"voice {voice}",
            found=said or str(error),
            fix="espeak-ng --voices lists the voices installed here",
        ) from error
    parts = _cut(read_clip(io.BytesIO(done.stdout), rate=rate, name=f"voice {voice}"), rate)
    if len(parts) != len(words):
        raise DataError(
            "espeak-ng did not keep words apart", where=f"voice {voice}", found=len(parts), expected=len(words)
        )
    return parts


def _cut(samples: np.ndarray, rate: int) -> list[np.ndarray]:
    """The parts between long quiet stretches."""
    loud = np.flatnonzero(np.abs(samples) > _QUIET)
    if not len(loud):
        return []
    gaps = np.flatnonzero(np.diff(loud) > _GAP * rate)
    starts, ends = np.r_[loud[0], loud[gaps + 1]], np.r_[loud[gaps], loud[-1]] + 1
    return [samples[start:end] for start, end in zip(starts, ends, strict=True)]


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
        return sorted_in_pools(order, 8 * batch, self._words)

    def prepare(self) -> None:
        """Let all voices speak now."""
        voices(self.split)

    def _words(self, index: int) -> int:
        return -len(layout(self.split, index, seed=self.seed, most_words=self.most_words).words)
