"""Damage: the expected change of the model's output for each k, token by token (docs/semantics.md).

e_t(k) = |g_t|^2 d_k^T G d_k / tr G, d_k = y_k - o: the error of k learners in the metric of the site's output, times
the token's weight. The scale for each k is set by examples kept whole, where E[(sum over tokens of g . d_k)^2] is
known: errors that tokens share do far more damage together than one by one.

With r standard normal, the gradient g of sum(r * output) at a site's output has E[(g . d)^2] = |J d|^2: the squared
change of the model's output that a change d there causes, to first order.
Shapes: T tokens, C choices of k, O out, E examples, P projections of the output.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from acm_compiler.acm.precision import to_float64
from acm_compiler.acm.reference import Weights
from acm_compiler.calibration.errors_of_k import ErrorsOfK, errors_of_k
from acm_compiler.calibration.moments import thin_factors
from acm_compiler.calibration.records import SiteRecord
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.passes.rewrite.offload import kept
from acm_compiler.runtime import ranks

_BLOCK = 2048
# as many examples in which tokens do damage by themselves are imagined beside those seen
_IMAGINED = 4
# the part of a token's weight that is the same for all tokens, where weights are evened out
_ALIKE = 0.8


def mean_trace(records: Iterable[SiteRecord]) -> float:
    """tr G, averaged over the sites that a gradient reached; 1 when it reached none."""
    traces = [record.metric.trace for record in records if record.metric.trace > 0]
    return sum(traces) / len(traces) if traces else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Examples kept whole, for what their tokens do together.

    x_TD: the tokens; the sample itself where that holds them, at `at_T`. g_TPR: gradients in coordinates in which
    their product with an error through the metric is that with the error. listens_T: |g|^2 of each.
    """

    x_TD: Tensor
    g_TPR: Tensor
    listens_T: Tensor
    example_T: Tensor
    at_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Facts against which a site's learners are judged, in the basis in which they live.

    dense: the weights they replace, neurons in the order of the learners. root: R with R R^T = G over its trace in
    the original basis, [O, R]. x_TD: inputs of sampled tokens, listens_T: |g|^2 of each. whole: examples kept whole,
    None where no gradient reached any.
    """

    dense: DenseWeights
    root: Tensor
    x_TD: Tensor
    listens_T: Tensor
    whole: Together | None = None

    @staticmethod
    def of(record: SiteRecord, x_TD: Tensor, *, elsewhere: float) -> Judged:
        """A site as it was seen; `x_TD` is what its sample holds.

        Where no gradient ever reached it, every token and direction of it is taken to matter alike, as much as other
        sites do: `elsewhere` is their mean trace.
        """
        metric, listens_T = record.metric.value(record.site.d_out, record.home), record.sample.weights
        trace, whole = metric.trace(), None
        if trace > 0:
            root, inverse = thin_factors(metric / trace)
            whole = _together(record, x_TD, inverse)
        else:
            root = torch.eye(len(metric)).to(metric) / len(metric) ** 0.5
            listens_T = torch.full_like(listens_T, elsewhere)
        root, whole = kept(root), kept(whole)
        return Judged(dense=record.dense, root=root, x_TD=x_TD, listens_T=listens_T, whole=whole)

    @property
    def metric(self) -> Tensor:
        """G over its trace in the original basis, [O, O]."""
        return self.root @ self.root.T


def _together(record: SiteRecord, sample_TD: Tensor, inverse_RO: Tensor) -> Together | None:
    whole = record.whole.take()
    if whole is None:
        return None
    in_sample = record.sample.holds_all and ranks.world() == 1
    return Together(
        x_TD=sample_TD if in_sample else whole.x_TD,
        g_TPR=whole.g_TPO @ inverse_RO.T.to(whole.g_TPO),
        listens_T=whole.g_TPO.square().sum((1, 2)),
        example_T=whole.example_T,
        at_T=whole.at_T if in_sample else torch.arange(len(whole.at_T), device=whole.at_T.device),
    )


@torch.no_grad()
def token_damage(weights: Weights, judged: Judged, k_min: int) -> Tensor:
    """e_t(k) for the sampled tokens and every k from k_min to N, fp32 [T, C]; never negative."""
    return token_errors(weights, judged, k_min) * judged.listens_T[:, None].float()


def evened(weight_T: Tensor) -> Tensor:
    """Weights of tokens, most of each the mean of all.

    Gradients hold for small errors at one site. Where many sites err at once, a token that the output hardly listened
    to may drift until it does.
    """
    return torch.lerp(weight_T, weight_T.mean(), _ALIKE)


@torch.no_grad()
def token_errors(weights: Weights, judged: Judged, k_min: int) -> Tensor:
    """e_t(k) of tokens that weigh one each, fp32 [T, C]."""
    errors = errors_of_k(weights, judged.dense, judged.root)
    whole = judged.whole
    size_TC, sums = _measure(errors, judged.x_TD, k_min, whole if whole and whole.x_TD is judged.x_TD else None)
    if whole is not None and whole.x_TD is not judged.x_TD:
        sums = _measure(errors, whole.x_TD, k_min, whole)[1]
    factor_C = _factor(sums, 0 if whole is None else int(whole.example_T.max()) + 1)
    return (size_TC * factor_C.to(size_TC)).float()


def _measure(errors: ErrorsOfK, x_TD: Tensor, k_min: int, whole: Together | None) -> tuple[Tensor, Tensor]:
    """d^T G d / tr G of every token and choice, [T, C], and of whole examples both their damages, float64 [2, C].

    Both are sums over the examples: what their tokens do together, and what each would do alone.
    """
    sizes = []
    examples, projections = (0, 0) if whole is None else (int(whole.example_T.max()) + 1, whole.g_TPR.shape[1])
    moved_CEP = x_TD.new_zeros(len(errors.dropped[1]) + 1 - k_min, examples, projections)
    for first in range(0, len(x_TD), _BLOCK):
        d_CTR = errors(x_TD[first : first + _BLOCK], k_min)
        sizes.append(torch.linalg.vector_norm(d_CTR, dim=-1).square().T)
        if whole is not None:
            here = (whole.at_T >= first) & (whole.at_T < first + _BLOCK)
            moved_CTP = torch.einsum("ctr,tpr->ctp", d_CTR[:, whole.at_T[here] - first], whole.g_TPR[here])
            moved_CEP.index_add_(1, whole.example_T[here], moved_CTP)
    size_TC = torch.cat(sizes)
    joined_C = to_float64(moved_CEP).square().sum((1, 2))
    if whole is None:
        return size_TC, torch.stack([joined_C, joined_C])
    alone_C = (to_float64(size_TC[whole.at_T]) * to_float64(whole.listens_T)[:, None]).sum(0)
    return size_TC, torch.stack([joined_C, alone_C])


def _factor(sums: Tensor, examples: int) -> Tensor:
    """Joint effect of an example's tokens over the sum of each one's alone, for every k, [C]."""
    joined_C, alone_C = ranks.total(sums)
    examples = sum(ranks.gathered(examples))
    # where k learners are exact, both are rounding
    seen_C = torch.where(alone_C > 0, joined_C / alone_C.clamp_min(torch.finfo(alone_C.dtype).tiny), 1.0)
    return (seen_C * examples + _IMAGINED) / (examples + _IMAGINED)


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
            roots_BSV.mul_(mask_BS[..., None])
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
