"""Specialisation of an ACM's GPU kernels: its conditions and its results, as hashable values without tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from acm_compiler.acm.arguments import Weights
from acm_compiler.planning.decisions import PlannedSite

Form = Literal["mlp", "gated", "linear", "rows", "cols"]
SecondLayer = Literal["shared", "top", "per_k", "none"]

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ROW_MULTIPLE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """One ACM as its kernels see it: D = d_in, O = d_out, N = learners, H = width, of a slice too.

    second: what follows the hidden layer: one w_out for all k, w_out with w_top at k = N, one w_out per k, or none
    (slices). head: features of one head in one slice, 1 without heads. tf32: fp32 products may be rounded to tf32, as
    torch's own setting says.
    """

    form: Form
    act: str
    learners: int
    width: int
    head: int
    d_in: int
    d_out: int
    dtype: str
    bias_in: bool
    second: SecondLayer
    residual: bool
    tf32: bool

    def __str__(self) -> str:
        """One line: form, shape, activation, dtype."""
        second = "" if self.second in ("shared", "none") else f" {self.second}"
        dtype = "tf32" if self.tf32 else self.dtype
        shape = f"{self.d_in} -> {self.learners} x {self.width} -> {self.d_out}"
        return f"{self.form}{second} {shape} {self.act} {dtype}"

    @property
    def hidden_row(self) -> int:
        """Elements of one token's row in the hidden buffer: N * H rounded up, so that every row is aligned."""
        return -(-self.learners * self.width // _ROW_MULTIPLE) * _ROW_MULTIPLE

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "fp32" else 2


def spec_of(x_TD: Tensor, weights: Weights, residual: Tensor | None) -> KernelSpec:
    """The spec of a call; its dtype must be one of DTYPES."""
    w = weights
    return KernelSpec(
        form=w.form,  # type: ignore[arg-type]
        act=w.act,
        learners=w.w_in.shape[0],
        width=w.w_in[0].numel() // (x_TD.shape[1] if w.form != "cols" else w.b_out.shape[1]),
        head=w.w_in.shape[2 if w.form == "rows" else 3] if w.w_out is None else 1,
        d_in=x_TD.shape[1],
        d_out=w.b_out.shape[1],
        dtype=DTYPES[x_TD.dtype],
        bias_in=w.b_in is not None,
        second=_second_layer(w),
        residual=residual is not None,
        tf32=x_TD.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32",
    )


def spec_of_site(site: PlannedSite, dtype: str) -> KernelSpec:
    """The spec of a planned site's calls, without a residual; dtype bf16, fp16, fp32, or tf32 for rounded fp32."""
    tops: dict[str, SecondLayer] = {"per_k": "per_k", "shared": "shared", "original": "shared", "shared_top": "top"}
    second: SecondLayer = "none" if site.is_sliced else "top" if site.has_top else tops[site.second_layer]
    return KernelSpec(
        form=site.learner_form,  # type: ignore[arg-type]
        act=site.learner_act,
        learners=site.learners,
        width=site.width,
        head=site.width // site.pair.heads if site.is_sliced and site.pair else 1,
        d_in=site.d_in,
        d_out=site.d_out,
        dtype="fp32" if dtype == "tf32" else dtype,
        bias_in=site.has_bias_in,
        second=second,
        residual=False,
        tf32=dtype == "tf32",
    )


def _second_layer(weights: Weights) -> SecondLayer:
    if weights.w_out is None:
        return "none"
    if weights.w_top is not None:
        return "top"
    return "per_k" if weights.w_out.dim() == 4 else "shared"
