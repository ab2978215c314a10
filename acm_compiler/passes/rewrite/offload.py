"""Tensors in files: what a conversion makes, while it offloads, lies on the disk and is mapped into memory.

The system reads and writes the pages of such a file as they are used, and lets go of them where memory is short, so
forward and backward passes run unchanged. The files have no name: the disk has its room back when their tensors go, or
the process does, however it ends.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from acm_compiler.errors import UsageError
from acm_compiler.files import folder_at, storing

_FOLDER: ContextVar[str | None] = ContextVar("acm_compiler.offload", default=None)
# bytes below which a tensor stays in memory: files are mapped page by page
_SMALL = 2**16
# glibc: from this size on, memory that is freed goes back to the system at once, and never stays between small parts; a
# gigabyte of that is left by a hundred tensors of 8 MB. 32 MiB is where its own adaptation ends.
_THRESHOLD, _GIVEN_BACK, _ADAPTED = -3, 2**17, 2**25
_Kept = TypeVar("_Kept")


@contextmanager
def offloading(to: str | os.PathLike[str] | None) -> Iterator[None]:
    """Inside, `kept` writes files to this folder, for "disk" the system's own for temporary files; None: it does not.

    UsageError for what is no folder's path, and for "cpu"; StorageError for a folder that cannot be written.
    """
    if to is None:
        yield
        return
    if to == "cpu":
        raise UsageError(
            "weights on a GPU cannot be offloaded to the CPU's memory yet",
            found="offload='cpu'",
            expected="a folder, or 'disk' for the system's folder of temporary files",
            fix="calibrate on the CPU, with offload='disk'",
        )
    folder = tempfile.gettempdir() if to == "disk" else os.fspath(folder_at(to))
    with storing(folder):
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    token = _FOLDER.set(folder)
    set_allocator = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    set_allocator(_THRESHOLD, _GIVEN_BACK)
    try:
        yield
    finally:
        set_allocator(_THRESHOLD, _ADAPTED)
        _FOLDER.reset(token)


def kept(value: _Kept) -> _Kept:
    """`value`, while offloading with its tensors in files: a tensor, a module (in place), dataclasses, lists of these.

    Small tensors stay where they are, and so do those in such a file already, or not on the CPU. A tensor that is met
    twice stays one. StorageError where the disk is full.
    """
    folder = _FOLDER.get()
    return value if folder is None else cast(_Kept, _kept(value, folder, {}))


def _kept(value: Any, folder: str, met: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in met:
            met[id(value)] = _moved(value, folder)
        return met[id(value)]
    if isinstance(value, nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            tensor.data = _moved(tensor.data, folder)
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(_kept(part, folder, met) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changed = {name: new for name, part in parts.items() if (new := _kept(part, folder, met)) is not part}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _moved(tensor: Tensor, folder: str) -> Tensor:
    """A copy of `tensor` in a file without a name, or the tensor itself where it stays."""
    return tensor if tensor.untyped_storage().filename is not None else _copied(tensor, folder)


def file_copy(tensor: Tensor) -> Tensor:
    """A copy of `tensor` in a file while offloading; the tensor itself where it is small, or is not on the CPU."""
    folder = _FOLDER.get()
    return tensor if folder is None else _copied(tensor, folder)


def _copied(tensor: Tensor, folder: str) -> Tensor:
    size_bytes = tensor.numel() * tensor.element_size()
    if type(tensor) is not Tensor or tensor.device.type != "cpu" or size_bytes < _SMALL:
        return tensor
    with storing(folder), tempfile.TemporaryFile(dir=folder) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size_bytes)  # a full disk is an error here, and a crash later
        storage = torch.UntypedStorage.from_file(f"/dev/fd/{file.fileno()}", shared=True, nbytes=size_bytes)
    # the same order in memory: products take other paths for another one, and round otherwise
    stride = torch.empty_like(tensor, device="meta").stride()
    copied = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, stride)  # type: ignore[arg-type]
    return copied.copy_(tensor.detach())
