"""Tensor parallelism of an ACM: every process holds a part of every learner, so that each k stays a valid network.

The hidden width is cut. A process's part of the learners gives a part of the output, of which the sum over processes is
the whole. Gates are small: every process runs all of them, on the same tokens.
Shapes: T tokens, D in, O out, N learners, H learner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import Weights
from acm_compiler.errors import UsageError, require_fitted

# the axis of each weight that runs over the hidden width, counted from the end
_HIDDEN = {"w_in": -2, "b_in": -1, "w_up": -2, "b_up": -1, "w_out": -1}


class SplitLearners(ParallelStyle):
    """A style for `parallelize_module(model, mesh, {site: SplitLearners()})`; sites as `acm.sites(model)` names them.

    Input and output [..., D] -> [..., O] are whole on every process, which must all run the same tokens, set the same
    budget and, while gates are relaxed, draw the same noise (`torch.manual_seed`). Parameters become DTensors; all
    processes call `acm.save`. UsageError for other modules, quantised learners, slices, adapters, a mesh of several
    dimensions, and fewer neurons than processes; SitesNotFitted for learners that no phase has fitted.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        acm = _splittable(module, device_mesh)
        learners = acm.learners
        for name, axis in _HIDDEN.items():
            weight = getattr(learners, name)
            if weight is not None:
                cut = [Shard(weight.dim() + axis)]
                part = distribute_tensor(weight.detach(), device_mesh, cut, src_data_rank=self.src_data_rank)
                learners.register_parameter(name, nn.Parameter(part, requires_grad=weight.requires_grad))
        acm.dense, acm.replaced = None, None  # they are whole, and what they are for is refused from now on
        acm.split = _Split(device_mesh)
        return acm


def _splittable(module: nn.Module, mesh: DeviceMesh) -> ACM:
    if not isinstance(module, ACM):
        raise UsageError(
            "SplitLearners is for ACMs",
            found=type(module).__name__,
            fix="give it the names in acm.sites(model); torch's own styles are for the layers around them",
        )
    require_fitted([module.name] if module.state == "dense" else [], "SplitLearners")
    width = module.learners.w_in.shape[1]
    problems = (
        (module.split is not None, "they are split already", "split a model once"),
        (mesh.ndim != 1, f"the mesh has {mesh.ndim} dimensions", "give one of them: mesh['tp']"),
        (module.learners.w_out is None, "they are slices", "leave the site out; or plan it with form: svd"),
        (module.learners.quantized is not None, "they are quantised", "split a model of floats"),
        (module.skips is not None, "they skip values", "acm.set_sparsity(model, None) first"),
        (module.adapter is not None, "an adapter is on them", "model = adapted.merge_and_unload() first"),
        (
            width < mesh.size() or -(-width // mesh.size()) * (mesh.size() - 1) >= width,
            f"of {width} hidden neurons {mesh.size()} processes cannot have some each",
            "use fewer processes, or leave the site out",
        ),
    )
    for is_so, what, fix in problems:
        if is_so:
            raise UsageError(f"the learners of this site cannot be split: {what}", where=module.name, fix=fix)
    return module


class _Split:
    """Operators of an ACM on parts of its learners: one sum over processes forward, one backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def __call__(self, operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x_TD: Tensor, chosen: Tensor, weights: Weights, *rest: Any) -> Tensor:
            if chosen.is_floating_point():  # relaxed choices, to which each process gives a part of the gradient
                chosen = self._shared(chosen)
            return self._total(operator(self._shared(x_TD), chosen, self._part(weights), *rest))

        return run

    def _part(self, weights: Weights) -> Weights:
        """Weights that this process runs: its part of the hidden width; those there once are the first process's."""
        held = {name: getattr(weights, name) for name in _HIDDEN}
        local: dict[str, Any] = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in held.items()}
        local["b_out"] = self._of_first(weights.b_out)
        if weights.w_top is not None and weights.form == "linear":
            local["w_top"] = self._of_first(weights.w_top)
        elif weights.w_top is not None:
            width, own = weights.w_in.shape[1], local["w_in"].shape[1]
            first = self.mesh.get_local_rank() * -(-width // self.mesh.size())
            top_ONH = self._shared(weights.w_top).unflatten(1, (-1, width))
            local["w_top"] = top_ONH[..., first : first + own].flatten(1)
        return replace(weights, **local)

    def _shared(self, value: Tensor) -> Tensor:
        """A value that all processes have, whose gradient is the sum of theirs."""
        return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )

    def _total(self, part: Tensor) -> Tensor:
        """The sum over processes."""
        return (
            DTensor.from_local(part, self.mesh, [Partial()], run_check=False)
            .redistribute(placements=[Replicate()])
            .to_local()
        )

    def _of_first(self, value: Tensor) -> Tensor:
        """A value that is to be added up once: the first process's, zeros elsewhere; all see its whole gradient."""
        return _OfFirst.apply(value, self.mesh.get_local_rank() == 0)


class _OfFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, is_first: bool) -> Tensor:
        return value.clone() if is_first else torch.zeros_like(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
