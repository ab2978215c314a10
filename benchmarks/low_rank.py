"""Low rank without training: every linear layer becomes two thin ones, the same for every token.

SVD-LLM (arXiv 2403.07378) cuts the singular values of W S, where S S^T is the second moment of the layer's inputs, so
that what is cut is what the outputs miss on calibration tokens. Its weights are not updated afterwards, and every layer
keeps the same share.

Shapes: T tokens, D inputs and O outputs of a layer, R rank, M the smaller one of O and D.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.inputs import call_model
from acm_compiler.planning.plan import Plan
from benchmarks.method import BATCHES, Method

_RIDGE = 1e-6  # of the mean variance: inputs that calibration tokens do not span


class LowRank(Method):
    """SVD-LLM's factors of the linear layers of a plan's sites, with `rank(share)` columns."""

    def __init__(self, dense: nn.Module, plan: Plan) -> None:
        super().__init__(dense, plan)
        self.factors: dict[nn.Linear, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def fit(self, batches: Iterable[Any], shares: Sequence[float]) -> None:
        """Take moments from the first batches (inputs, mask of real tokens); ranks are cut later."""
        moments = {linear: torch.zeros((linear.in_features,) * 2, dtype=torch.float64) for linear in self.linears}

        def add(linear: Any, args: tuple[Tensor, ...]) -> None:
            x_TD = args[0][self.mask_of(args[0])].double()
            moments[linear] += x_TD.T @ x_TD

        with contextlib.ExitStack() as hooks:
            for linear in self.linears:
                hooks.callback(linear.register_forward_pre_hook(add).remove)
            for inputs, self.real in islice(batches, BATCHES):
                call_model(self.dense, inputs)
        self.factors = {linear: whitened(linear.weight, moments.pop(linear)) for linear in self.linears}

    @contextlib.contextmanager
    def at(self, share: float) -> Iterator[None]:
        """Put two thin layers in the place of each linear layer meanwhile."""
        self.kept_macs = self.all_macs = 0
        places = [(n, m) for n, m in self.dense.named_modules(remove_duplicate=False) if m in self.factors]
        try:
            for name, linear in places:
                self.dense.set_submodule(name, self._thin(linear, share))
            yield
        finally:
            for name, linear in places:
                self.dense.set_submodule(name, linear)

    def _thin(self, linear: nn.Module, share: float) -> nn.Module:
        """The two layers, which add what they run to the MACs."""
        assert isinstance(linear, nn.Linear)
        left_OM, right_MD = self.factors[linear]
        size, sides = linear.weight.numel(), sum(linear.weight.shape)
        rank = max(1, int(share * size / sides))

        def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            tokens = int(self.mask_of(args[0]).sum())
            self.kept_macs += tokens * rank * sides
            self.all_macs += tokens * size

        thin = nn.Sequential(_linear(right_MD[:rank], None), _linear(left_OM[:, :rank], linear.bias))
        thin.register_forward_pre_hook(count)
        return thin.train(linear.training)


def whitened(weight_OD: Tensor, moment_DD: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of a weight, [O, M] and [M, D], in the order of what they add to the outputs."""
    ridge_DD = _RIDGE * moment_DD.diagonal().mean() * torch.eye(len(moment_DD), dtype=torch.float64)
    root_DD = torch.linalg.cholesky(moment_DD + ridge_DD)
    u_OM, values_M, v_MD = torch.linalg.svd(weight_OD.double() @ root_DD, full_matrices=False)
    right_MD = torch.linalg.solve_triangular(root_DD, v_MD, upper=False, left=False)
    return (u_OM * values_M).to(weight_OD.dtype), right_MD.to(weight_OD.dtype)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear
