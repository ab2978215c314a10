"""From a request's values or files to examples of a model's data, by what the model takes; everything is checked here.

An example is a dict of tensors without the batch axis. What cannot be one is refused as UsageError or DataError: a bad
example that reached the model would fail with those beside it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from acm_compiler.data.batch import Batch
from acm_compiler.data.texts import TokenizedTexts
from acm_compiler.errors import UsageError, counted
from acm_compiler.serving.batcher import Example


class Reader:
    """Reads inputs of one kind, which a request's document calls `name`."""

    name: ClassVar[str]
    expected: ClassVar[str]

    def examples(self, values: Any) -> list[Example]:
        """The examples that a document's values are, one at least."""
        raise NotImplementedError

    def sample(self, cells: int = 8) -> Example:
        """Some example of about so many cells, drawn by chance, to run the model."""
        raise NotImplementedError

    def cells(self, example: Example) -> int:
        """The size of an example: what a batch's time grows with, as its longest example's."""
        return 1

    def file(self, content: bytes, name: str) -> Example:
        """The example that an uploaded file holds."""
        raise UsageError(f"files cannot be read for this model: send numbers as `{self.name}` to /classify")

    def collate(self, examples: Sequence[Example]) -> Batch:
        """The batch of some examples that run together."""
        return default_collate(list(examples))

    def together(self, examples: Sequence[Example]) -> list[list[int]]:
        """The numbers of examples that run together: all of them, unless answers depended on who is in a batch."""
        return [list(range(len(examples)))]

    def refused(self, found: object, *, where: str | None = None) -> UsageError:
        """The refusal of what is no such input."""
        return UsageError("the input cannot be read", where=where or self.name, found=found, expected=self.expected)


class Texts(Reader):
    """Texts, or token ids of this model's tokenizer, of at most so many tokens."""

    name, expected = "input", "a text, a list of texts, token ids, or a list of lists of them"

    def __init__(self, tokenizer: str, *, longest: int, vocabulary: int) -> None:
        self._texts = TokenizedTexts([], tokenizer, max_tokens=longest)
        self._longest, self._vocabulary = longest, vocabulary

    def examples(self, values: Any) -> list[Example]:
        """Tokens of every text. UsageError for what is no text, is too long, or holds no token of the vocabulary."""
        if not isinstance(values, (list, str)):
            raise self.refused(type(values).__name__)
        many = values if isinstance(values, list) else [values]
        if many and all(_is_whole(value) for value in many):
            many = [many]
        if not many:
            raise self.refused("an empty list")
        if len({type(value) for value in many}) > 1:
            raise self.refused("a list of several kinds of values")
        if all(isinstance(value, str) for value in many):
            return [self._checked(ids, number) for number, ids in enumerate(self._encoded(many))]
        return [self._checked(self._ids(value, number), number) for number, value in enumerate(many)]

    def sample(self, cells: int = 8) -> Example:
        """A text of so many tokens, as far as the model takes them."""
        return self._checked(torch.randint(self._vocabulary, (min(cells, self._longest),)).tolist(), 0)

    def cells(self, example: Example) -> int:
        """The number of tokens."""
        return len(example["input_ids"])

    def collate(self, examples: Sequence[Example]) -> Batch:
        """Texts padded to the longest of them."""
        return self._texts.collate(examples)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        try:
            every = self._texts.tokenizer.encode_batch(texts)
        except (TypeError, UnicodeError):
            raise self.refused("characters that are not text (half of a pair of UTF-16)") from None
        for number, encoding in enumerate(every):
            if encoding.overflowing:
                raise self._too_long(number, f"more than {counted(self._longest, 'token')}")
        return [encoding.ids for encoding in every]

    def _ids(self, value: Any, number: int) -> list[int]:
        where = f"{self.name}[{number}]"
        if not isinstance(value, list):
            raise self.refused(type(value).__name__, where=where)
        for place, part in enumerate(value):
            if not _is_whole(part):
                raise self.refused(f"{type(part).__name__} in place of a token id", where=f"{where}[{place}]")
        return value

    def _checked(self, ids: list[int], number: int) -> Example:
        if not ids:
            raise self.refused("no tokens", where=f"{self.name}[{number}]")
        if len(ids) > self._longest:
            raise self._too_long(number, counted(len(ids), "token"))
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            found = f"token {min(ids) if min(ids) < 0 else max(ids)}"
            where, expected = f"{self.name}[{number}]", f"0 to {self._vocabulary - 1}"
            raise UsageError("a token that the model does not know", where=where, found=found, expected=expected)
        tokens = torch.tensor(ids)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def _too_long(self, number: int, found: str) -> UsageError:
        where, fix = f"{self.name}[{number}]", "send it in parts"
        return UsageError(
            "the text is too long", where=where, found=found, expected=f"at most {self._longest}", fix=fix
        )


class Images(Reader):
    """Images [C, H, W] as the model takes them, or files that the recipe's transform makes such images of."""

    name, expected = "images", "a list of images, each as nested lists of numbers"

    def __init__(self, shape: Sequence[int], transform: Callable[[Any], Tensor] | None) -> None:
        self._shape, self._transform = tuple(shape), transform

    def examples(self, values: Any) -> list[Example]:
        """The images. UsageError for another shape, and for what is no finite number."""
        if not isinstance(values, list) or not values:
            raise self.refused("an empty list" if values == [] else type(values).__name__)
        return [{"image": self._image(value, f"{self.name}[{number}]")} for number, value in enumerate(values)]

    def sample(self, cells: int = 1) -> Example:
        """An image of noise."""
        return {"image": torch.randn(self._shape)}

    def _image(self, value: Any, where: str) -> Tensor:
        found = _numbers(value)
        if found is None or tuple(found.shape) != self._shape:
            shown = "other values than numbers" if found is None else f"shape {list(found.shape)}"
            raise UsageError(
                "an image must have the shape that the model takes",
                where=where,
                found=shown,
                expected=f"shape {list(self._shape)}",
            )
        return _finite(found, where)

    def file(self, content: bytes, name: str) -> Example:
        """The image in a PNG, JPEG or WebP file. DataError where it cannot be read."""
        from acm_compiler.data.images import read_picture

        if self._transform is None:
            return super().file(content, name)
        return {"image": self._transform(read_picture(io.BytesIO(content), name))}


class Audio(Reader):
    """Clips of one channel [R], as the model takes them, or files, read at so many samples a second, if `rate` says it.

    `frame`: samples from one frame of the model to the next; `fewest`: those of a clip with one frame. Clips of unequal
    length run one after the other, since what padding does to an answer differs from model to model.
    """

    name, expected = "audio", "a list of clips, each a list of numbers"

    def __init__(self, *, frame: int, fewest: int, rate: int | None) -> None:
        self._frame, self._fewest, self._rate = frame, fewest, rate

    def examples(self, values: Any) -> list[Example]:
        """The clips. UsageError for another shape, for too few samples, and for what is no finite number."""
        if not isinstance(values, list) or not values:
            raise self.refused("an empty list" if values == [] else type(values).__name__)
        return [self._clip(_numbers(value), f"{self.name}[{number}]") for number, value in enumerate(values)]

    def sample(self, cells: int = 8) -> Example:
        """Noise of so many frames."""
        return {"input_values": torch.randn(self._fewest + (cells - 1) * self._frame)}

    def cells(self, example: Example) -> int:
        """The number of frames."""
        return 1 + (len(example["input_values"]) - self._fewest) // self._frame

    def file(self, content: bytes, name: str) -> Example:
        """The clip in an audio file, with mean 0 and variance 1. UsageError, UnusableClip."""
        from acm_compiler.data.audio import read_clip, standardise

        if self._rate is None:
            return super().file(content, name)
        return self._clip(
            torch.from_numpy(standardise(read_clip(io.BytesIO(content), rate=self._rate, name=name))), name
        )

    def together(self, examples: Sequence[Example]) -> list[list[int]]:
        """Those of one length."""
        found: dict[int, list[int]] = {}
        for number, example in enumerate(examples):
            found.setdefault(len(example["input_values"]), []).append(number)
        return list(found.values())

    def _clip(self, found: Tensor | None, where: str) -> Example:
        if found is None or found.dim() != 1:
            raise self.refused("other values than a list of numbers", where=where)
        if len(found) < self._fewest:
            expected = f"{self._fewest} at least"
            raise UsageError("the clip is too short", where=where, found=f"{len(found)} samples", expected=expected)
        return {"input_values": _finite(found, where)}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(value: Any) -> Tensor | None:
    """A tensor of nested lists of equal lengths; None for what is none."""
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, RecursionError, OverflowError):
        return None
    if not np.issubdtype(found.dtype, np.number) or np.issubdtype(found.dtype, np.complexfloating):
        return None
    with np.errstate(over="ignore"):
        return torch.from_numpy(found.astype(np.float32))


def _finite(found: Tensor, where: str) -> Tensor:
    if not bool(found.isfinite().all()):
        raise UsageError("numbers must be finite", where=where, found="nan, inf or more than float32 holds")
    return found
