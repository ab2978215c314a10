"""Weights in host memory, computed with on a GPU: each is copied there for one operator, and forgotten behind it.

A dispatch mode sees every operator, below autograd: what a backward pass needs of a weight is saved as the weight in
host memory, and is copied again. So a GPU holds activations, small tensors and one weight at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from acm_compiler.passes.rewrite.offload import at_home, hosted, placing, streamed_to

_HOST = torch.device("cpu")


def working_device(model: nn.Module) -> torch.device:
    """The device that streams a model's weights: its own, where that is none but the CPU the accelerator, if any."""
    own = {tensor.device for tensor in (*model.parameters(), *model.buffers())} - {_HOST}
    return next(iter(own), torch.accelerator.current_accelerator(check_available=True) or _HOST)


@contextmanager
def streaming(model: nn.Module) -> Iterator[None]:
    """Inside, the model's large tensors and all that is `kept` lie in host memory, small ones on the working device.

    At the end every tensor of the model goes back to where it was, and what is new in it to where most of it is.
    """
    device, homes = working_device(model), {id(tensor): tensor.device for tensor in _tensors(model)}
    new_home = device if device in homes.values() else _HOST
    try:
        for tensor in _tensors(model):
            tensor.data = hosted(tensor.data, device)
        with placing(lambda tensor: hosted(tensor, device)), _Streaming(device):
            yield
    finally:
        for tensor in _tensors(model):
            tensor.data = at_home(tensor.data, homes.get(id(tensor), new_home))


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def onto(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the working device, also where that is the CPU."""
    return tensor.to(device, copy=True)


class _Streaming(TorchDispatchMode):
    """Runs operators on tensors in host memory on the working device; those that write to such run in host memory."""

    takes_operators = True  # of this package, for `acm.ops`

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(
        self,
        operator: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        goes = None if _moves_by_itself(operator, kwargs) else self._mover(operator, args, kwargs)
        if goes is not None:
            args, kwargs = tree_map(goes, args), tree_map(goes, kwargs)
        return operator(*args, **kwargs)

    def _mover(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
        """Move an operand to where the operator runs; None where all are there."""
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = _written(operator, args, kwargs)
        if written and all(tensor.device == _HOST for tensor in written):
            return None if self.device == _HOST else _to_host
        if any(streamed_to(tensor) or tensor.device == self.device != _HOST for tensor in operands):
            return self._to_device
        return None

    def _to_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if streamed_to(value):
            return onto(value, self.device)
        return value.to(self.device) if value.dim() and value.device == _HOST else value


def _to_host(value: Any) -> Any:
    return value.to(_HOST) if isinstance(value, Tensor) and value.dim() else value


def _moves_by_itself(operator: Any, kwargs: Mapping[str, Any]) -> bool:
    """True of views, which move nothing, of copies, and of what says on which device it is to be."""
    return operator.is_view or operator.overloadpacket is torch.ops.aten.copy_ or kwargs.get("device") is not None


def _written(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Operands that the operator writes to."""
    if not operator._schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | dict(kwargs)
    names = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in names for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
