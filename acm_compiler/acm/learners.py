"""The N ordered learners of an ACM and its gate: their parameters, and how learners start."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.acm.arguments import GateWeights, LearnerWeights, Weights, held
from acm_compiler.acm.precision import without_autocast
from acm_compiler.acm.quantized import integers
from acm_compiler.acm.reference import GateRule


def gumbel_noise(u_TC: Tensor) -> Tensor:
    """Standard Gumbel noise like `u_TC`, from torch's generator."""
    return -torch.empty_like(u_TC, memory_format=torch.contiguous_format).exponential_().log()


class Gate(nn.Module):
    """Linear -> GELU -> Linear, one output column per allowed k (docs/semantics.md, Gate and knob).

    `rule` is the meaning of a score: a paper's logit, or the log of the damage expected from running k learners;
    `reference.utilities` turns either into choices.
    """

    def __init__(self, d_in: int, width: int, columns: int, *, device=None, dtype=None) -> None:
        super().__init__()
        self.inner = nn.Linear(d_in, width, device=device, dtype=dtype)
        self.outer = nn.Linear(width, columns, device=device, dtype=dtype)
        self.rule: GateRule = "logits"

    def forward(self, x_TD: Tensor) -> Tensor:
        """Scores [T, C], computed in the gate's own precision whatever autocast says."""
        with without_autocast(x_TD.device):
            h_TG = F.gelu(self.inner(x_TD.to(self.inner.weight.dtype)))
            return self.outer(h_TG)

    def weights(self) -> GateWeights:
        """Weight and bias of both linears, as the operator takes them."""
        return GateWeights(*held(("weight", "bias"), self.inner, self.outer))


class Learners(nn.Module):
    """Parameters of N learners; every prefix of them is a valid smaller network (docs/semantics.md, The module).

    w_in, w_up [N, H, D]; b_in, b_up [N, H]; w_out [O, N, H] or, with `per_k`, [N, O, N, H]; b_out [N + 1, O];
    w_top [O, N * H] or, for form "linear", [O, D]. Absent ones are None. Slices (forms "rows", "cols") of G `heads`
    have w_in [N, G, H / G, D] or [N, O, G, H / G] and no w_out.

    After `quantize` the weights are buffers of integers, with scales s_in to s_top (`arguments.Weights`); biases stay.
    Another library may have put tensors there that stand for floats (`quantized.integers`).
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        learners: int,
        width: int,
        *,
        form: str,
        act: str,
        bias_in: bool = True,
        per_k: bool = False,
        top: bool = False,
        heads: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.form, self.act = form, act

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

        gated, sliced = form == "gated", form in ("rows", "cols")
        if sliced:
            part = (heads, width // heads)
            self.w_in = parameter(learners, *part, d_in) if form == "rows" else parameter(learners, d_out, *part)
        else:
            self.w_in = parameter(learners, width, d_in)
        self.b_in = parameter(learners, width) if bias_in else None
        self.w_up = parameter(learners, width, d_in) if gated else None
        self.b_up = parameter(learners, width) if gated and bias_in else None
        self.w_out = None if sliced else parameter(*([learners] if per_k else []), d_out, learners, width)
        self.b_out = parameter(learners + 1, d_out)
        self.w_top = parameter(d_out, d_in if form == "linear" else learners * width) if top else None
        self.s_in = self.s_up = self.s_out = self.s_top = None

    def weights(self) -> Weights:
        """The tensors as the reference and the operators take them."""
        tensors = integers.floats_of(held(LearnerWeights._fields, self))
        return Weights(*LearnerWeights(*tensors), act=self.act, form=self.form)

    @property
    def quantized(self) -> str | None:
        """The form of the weights: int8 or int4, the name of another library's tensors, None for floats."""
        return integers.kind_of(held(integers.WEIGHTS, self))

    def can_quantize(self, to: integers.To) -> bool:
        """True if the weights can be of this type: of 4 bits two values of a row share a byte."""
        rows = (self.w_in.shape[-1], *([] if self.w_out is None else [self.w_in.shape[1]]))
        return to != "int4" or not any(length % 2 for length in rows)

    @torch.no_grad()
    def quantize(self, to: integers.To = "int8", made: Weights | None = None) -> None:
        """Replace the weights by integers, in place (docs/semantics.md, Int8 learners, Int4 learners).

        made: the integers, and biases to match; where unset, every weight is rounded to nearest.
        """
        quantized = (made or integers.quantized(self.weights(), to)).tensors._asdict()
        for name in (*integers.WEIGHTS, *integers.SCALES):
            if quantized[name] is not None:
                delattr(self, name)
                self.register_buffer(name, quantized[name])
        for name, parameter in self.named_parameters():
            parameter.copy_(quantized[name]).requires_grad_(False)

    def _apply(self, fn, recurse=True):
        """Keep the type of scales, where others change a module's type."""
        scales = {name: scale for name in integers.SCALES if (scale := self._buffers.get(name)) is not None}
        super()._apply(fn, recurse)
        integers.restore_scales(self, scales)
        return self

    @torch.no_grad()
    def start_random(self) -> None:
        """The paper's start: each learner as torch initialises a small MLP of its own; output biases are zero."""
        fan_in, fan_hidden = self.w_in.shape[-1], self.w_in.shape[1]
        if self.form == "cols":
            fan_in = self.w_in[:, 0].numel()
        for tensor in (self.w_in, self.b_in, self.w_up, self.b_up):
            if tensor is not None:
                tensor.uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
        if self.w_out is not None:
            self.w_out.uniform_(-1 / math.sqrt(fan_hidden), 1 / math.sqrt(fan_hidden))
        self.b_out.zero_()

    @torch.no_grad()
    def start_split(self, first: list[tuple[Tensor, Tensor | None]], last: tuple[Tensor, Tensor | None]) -> None:
        """The dense MLP cut into learners in the given order of neurons; k = N then equals it.

        `first` holds (weight [H, D], bias [H]) of the activated branch and, when gated, of the multiplied branch;
        `last` is (weight [O, H], bias [O]). Neurons missing to N * H are zeros: act(0) times a zero column.
        """
        targets = ((self.w_in, self.b_in), (self.w_up, self.b_up))
        for (w_HD, b_H), (w_NHD, b_NH) in zip(first, targets, strict=False):
            assert w_NHD is not None
            w_NHD.zero_().flatten(0, 1)[: w_HD.shape[0]].copy_(w_HD)
            if b_NH is not None:
                b_NH.zero_()
            if b_NH is not None and b_H is not None:
                b_NH.flatten()[: b_H.shape[0]].copy_(b_H)
        w_OH, b_O = last
        assert self.w_out is not None
        per_k = self.w_out if self.w_out.dim() == 4 else self.w_out[None]
        per_k.zero_().flatten(-2)[..., : w_OH.shape[1]].copy_(w_OH)
        self.b_out.zero_()
        if b_O is not None:
            self.b_out.copy_(b_O)
        if self.w_top is not None:
            self.w_top.zero_()[:, : w_OH.shape[1]].copy_(w_OH)

    @torch.no_grad()
    def start_factors(self, w_OD: Tensor, b_O: Tensor | None) -> None:
        """A dense projection's weight by its singular directions, the strongest in the first learner.

        Only of learners without an activation that have a second layer. k = N is the best factorisation of that rank.
        """
        u_OR, s_R, v_RD = torch.linalg.svd(w_OD.float(), full_matrices=False)
        rank = min(self.w_in.shape[0] * self.w_in.shape[1], s_R.shape[0])
        root_R = s_R[:rank].sqrt()
        top, self.w_top = self.w_top, None  # of a projection it is the whole weight, not one of factors
        self.start_split([(root_R[:, None] * v_RD[:rank], None)], (u_OR[:, :rank] * root_R, b_O))
        self.w_top = top


class OnlyK:
    """The k that the bounds of an ACM leave to every token where they leave but one, by phase: a number of the host.

    It is kept as a size of a tensor without elements: of a module's numbers a graph makes constants, of sizes it does
    not, and one graph serves all k.
    """

    def __init__(
        self,
        written: Mapping[str, int],
        within: Callable[[int, int], tuple[int, int]],
        buffers: Mapping[str, Tensor | None],
    ) -> None:
        """Keep it, of the bounds that were written into these buffers, as far as a site keeps them."""
        self._prefill = _only(*within(written["k_lo"], written["k_hi"]))
        self._decode = _only(*within(written["decode_k_lo"], written["decode_k_hi"]))
        self._marks = _marks(buffers)

    def is_of(self, buffers: Mapping[str, Tensor | None]) -> bool:
        """True if nothing was written there since, and no other tensors took their place; without asking the device."""
        return self._marks == _marks(buffers)

    def of(self, *, is_decode: bool) -> int | None:
        """The only k of that phase, None where gates have a choice."""
        size = self._decode if is_decode else self._prefill
        return None if size is None else size.shape[0] - _PAST_SPECIAL


_PAST_SPECIAL = 2  # sizes 0 and 1, of which torch makes graphs of their own


def _only(low: int, high: int) -> Tensor | None:
    return torch.empty(low + _PAST_SPECIAL, 0, device="cpu") if low == high else None


def _marks(buffers: Mapping[str, Tensor | None]) -> list[tuple[int, int]]:
    """Places of the bounds and how often they were written; inference tensors do not count that."""
    bounds = [buffers["k_lo"], buffers["k_hi"], buffers["decode_k_lo"], buffers["decode_k_hi"]]
    return [(id(t), 0 if t is None or t.is_inference() else t._version) for t in bounds]
