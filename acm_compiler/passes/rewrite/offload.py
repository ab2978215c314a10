"""Places for what a conversion makes while it offloads: files mapped into memory, or the host memory of a GPU.

The system reads and writes the pages of such a file as they are used, and lets go of them where memory is short, so
forward and backward passes run unchanged. The files have no name: the disk has its room back when their tensors go, or
the process does, however it ends. What lies in host memory is brought to the GPU by `streaming`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from acm_compiler.files import folder_at, storing

# a tensor as it lies where it is offloaded to
Move = Callable[[Tensor], Tensor]
_MOVE: ContextVar[Move | None] = ContextVar("acm_compiler.offload", default=None)
# bytes below which a tensor stays where it is: files are mapped page by page, and a GPU has room for so little
_SMALL = 2**16
# attribute of a storage in host memory that is computed with elsewhere: the device
_STREAMED_TO = "acm_compiler_streamed_to"
# glibc: from this size on, memory that is freed goes back to the system at once, and never stays between small parts; a
# gigabyte of that is left by a hundred tensors of 8 MB. 32 MiB is where its own adaptation ends.
_THRESHOLD, _GIVEN_BACK, _ADAPTED = -3, 2**17, 2**25
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

    UsageError for what is no folder's path; StorageError for a folder that cannot be written.
    """
    if to is None:
        yield
        return
    folder = tempfile.gettempdir() if to == "disk" else os.fspath(folder_at(to))
    with storing(folder):
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    set_allocator = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    set_allocator(_THRESHOLD, _GIVEN_BACK)
    try:
        with placing(partial(_in_file, folder=folder)):
            yield
    finally:
        set_allocator(_THRESHOLD, _ADAPTED)


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


def _in_file(tensor: Tensor, *, folder: str) -> Tensor:
    """A copy of `tensor` in a file without a name, or the tensor itself where it stays."""
    return tensor if tensor.untyped_storage().filename is not None else _copied(tensor, folder)


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
    # the same order in memory: products take other paths for another one, and round otherwise
    stride = torch.empty_like(tensor, device="meta").stride()
    copied = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, stride)  # type: ignore[arg-type]
    return copied.copy_(tensor.detach())
