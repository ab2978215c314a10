"""One k for every token: what a rewritten model is where its gates choose nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.reference import Weights, prefix_output
from acm_compiler.errors import UsageError
from acm_compiler.exporting.calls import plain_output
from acm_compiler.passes.rewrite.conversion import Rewritten


class Plain(nn.Module):
    """A model, with plain outputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return plain_output(self.model(*args, **kwargs))


class FirstLearners(nn.Module):
    """The first k learners of an ACM as a dense region; it holds copies of their weights alone."""

    def __init__(self, acm: ACM, k: int) -> None:
        super().__init__()
        self.weights, self.k = _first(acm.learners.weights(), k), k

    def forward(self, x: Tensor) -> Tensor:
        y_TO = prefix_output(x.reshape(-1, x.shape[-1]), self.weights, self.k)
        return y_TO.reshape(*x.shape[:-1], y_TO.shape[-1])


def fixed_ks(found: Rewritten, k: Any) -> dict[str, int]:
    """The k of every site where all tokens run `k`, as `acm.set_k` bounds it; UsageError for what cannot be."""
    most = max(acm.count for acm in found.acms.values())
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= most:
        raise UsageError("this export needs one k", where="fixed_k", found=repr(k), expected=f"from 1 to {most}")
    for name, acm in found.acms.items():
        if acm.state == "dense":
            fix = "acm.calibrate(model, batches) first"
            raise UsageError("no learners have been fitted", where=name, fix=fix)
    return {name: acm.within(k, k)[0] for name, acm in found.acms.items()}


@contextmanager
def as_dense_layers(found: Rewritten, ks: Mapping[str, int]) -> Iterator[None]:
    """Inside, the dense region of every ACM is its first learners, as `ks` says, and runs as if none were fitted."""
    held = {acm: (acm.dense, acm.state) for acm in found.acms.values()}
    try:
        for name, k in ks.items():
            acm = found.acms[name]
            acm.dense, acm.state = FirstLearners(acm, k), "dense"
        yield
    finally:
        for acm, (dense, state) in held.items():
            acm.dense, acm.state = dense, state


def _first(weights: Weights, k: int) -> Weights:
    """Copies of what the first k learners need; slices of a dense weight keep them all, as their places count N."""
    if weights.w_out is None or k == 0:
        return weights
    cut = {name: _copy(getattr(weights, name), k) for name in ("w_in", "b_in", "w_up", "b_up")}
    w_out = (weights.w_out[k - 1] if weights.w_out.dim() == 4 else weights.w_out)[:, :k]
    top = weights.w_top if k == weights.learners else None
    return replace(weights, w_out=w_out.clone(), b_out=weights.b_out[: k + 1].clone(), w_top=top, **cut)


def _copy(tensor: Tensor | None, k: int) -> Any:
    return None if tensor is None else tensor[:k].clone()
