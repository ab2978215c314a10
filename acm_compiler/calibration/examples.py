"""Inputs of a calibration: its options, and the examples that it runs the model on."""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from acm_compiler.acm.precision import Precision
from acm_compiler.calibration.answer import Answer, default_answer
from acm_compiler.data.batch import check_tokens, refuse_no_batches
from acm_compiler.errors import DataError, UsageError
from acm_compiler.passes.capture.forward import shapes_of
from acm_compiler.runtime import ranks
from acm_compiler.sources.inputs import Example, Inputs, split_inputs

# a user's own word on the padding of one batch
MaskOf = Callable[[Any], Tensor | None]
# one batch of so many is kept for measuring; more tokens than _MEASURED tell little more about shares
_HELD_OUT, _MEASURED = 6, 4096
# tokens that are run at once on a CPU, for memory: forwards of so few take longer for each token, and those that no
# gradients follow may run more
_AT_ONCE, _FORWARD_ALONE = 192, 1024
# what a model may be told of every token
_OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids", "position_ids"}
# batches that serve for both where there are too few to hold one out
_SHARED = 2
# numbers of a tensor by which processes see that they read the same
_MARKED = 1024


class Examples:
    """Batches as (inputs, mask) pairs; a sixth is held out of the fit, or less where that were more than 4,096 tokens.

    tokens: how many will be read; 0 holds none out. apart: the model treats every row of a batch alone, so batches may
    be run in parts, as those held out are: without padding that none of a part needs, if batches of several lengths
    were read.
    """

    def __init__(self, batches: Iterable[Example], *, tokens: int = 0, apart: bool = False) -> None:
        self._batches, self._every, self.apart = batches, held_out_every(tokens) if tokens else 0, apart
        self.fitted: list[Example] = []
        self._held_out: list[Example] = []

    def read(self, enough: Callable[[], bool]) -> Iterator[Example]:
        """Batches to fit on until `enough()`, which is asked after each; DataError when there are none."""
        for place, (inputs, mask) in enumerate(_alike(self._batches), start=1):
            example = (_plain(inputs), None if mask is None else _plain(mask))
            if self._every and place % self._every == 0:
                self._held_out.append(example)
                continue
            self.fitted.append(example)
            yield example
            if enough():
                break
        if not self.fitted:
            raise DataError("no batches to calibrate on", fix="give an iterable of what the model takes")

    @property
    def held_out(self) -> list[Example]:
        """Batches for measuring; the first ones of the fit where there are too few to hold any out."""
        if not self.apart or not self._held_out:
            return self._held_out or self.fitted[:_SHARED]
        takes_any_length = len({tokens_shape(example)[1:] for example in self.fitted}) > 1
        return [part for example in self._held_out for part in in_parts(example, shortened=takes_any_length)]


def in_parts(example: Example, *, at_most: int = _AT_ONCE, shortened: bool = False) -> list[Example]:
    """The rows of token numbers [B, S] in batches of at most so many tokens, padding counted; other batches are whole.

    What a model of a large vocabulary gives for a thousand tokens, and what its gradients keep, takes gigabytes.
    shortened: rows of like length are put together, and columns that are padding in all of them are left out.
    """
    leaves, shape = _tensors(example), tokens_shape(example)
    if not shape or any(leaf.shape[:2] != shape or leaf.device.type != "cpu" for leaf in leaves):
        return [example]
    lengths = _lengths(example[0]) if shortened else None
    columns = lengths or [shape[1]] * shape[0]
    parts: list[list[int]] = []
    for row in sorted(range(shape[0]), key=lambda row: -columns[row]):
        if parts and (len(parts[-1]) + 1) * columns[parts[-1][0]] <= at_most:
            parts[-1].append(row)
        else:
            parts.append([row])
    if not lengths and len(parts) <= 1:
        return [example]
    cuts = [operator.itemgetter((rows, slice(columns[rows[0]]))) for rows in parts]
    return [tree_map_only(Tensor, cut, example) for cut in cuts]


def _lengths(inputs: Inputs) -> list[int] | None:
    """The columns of each row up to its last real token, by the model's own mask of tokens; None where none is given.

    Nor where it may be given rows of another kind, such as those of a decoder.
    """
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) and inputs.keys() <= _OF_TOKENS else None
    if mask is None or mask.dim() != 2:
        return None
    last_B = (mask.bool() * torch.arange(1, mask.shape[1] + 1)).amax(1)
    return [int(last) for last in last_B.clamp_min(1)]


def _tensors(example: Example | None) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]


def tokens_shape(example: Example) -> tuple[int, ...]:
    """[B, S] of the first token numbers in a batch; empty where it holds none."""
    shapes = (leaf.shape for leaf in _tensors(example) if leaf.dim() == 2 and not leaf.is_floating_point())
    return tuple(next(shapes, ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Examples that this process runs at once, None where others do all of it.

    before: the number of examples that other processes run before them. cut: all have some rows of one batch.
    """

    example: Example | None
    before: int = 0
    cut: bool = False


def shares(example: Example, *, apart: bool, forward_alone: bool, shortened: bool) -> Iterator[Share]:
    """This process's shares of a batch; all processes have as many, and together they are the batch.

    apart: as of `Examples`; other batches are not shared out, the first process runs them. forward_alone: in parts of
    more tokens. shortened: as of `in_parts`.
    """
    world, rank = ranks.world(), ranks.rank()
    at_most = _FORWARD_ALONE if forward_alone else _AT_ONCE
    parts = in_parts(example, at_most=at_most, shortened=shortened) if apart else [example]
    rows = _rows(example) if apart and len(parts) == 1 else 0
    if world > 1 and rows > 1:
        low, high = (rows * place // world for place in (rank, rank + 1))
        own = tree_map_only(Tensor, operator.itemgetter(slice(low, high)), example)
        yield Share(example=own if low < high else None, before=low, cut=True)
        return
    for start in range(0, len(parts), world):
        at_once = parts[start : start + world]
        own = at_once[rank] if rank < len(at_once) else None
        yield Share(example=own, before=sum(map(_rows, at_once[:rank])))


def _alike(batches: Iterable[Example]) -> Iterator[Example]:
    """The batches; UsageError where another process reads others, since each is to run a part of the same."""
    if ranks.world() == 1:
        yield from batches
        return
    for example in chain(batches, [None]):
        if len(set(ranks.gathered(_mark(example)))) > 1:
            raise UsageError(
                "processes that calibrate together must read the same batches, and these differ",
                found="another batch in this process than in another, or none",
                fix="give all processes all batches, in one order: no DistributedSampler, and data that is drawn alike",
            )
        if example is not None:
            yield example


def _mark(example: Example | None) -> tuple[Any, ...]:
    """The shape of each tensor of a batch, and a digest of its first numbers."""
    leaves = _tensors(example)
    heads = [leaf.detach().flatten()[:_MARKED].cpu().contiguous().view(torch.uint8) for leaf in leaves]
    return tuple(leaf.shape for leaf in leaves), tuple(zlib.crc32(head.numpy().tobytes()) for head in heads)


def _rows(example: Example) -> int:
    """The number of rows that all tensors of a batch have, 0 where they have not."""
    sizes = {leaf.shape[0] if leaf.dim() else 0 for leaf in _tensors(example)}
    return sizes.pop() if len(sizes) == 1 else 0


def held_out_every(tokens: int) -> int:
    """The n of which every n-th batch is held out where so many tokens are read."""
    return max(_HELD_OUT, tokens // _MEASURED)


def masked(batches: Iterable[Inputs], mask: MaskOf | None = None) -> Iterator[Example]:
    """Batches of what the model takes, each with what `mask` says of it; where that is None, its call's own holds.

    UsageError for a single batch, for what is none, and for masks of another kind.
    """
    refuse_no_batches(batches)
    if mask is not None and not callable(mask):
        raise UsageError(
            "mask must be a function",
            found=type(mask).__name__,
            expected="a function of one batch, which gives its mask [batch, tokens] or None",
            fix="mask=lambda batch: batch['input_ids'] != 0",
        )
    return _pairs(batches, mask)


def _pairs(batches: Iterable[Inputs], mask: MaskOf | None) -> Iterator[Example]:
    for inputs in batches:
        split_inputs(inputs)
        yield inputs, None if mask is None else _said(mask, inputs)


def _said(mask: MaskOf, inputs: Inputs) -> Tensor | None:
    """The padding mask of a batch by `mask`; UsageError unless that is bool [batch, tokens] or None."""
    said: object = mask(inputs)
    if said is None or (isinstance(said, Tensor) and said.dtype == torch.bool and said.dim() == 2):
        return said
    raise UsageError(
        "mask must return a padding mask",
        found=shapes_of((said,)) if isinstance(said, Tensor) else type(said).__name__,
        expected="bool [batch, tokens], True at real tokens, or None",
        fix="compare, as in ids != 0, or end with .bool()",
    )


def _plain(value: Any) -> Any:
    """The same value without inference tensors, which autograd cannot use."""
    if isinstance(value, Tensor):
        return value.clone() if value.is_inference() else value
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_plain(part) for part in value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Data, time and memory of a calibration, and its purpose.

    tokens: real tokens to fit each site on. gradient_tokens: how many of them are run with gradients, the rest forward
    alone, for the moments; None: all. budgets: what will be asked for, as of `set_budget`; the lowest k is raised only
    where they stay reachable. answer: (model output, padding mask or None) -> the tensors by which sites are judged.
    backward_passes: of each batch with gradients, each along a random direction of the answer. sample: tokens of each
    site kept for its gate, more of sites with few features. gate_steps: optimizer steps per gate. memory_bytes: what
    the statistics of all sites may take at once, in files four times as much; beyond it the data is passed over more
    than once. local_steps: of training for the learners of each MLP whose k share one second layer, on inputs of its
    own; local_tokens: how many. offload: where statistics and learners lie in files, as of `offloading`; None: where
    the model is; "cpu": in host memory, and so does the model, see `streaming`. precision: of the products of linear
    layers while the model is read: bf16 on CPUs with instructions for it, else their own type.
    """

    tokens: int = 20_000
    gradient_tokens: int | None = None
    budgets: Sequence[float | str] = ()
    answer: Answer = default_answer
    backward_passes: int = 3
    sample: int = 8192
    gate_steps: int = 300
    memory_bytes: int = 4 * 2**30
    local_steps: int = 0
    local_tokens: int = 65_536
    offload: str | os.PathLike[str] | None = None
    precision: Precision = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        check_tokens(self.tokens)
        if self.gradient_tokens is not None:
            check_tokens(self.gradient_tokens, "gradient_tokens")
        for name, value, least in (("backward_passes", self.backward_passes, 1), ("local_steps", self.local_steps, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be a whole number, at least {least}", found=repr(value))
        if self.precision not in get_args(Precision):
            raise UsageError("precision must be one of two types", found=repr(self.precision), expected="fp32 or bf16")
        if not callable(self.answer):
            expected = "answer(output, mask), where output is what the model gives for a batch"
            raise UsageError("answer must be a function", found=type(self.answer).__name__, expected=expected)
