"""Facts that a data set of any class may know about its examples, read in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a data set's attributes of these names say; the defaults hold for those that it lacks.

    classes: their names, in the order of the labels. vocabulary: the text of every label of audio. mask_id: the token
    that hides others. marks: the tokens that stand for no text. rate: samples per second of `input_values`.
    pieces: the text of each token of `input_ids`.
    """

    classes: Sequence[str] | None = None
    vocabulary: Sequence[str] | None = None
    mask_id: int | None = None
    marks: Collection[int] = ()
    rate: int | None = None
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None

    @staticmethod
    def of(dataset: object) -> Facts:
        """The facts of a data set; all defaults for None."""
        return Facts(
            **{fact.name: getattr(dataset, fact.name) for fact in fields(Facts) if hasattr(dataset, fact.name)}
        )
