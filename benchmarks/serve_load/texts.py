"""Texts to send, and what their vectors are held against: the dense model's, and those of what they are to find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from acm_compiler.runs.recipe_run import open_saved_run
from benchmarks.serve_load.contenders import open_contender

FEWEST_WORDS = 12


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: which text, its latency in seconds, the budget at its time and its vector, None where it failed."""

    text: int
    latency_s: float
    budget: float
    vector: np.ndarray | None


@dataclass(frozen=True, slots=True)
class Truth:
    """Texts to send, their dense vectors, and the dense vectors of what they are to find."""

    texts: list[str]
    own: np.ndarray
    wanted: np.ndarray

    def quality(self, sent: Sequence[Sent]) -> tuple[float, float, float]:
        """Recall at 1, how many points it is below the dense vectors', and mean cosine, of the vectors that came."""
        came = [s for s in sent if s.vector is not None]
        vectors, numbers = np.stack([s.vector for s in came]), np.array([s.text for s in came])
        recall, dense = (
            float((np.argmax(v @ self.wanted.T, axis=1) == numbers).mean()) for v in (vectors, self.own[numbers])
        )
        return recall, 100 * (dense - recall), float((vectors * self.own[numbers]).sum(1).mean())


def halves_of(data: Any, fewest: int) -> list[tuple[list[str], list[str]]]:
    """The words of both halves of each paragraph, those of one source put together to `fewest` words a half."""
    open_: dict[int, tuple[list[str], list[str]]] = {}
    found = []
    for words, source in zip((text.split() for text in data.texts), data.sources, strict=True):
        if len(words) < FEWEST_WORDS:
            continue
        first, second = open_.pop(source, ([], []))
        halves = first + words[: len(words) // 2], second + words[len(words) // 2 :]
        if len(halves[0]) < fewest:
            open_[source] = halves
        else:
            found.append(halves)
    return found


def truth_of(directory: Path, fewest: int) -> Truth:
    """Both halves of the paragraphs held out by the recipe, of so many words at least, with their dense vectors."""
    halves = halves_of(open_saved_run(directory).data, fewest)
    served = open_contender(directory, "dense")

    def vectors(texts: list[str]) -> np.ndarray:
        examples = served.reader.examples(texts)
        parts = [
            served.run(examples[i : i + 16], [None] * len(examples[i : i + 16]), 1.0) for i in range(0, len(texts), 16)
        ]
        return np.stack([vector.numpy() for part in parts for vector in part])

    texts = [" ".join(first) for first, _ in halves]
    return Truth(texts, vectors(texts), vectors([" ".join(second) for _, second in halves]))
