"""Batches, and the attributes that a data set may offer beside `__len__` and `__getitem__`.

A batch is a dict of tensors with the examples along axis 0: `image` [B, C, H, W] or a model's other inputs, `label`
[B] (or [B, C] where labels were mixed), `index` [B] (the example's number in its data set), and whatever else a
data set knows about its examples (`foreground`, `source`).

A data set is any map-style `torch.utils.data.Dataset` whose items are such dicts without the batch axis, or pairs
(image, label). An item may be None: an example that turned out to be unusable. Optional attributes, by name (the
first are read by `Facts`):

- `classes`: the names of the classes, in the order of the labels;
- `rate`: samples per second of its `input_values`; `pieces(ids)`: the text of each token of its `input_ids`;
- `largest_token`: the highest number in its `input_ids`, which the model's vocabulary must hold;
- `left_out`: the names of excluded examples that were met so far, by fault;
- `prepare()`: called before the first batch of an epoch, in the process that asks, not in those that load ahead;
- `batch(indices) -> Batch`: many examples at once, where that is faster than one by one;
- `collate(examples) -> Batch`: how examples are put together, where stacking is not right (texts, audio);
- `group(order, batch) -> order`: the same examples in another order, where batches of like lengths are cheaper;
- `mix(batch) -> Batch`: what is done to a whole batch (mixup, cutmix). Example j may be mixed with example j - 1 of
  the batch only (j = 0: with the last), all random numbers drawn from torch's CPU generator and as many for any
  number of examples: so several processes together see what one would.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from acm_compiler.errors import DataError, UsageError

Batch = dict[str, Tensor]


def size_of(batch: Batch) -> int:
    """The number of examples of a batch."""
    return len(next(iter(batch.values())))


def real_length(batch: Batch) -> int:
    """Tokens of the text, or samples of the recording, that a batch of one holds, without padding; 0 for neither."""
    if "attention_mask" in batch:
        return int(batch["attention_mask"].sum())
    found = batch.get("input_ids", batch.get("input_values"))
    return 0 if found is None else found.shape[1]


def sources_of(batch: Batch, first: int) -> Tensor:
    """The source of each example, on the CPU; where the batch names none, its number, counted from `first`."""
    return batch["source"].cpu() if "source" in batch else torch.arange(first, first + size_of(batch), device="cpu")


def left_out(dataset: Any) -> dict[str, tuple[str, ...]]:
    """Examples that a data set has excluded so far, by fault; none where it does not say."""
    return {fault: tuple(names) for fault, names in getattr(dataset, "left_out", {}).items()}


def sorted_in_pools(order: Sequence[int], size: int, key: Callable[[int], int]) -> list[int]:
    """The same order, every so many examples of it sorted by `key`."""
    return [index for start in range(0, len(order), size) for index in sorted(order[start : start + size], key=key)]


def first_examples(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """The first `count` examples; the last batch is cut."""
    left = count
    for batch in batches:
        size = size_of(batch)
        yield batch if size <= left else {name: value[:left] for name, value in batch.items()}
        left -= size
        if left <= 0:
            return


def assemble(dataset: Dataset[Any], indices: Sequence[int], examples: Sequence[Any] | None = None) -> Batch:
    """The batch of the examples with these indices; `examples` are they, unless the set makes batches itself."""
    if examples is None:
        batch = dataset.batch(indices)  # type: ignore[attr-defined]
    else:
        collate = getattr(dataset, "collate", None) or partial(_stacked, name=type(dataset).__name__)
        batch = collate([as_example(example, dataset) for example in examples])
    return {**batch, "index": torch.as_tensor(indices, dtype=torch.long)}


def _stacked(examples: Sequence[Mapping[str, Any]], name: str) -> Batch:
    """The examples stacked entry by entry. DataError where that cannot be."""
    try:
        return cast(Batch, default_collate(list(examples)))
    except RuntimeError as error:
        raise DataError(
            "examples cannot be stacked into a batch",
            where=name,
            found=error,
            fix="make them of one shape, or give the data set a method collate(examples), which pads them",
        ) from error


def as_example(item: Any, dataset: Dataset[Any]) -> Mapping[str, Any]:
    """One example as a mapping, for a mapping or a pair (image, label). DataError for anything else."""
    if isinstance(item, Mapping):
        return item
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return {"image": item[0], "label": item[1]}
    raise DataError(
        "a data set's items cannot be read",
        where=type(dataset).__name__,
        found=type(item).__name__,
        expected="a mapping from names to tensors, or a pair (image, label)",
    )


def refuse_no_batches(batches: object) -> None:
    """UsageError for a single batch, and for what holds none."""
    if isinstance(batches, (Tensor, Mapping)) or not isinstance(batches, Iterable):
        raise UsageError(
            "batches must be an iterable of what the model takes",
            found=type(batches).__name__,
            expected="a list, a loader or a generator of batches",
            fix="one batch alone: [batch]",
        )


def check_tokens(tokens: object, name: str = "tokens") -> None:
    """UsageError for a number of tokens to read that is none, given as argument `name`."""
    if isinstance(tokens, bool) or not isinstance(tokens, Real) or not float(tokens) >= 1 or float(tokens) % 1:
        raise UsageError(f"{name} must count tokens", found=repr(tokens), expected="a whole number, at least 1")


def as_batch(given: Any, *, rename: bool = True) -> Batch:
    """A batch as users' loaders give it: a mapping of tensors, a pair (inputs, label), or the inputs alone.

    The inputs alone may stand in a tuple, as those of a TensorDataset do. One tensor of inputs is called `image`, as in
    data sets, whatever it holds; with `rename`, `labels` are called `label`, so that they do not go to the model.
    DataError for anything else.
    """
    parts = given if isinstance(given, (tuple, list)) and len(given) in (1, 2) else (given,)
    inputs, labels = (*parts, None)[:2]
    batch = {"image": inputs} if isinstance(inputs, Tensor) else inputs
    if not isinstance(batch, Mapping) or not batch:
        raise DataError(
            "batch must be a mapping of tensors, a pair (inputs, label), or a tensor",
            found=type(given).__name__,
            fix="let the loader's collate_fn return one of them; several arguments of the model go by their names: "
            "{'x': x, 'other': y, 'label': label}",
        )
    if labels is not None:
        batch = {**batch, "label": labels}
    elif rename and "labels" in batch and "label" not in batch:
        batch = {"label" if name == "labels" else name: value for name, value in batch.items()}
    wrong = next((name for name, value in batch.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise DataError(
            "batch must hold tensors only",
            where=str(wrong),
            found=type(batch[wrong]).__name__,
            fix="leave it out of the batches, or make a tensor of it in the loader's collate_fn",
        )
    return dict(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that a data set offers as attributes of these names; the defaults hold for those that it lacks.

    classes: their names, in the order of the labels. vocabulary: the text of every label of audio. mask_id: the token
    that hides others. marks: the tokens that stand for no text. rate: samples per second of `input_values`.
    pieces: the text of each token of `input_ids`. largest_token: the highest number among these tokens.
    """

    classes: Sequence[str] | None = None
    vocabulary: Sequence[str] | None = None
    mask_id: int | None = None
    marks: Collection[int] = ()
    rate: int | None = None
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None
    largest_token: int | None = None

    @staticmethod
    def of(dataset: object) -> Facts:
        """The facts of a data set; all defaults for None."""
        return Facts(
            **{fact.name: getattr(dataset, fact.name) for fact in fields(Facts) if hasattr(dataset, fact.name)}
        )
