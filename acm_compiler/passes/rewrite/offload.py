"""Places for what a conversion makes while it offloads: files mapped into memory, or the host memory of a GPU.

The system reads and writes the pages of such a file as they are used, and lets go of them where memory is short, so
forward and backward passes run unchanged. The files have no name: the disk has its room back when their tensors go, or
the process does, however it ends.

Weights in host memory are copied to the GPU for one operator, and forgotten behind it (`streaming`): a dispatch mode
sees every operator, below autograd, so what a backward pass needs of a weight is saved as the weight in host memory,
and is copied again. So a GPU holds activations, small tensors and one weight at a time.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from acm_compiler.errors import UsageError
from acm_compiler.files import folder_at, storing
from acm_compiler.passes.rewrite import freed_memory

# a tensor as it lies where it is offloaded to
Move = Callable[[Tensor], Tensor]
_MOVE: ContextVar[Move | None] = ContextVar("acm_compiler.offload", default=None)
# bytes below which a tensor stays where it is: files are mapped page by page, and a GPU has room for so little
_SMALL = 2**16
# attribute of a storage in host memory that is computed with elsewhere: the device
_STREAMED_TO = "acm_compiler_streamed_to"
_HOST = torch.device("cpu")
# Linux's MADV_DONTNEED: pages of a shared file leave the process, and the file keeps what was written to them
_UNMAPPED = 4
# attribute of a storage whose file was made here: others may be mapped so that what is written to them is in no file
_OWN_FILE = "acm_compiler_own_file"
_Kept = TypeVar("_Kept")


@contextmanager
def placing(move: Move) -> Iterator[None]:
    """Inside, `kept` moves tensors in this way."""
    token = _MOVE.set(move)
    try:
        yield
    finally:
        _MOVE.reset(token)


@contextmanager
def offloading(to: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside, `kept` writes files to this folder, for "disk" the system's own for temporary files; None: it does not.

    UsageError for what is no folder's path, or a device's name; StorageError for a folder that cannot be written.
    """
    if to is None:
        yield
        return
    if _names_device(to):
        raise UsageError("offload must be a place for tensors", found=repr(to), expected="'disk', a folder, or 'cpu'")
    folder = tempfile.gettempdir() if to == "disk" else os.fspath(folder_at(to))
    with storing(folder):
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    try:
        with placing(_Files(folder)):
            trim()
            yield
    finally:
        freed_memory.hold(activations=True)


def _names_device(to: str | os.PathLike[str]) -> bool:
    """True for what torch takes for a device: nobody means a folder of that name."""
    try:
        torch.device(str(to))
    except RuntimeError:
        return False
    return True


def kept(value: _Kept) -> _Kept:
    """`value`, while offloading with its tensors where they go: a tensor, a module (in place), dataclasses, lists.

    Small tensors stay where they are, and so do those that lie there already. A tensor that is met twice stays one.
    StorageError where the disk is full.
    """
    move = _MOVE.get()
    return value if move is None else cast(_Kept, _kept(value, move, {}))


def _kept(value: Any, move: Move, met: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in met:
            met[id(value)] = move(value)
        return met[id(value)]
    if isinstance(value, nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            tensor.data = move(tensor.data)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_kept(part, move, met) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, part in parts.items() if (new := _kept(part, move, met)) is not part}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _is_large(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.numel() * tensor.element_size() >= _SMALL


def hosted(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` in host memory, to be computed with on `device`; there, in whole, where it is small."""
    if not _is_large(tensor):
        return tensor.to(device)
    tensor = tensor.to("cpu")
    setattr(tensor.untyped_storage(), _STREAMED_TO, device)
    return tensor


def at_home(tensor: Tensor, home: torch.device) -> Tensor:
    """`tensor` on `home`, where it is computed with from now on."""
    storage = tensor.untyped_storage()
    if hasattr(storage, _STREAMED_TO):
        delattr(storage, _STREAMED_TO)
    return tensor.to(home)


def streamed_to(tensor: Tensor) -> torch.device | None:
    """The device on which a tensor in host memory is computed with; None where that is its own."""
    return getattr(tensor.untyped_storage(), _STREAMED_TO, None)


def device_of(tensor: Tensor) -> torch.device:
    """The device on which a tensor is computed with."""
    return streamed_to(tensor) or tensor.device


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """Copies of tensors in files without a name in `folder`, or the tensors themselves where they stay."""

    folder: str

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage().filename is not None else _copied(tensor, self.folder)


def file_copy(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in a file while offloading; the tensor itself where it is small, or is not on the CPU."""
    if _MOVE.get() is None:
        return tensor
    return kept(tensor if tensor.untyped_storage().filename is None else tensor.clone())


def _copied(tensor: Tensor, folder: str) -> Tensor:
    if tensor.device.type != "cpu" or not _is_large(tensor):
        return tensor
    size_bytes = tensor.numel() * tensor.element_size()
    with storing(folder), tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)  # a full disk is an error here, and a crash later
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=size_bytes)
    setattr(storage, _OWN_FILE, True)
    # the same order in memory: products take other paths for another one, and round otherwise
    stride = torch.empty_like(tensor, device="meta").stride()
    copied = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, stride)  # type: ignore[arg-type]
    copied.copy_(tensor.detach())
    let_go(copied)
    return copied


def let_go(value: Any) -> None:
    """Give back the memory of tensors that `kept` put into files: they have it again as they are used."""
    if _MOVE.get() is not None and sys.platform.startswith("linux"):
        _kept(value, _unmapped, {})


def trim(*, hold: bool = False) -> None:
    """Give what was freed back to the system, while offloading; `hold` what is freed from now on, until the next call.

    hold: what follows keeps little of what it allocates.
    """
    if (move := _MOVE.get()) is None:
        return
    if isinstance(move, _Files):
        freed_memory.hold(activations=hold)
    freed_memory.give_back()


def _unmapped(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if hasattr(storage, _OWN_FILE):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), _UNMAPPED)
    return tensor


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
