"""Which of a model's outputs matter, and random projections of them that ask every site how much it matters.

With r standard normal, the gradient g of sum(r * output) at a site's output has E[(g . d)^2] = |J d|^2: the squared
change of the model's output that a change d there causes, to first order.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.errors import UsageError

Answer = Callable[[Any, Tensor | None], Tensor | list[Tensor]]
_NAMED = ("logits", "last_hidden_state")


def default_answer(output: Any, mask_BS: Tensor | None = None) -> list[Tensor]:
    """The tensors of `output` that matter: `logits`, else `last_hidden_state`, else all floating tensors in it.

    Logits of tokens [B, S, V] are judged by their probabilities; others are centred: what shifts all classes alike
    changes nothing.
    """
    for name in _NAMED:
        tensor = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            return [_judged(tensor) if name == "logits" else tensor]
    parts = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(parts, (tuple, list)):
        return [tensor for part in parts for tensor in default_answer(part)]
    return [output] if isinstance(output, Tensor) and output.is_floating_point() else []


def _judged(logits: Tensor) -> Tensor:
    return root_probabilities(logits) if logits.dim() == 3 else logits - logits.mean(-1, keepdim=True)


def root_probabilities(logits_BSV: Tensor) -> Tensor:
    """Twice the roots of the probabilities, in fp32 or more, [B, S, V].

    The squared change of these is, to second order, twice the divergence of the new distribution from the old: logits
    of tokens that will not come count for nothing.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    return 2 * (logits_BSV.log_softmax(-1, dtype=dtype) / 2).exp()


def answers(output: Any, answer: Answer, mask_BS: Tensor | None = None) -> list[Tensor]:
    """`answer(output, mask)` as a list; UsageError when it holds no floating tensor with a batch axis."""
    found: object = answer(output, mask_BS)
    parts = found if isinstance(found, (list, tuple)) else [found]
    tensors = [t for t in parts if isinstance(t, Tensor) and t.is_floating_point() and t.dim()]
    if answer is not default_answer and (not tensors or len(tensors) < len(parts)):
        raise UsageError(
            "answer gave what the sites cannot be judged by",
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


def real_rows(tensor: Tensor, mask_BS: Tensor | None) -> list[Tensor]:
    """One view [rows, ...] per example of `tensor` [B, ...]; without padding where the mask fits its token axis."""
    if mask_BS is None or tensor.dim() < 3 or tensor.shape[:2] != mask_BS.shape:
        return [example.reshape(1, -1) for example in tensor]
    return [example[real] for example, real in zip(tensor, mask_BS.to(tensor.device), strict=True)]


def random_projection(
    tensors: list[Tensor], mask_BS: Tensor | None, *, first: int, seed: int, number: int = 0
) -> Tensor:
    """sum(r * output) with r standard normal, as a scalar with its graph; padding is left out.

    `number` counts independent projections of one output. Each example draws its own r, by `seed` and its place in
    the data (`first` + its row), so that neither padding nor the cut into batches changes what is drawn.
    """
    total = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    for part, tensor in enumerate(tensors):
        for row, values in enumerate(real_rows(tensor, mask_BS)):
            # CPU generators use 32 bits of a seed
            own_seed = zlib.crc32(f"{seed} {part} {first + row} {number}".encode())
            generator = torch.Generator(values.device).manual_seed(own_seed)
            r = torch.randn(values.shape, generator=generator, device=values.device, dtype=torch.float32)
            total = total + (values.float() * r).sum()
    return total


def energy(tensors: list[Tensor], mask_BS: Tensor | None) -> float:
    """|output|^2, padding left out."""
    rows = [values for tensor in tensors for values in real_rows(tensor, mask_BS)]
    return sum(float(to_float64(values).square().sum()) for values in rows)
