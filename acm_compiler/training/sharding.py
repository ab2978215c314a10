"""A model in parts, one on each process, while a phase trains it: torch's `fully_shard` (FSDP2), and the way back.

A unit is gathered as a whole when its forward or backward runs: a layer of the model that holds ACMs, or a dense
region, which few phases run. What no unit holds is gathered for the whole of a forward and of a backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _composable_state
from torch.distributed import checkpoint as parts_on_disk
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from acm_compiler.acm import ACM
from acm_compiler.training.machine import Machine

# marks that `fully_shard` leaves on every module below, for Dynamo and for transformers
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


@contextmanager
def sharded(model: nn.Module, machine: Machine) -> Iterator[None]:
    """Inside, each process of a sharded run holds its part of every parameter; afterwards all of all of them again."""
    if not machine.sharded:
        yield
        return
    shard(model, machine)
    yield
    gather(model)  # not after an error, which other processes may not have met


def shard(model: nn.Module, machine: Machine) -> None:
    """Turn all parameters into this process's part of them, in place; all processes call it with equal models."""
    mesh = init_device_mesh(machine.device.type, (machine.world,))
    for unit in (*units(model), model):
        unit.register_forward_hook(_reach_all)
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, shard_placement_fn=_axis(machine.world))


def units(model: nn.Module) -> list[nn.Module]:
    """Modules whose parameters are gathered together, inner ones first; the model itself is left out."""
    acms = [module for module in model.modules() if isinstance(module, ACM)]
    dense = [acm.dense for acm in acms if acm.dense is not None and next(acm.dense.parameters(), None) is not None]
    return [*dict.fromkeys(dense), *_layers(model)]


def _layers(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of modules that hold ACMs."""
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [part for part in child if any(isinstance(m, ACM) for m in part.modules())]
        elif not isinstance(child, ACM):
            found += _layers(child)
    return list(dict.fromkeys(found))


def _axis(world: int):
    """The axis of a parameter that is cut: the first that all processes have an equal part of, else the first one.

    Weights of learners begin with N, which is often less than the number of processes.
    """

    def choose(parameter: nn.Parameter) -> Shard | None:
        return next((Shard(axis) for axis, size in enumerate(parameter.shape) if size % world == 0), None)

    return choose


def _reach_all(module: nn.Module, args: Any, output: Any) -> Any:
    """Give each parameter of a unit a gradient, zero where its tokens need it not: they differ between processes.

    All processes add up the same gradients, or none gets on: a second layer may run at k = N alone.
    """
    leaves, form = tree_flatten(output)
    at = next((i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad), None)
    if at is None or not torch.is_grad_enabled():
        return output
    own = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    leaves[at] = _Reaching.apply(leaves[at], *own)
    return tree_unflatten(leaves, form)


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.zeros = [p.new_zeros(()).expand(p.shape) for p in parameters]
        return y.clone()  # FSDP warns of views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return (grads[0], *ctx.zeros)


@torch.no_grad()
def gather(model: nn.Module) -> None:
    """Undo `shard`: all of all parameters on every process, modules of their former classes, and no hooks of it."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in found:
                    found[id(parameter)] = nn.Parameter(parameter.full_tensor(), parameter.requires_grad)
                module._parameters[name] = found[id(parameter)]
    for module in model.modules():
        for key in [key for key, hook in module._forward_hooks.items() if hook is _reach_all]:
            del module._forward_hooks[key]
        if isinstance(module, FSDPModule):
            state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            module.__class__ = type(module).__mro__[2]  # that of FSDP, FSDPModule, the module's own
            _composable_state._module_state_mapping.pop(module)
            del module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]
        for mark in _MARKS:
            module.__dict__.pop(mark, None)


def pass_gradients(gathered: Iterable[nn.Parameter], parts: Iterable[nn.Parameter]) -> None:
    """Add the gradients of gathered parameters, summed over processes, to those of their parts, and let go of them."""
    for whole, part in zip(gathered, parts, strict=True):
        assert isinstance(part, DTensor)
        gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
        whole.grad = None
        summed = DTensor.from_local(gradient, part.device_mesh, [Partial()], run_check=False)
        summed = summed.redistribute(placements=part.placements)
        part.grad = summed if part.grad is None else part.grad + summed


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which this process may hold a part; then all processes ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def write_parts(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write the parts of all processes to one directory (`torch.distributed.checkpoint`); all of them call it."""
    parts_on_disk.save(tensors, checkpoint_id=directory)


def read_parts(tensors: dict[str, Tensor], directory: Path) -> None:
    """Fill `tensors`, whole ones or parts, with what was written under their names."""
    parts_on_disk.load(tensors, checkpoint_id=directory)


def optimizer_parts(state: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of an optimizer, as torch numbers its parameters, under one name for each tensor."""
    return {f"optimizer/{i}/{key}": value for i, values in state.items() for key, value in values.items()}


def read_optimizer(directory: Path, parameters: Sequence[nn.Parameter]) -> dict[int, dict[str, Tensor]]:
    """The state that was written for parameters of these numbers, in parts as theirs."""
    found: dict[int, dict[str, Tensor]] = {}
    for name in names_of_parts(directory):
        part, _, place = name.partition("/")
        if part == "optimizer":
            number, key = place.split("/")
            like = parameters[int(number)].detach()
            found.setdefault(int(number), {})[key] = torch.zeros(()) if key == "step" else torch.zeros_like(like)
    read_parts(optimizer_parts(found), directory)
    return found


def names_of_parts(directory: Path) -> list[str]:
    """The names that were written."""
    return list(parts_on_disk.FileSystemReader(directory).read_metadata().state_dict_metadata)
