"""The model's answer to an example: by what sites are judged, its padding, and how far learners move it.

Shapes: B batch, S tokens, V classes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM, Learners
from acm_compiler.acm.context import called
from acm_compiler.acm.precision import to_float64
from acm_compiler.errors import UsageError
from acm_compiler.passes.capture.forward import output_of
from acm_compiler.passes.capture.graph import batch_size
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.passes.rewrite.dense_region import pass_on
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.masks import call_mask
from acm_compiler.sources.inputs import Example, Inputs, refuse_labels, split_inputs

Answer = Callable[[Any, Tensor | None], Tensor | list[Tensor]]
_NAMED = ("logits", "last_hidden_state")
_MASKED = 1e4  # from here on values that are the same in two outputs count as masked


def default_answer(output: Any, mask_BS: Tensor | None = None) -> list[Tensor]:
    """The tensors of `output` that matter: `logits`, else `last_hidden_state`, else all floating tensors in it.

    Logits of tokens [B, S, V] are judged by their probabilities, those of examples [B, V] are centred: what shifts all
    classes alike changes nothing. So are the tensors of a mapping whose names end in `logits`, as
    `BertForPreTraining`'s `prediction_logits` do; those of pixels, whose classes may be any axis, are left as they are.
    Minus infinity, or the type's lowest number, stands for what a model never predicts: it counts for nothing.
    """
    return [
        tensor if (masked := _masked_places(tensor)) is None else tensor.masked_fill(masked, 0)
        for tensor in _parts(output)
    ]


def _masked_places(tensor: Tensor) -> Tensor | None:
    """The places of minus infinity and of the type's lowest number; None, and no second tensor, without any."""
    lowest = torch.finfo(tensor.dtype).min
    return tensor.detach() <= lowest if tensor.numel() and float(tensor.detach().amin()) <= lowest else None


def _parts(output: Any) -> list[Tensor]:
    for name in _NAMED:
        tensor = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return [_judged(tensor, name)]
    if isinstance(output, Mapping):
        return [_judged(tensor, str(name)) for name, part in output.items() for tensor in _parts(part)]
    if isinstance(output, (tuple, list)):
        return [tensor for part in output for tensor in _parts(part)]
    return [output] if isinstance(output, Tensor) and output.is_floating_point() else []


def _judged(tensor: Tensor, name: str) -> Tensor:
    if not name.endswith("logits") or tensor.dim() not in (2, 3):
        return tensor
    if tensor.dim() == 3:
        return root_probabilities(tensor)
    if (masked := _masked_places(tensor)) is None:
        return tensor - tensor.mean(-1, keepdim=True)
    known, count = tensor.masked_fill(masked, 0), (~masked).sum(-1, keepdim=True).clamp_min(1)
    return (known - known.sum(-1, keepdim=True) / count).masked_fill(masked, 0)


def root_probabilities(logits_BSV: Tensor, mask_BS: Tensor | None = None) -> Tensor:
    """Twice the roots of the probabilities, in fp32 or more, [B, S, V]; 0 where the mask is.

    The squared change of these is, to second order, twice the divergence of the new distribution from the old: logits
    of tokens that will not come count for nothing.
    """
    return _RootProbabilities.apply(logits_BSV, mask_BS)  # type: ignore[no-untyped-call, no-any-return]


class _RootProbabilities(torch.autograd.Function):
    """The function with a gradient that needs the roots alone: one tensor of this size is kept, one made for it.

    Roots r, probabilities p = r^2 / 4: dr = r / 2 (dz - p dz).
    """

    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, mask_BS: Tensor | None) -> Tensor:
        dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
        roots_BSV = logits_BSV.log_softmax(-1, dtype=dtype).mul_(0.5).add_(math.log(2)).exp_()
        if mask_BS is not None:
            roots_BSV.masked_fill_(~mask_BS[..., None].bool(), 0)
        ctx.save_for_backward(roots_BSV)
        ctx.dtype = logits_BSV.dtype
        return roots_BSV

    @staticmethod
    def backward(ctx: Any, gradient_BSV: Tensor) -> tuple[Tensor, None]:
        (roots_BSV,) = ctx.saved_tensors
        along_BS1 = torch.linalg.vecdot(gradient_BSV, roots_BSV)[..., None]
        change_BSV = torch.addcmul(gradient_BSV, roots_BSV, along_BS1, value=-0.25).mul_(roots_BSV).mul_(0.5)
        return change_BSV.to(ctx.dtype), None


def answers(output: Any, answer: Answer, mask_BS: Tensor | None = None) -> list[Tensor]:
    """`answer(output, mask)` as a list; UsageError when it holds no floating tensor with a batch axis."""
    found: object = answer(output, mask_BS)
    parts = found if isinstance(found, (list, tuple)) else [found]
    tensors = [t for t in parts if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]
    if answer is not default_answer and (not tensors or len(tensors) < len(parts)):
        raise UsageError(
            "answer must return floating tensors, which sites are judged by",
            found=", ".join(f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__ for t in parts),
            expected="a floating tensor [batch, ...], or a list of such",
        )
    if not tensors:
        raise UsageError(
            "the model's output holds no floating tensor to judge the sites by",
            found=type(output).__name__,
            expected="a tensor, a tuple or mapping of tensors, or an object with `logits` or `last_hidden_state`",
        )
    return tensors


def _real_tokens(tensor: Tensor, mask_BS: Tensor | None) -> list[Any]:
    """Index of what is no padding for every example of `tensor` [B, ...]; of all where no mask fits its tokens."""
    if mask_BS is None or tensor.dim() < 3 or tensor.shape[:2] != mask_BS.shape:
        return [...] * len(tensor)
    return list(mask_BS.to(tensor.device))


def random_directions(
    tensors: list[Tensor], mask_BS: Tensor | None, *, first: int, seed: int, number: int = 0
) -> list[Tensor]:
    """A standard normal tensor of the shape and type of each of `tensors`, 0 at padding.

    `number` counts independent directions of one output. Each example draws its own, by `seed` and its place in the
    data (`first` + its row), so that neither padding nor the cut into batches changes what is drawn.
    """
    directions = []
    for part, tensor in enumerate(tensors):
        direction = torch.zeros_like(tensor, requires_grad=False)
        for row, real in enumerate(_real_tokens(tensor, mask_BS)):
            # CPU generators use 32 bits of a seed
            own_seed = zlib.crc32(f"{seed} {part} {first + row} {number}".encode())
            generator = torch.Generator(tensor.device).manual_seed(own_seed)
            shape = tensor.shape[1:] if real is ... else (int(real.sum()), *tensor.shape[2:])
            drawn = torch.randn(shape, generator=generator, device=tensor.device, dtype=torch.float32)
            direction[row][real] = drawn.to(direction)
        directions.append(direction)
    return directions


def energy(tensors: list[Tensor], mask_BS: Tensor | None) -> float:
    """|output|^2, padding left out."""
    total = 0.0
    for tensor in tensors:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        for example, real in zip(tensor, _real_tokens(tensor, mask_BS), strict=True):
            norms = torch.linalg.vector_norm(example, dim=-1, dtype=dtype)[real]
            total += float(to_float64(norms).square().sum())
    return total


def run(found: Rewritten, inputs: Inputs) -> Any:
    """The `output_of` a rewritten model; UsageError also for a batch that holds labels."""
    refuse_labels(inputs, planned=found.plan.model.inputs)
    with called(found.owner, lambda: batch_size(inputs)):
        return output_of(found.model, inputs)


def mask_in(model: nn.Module, example: Example) -> Tensor | None:
    """The padding mask [batch, tokens] that is known of a batch, bool."""
    inputs, mask = example
    if mask is not None:
        return mask.bool()
    said = call_mask(model, *split_inputs(inputs))
    return None if said is None else said.tokens()


def answers_with(found: Rewritten, learners: Mapping[str, Learners], example: Example, answer: Answer) -> list[Tensor]:
    """The model's answer when these sites run all of these learners, and all others their dense regions."""
    with batch_context(found.model, mask=example[1]), _running(found.acms, learners):
        return answers(run(found, example[0]), answer, mask_in(found.model, example))


def relative_change(before: list[Tensor], after: list[Tensor], mask_BS: Tensor | None) -> float:
    """The size of the difference of two answers over that of the one before; padding left out."""
    moved = energy([a - b for a, b in zip(after, before, strict=True)], mask_BS)
    return (moved / max(energy(before, mask_BS), 1e-300)) ** 0.5


def without_masked(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs with 0 where both hold the same infinity, or the same number such as finfo.min.

    A model never predicts what stands there: it is no difference, and no measure of others.
    """
    masked = (found == expected) & (expected.abs() >= _MASKED)
    return found.masked_fill(masked, 0), expected.masked_fill(masked, 0)


@contextmanager
def _running(acms: Mapping[str, ACM], learners: Mapping[str, Learners]) -> Iterator[None]:
    before = {acm: (acm.learners, acm.state, acm.tap) for acm in acms.values()}
    try:
        for name, acm in acms.items():
            if name in learners:
                acm.learners, acm.state = learners[name], "learners"
                acm.set_choices(knob=0.0, k_lo=acm.count, k_hi=acm.count)
            else:
                acm.tap = pass_on
        yield
    finally:
        for acm, parts in before.items():
            acm.learners, acm.state, acm.tap = parts
