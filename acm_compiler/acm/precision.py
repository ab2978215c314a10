"""Number types: float64 for closed forms where a device has it, no autocast around them; bfloat16 to read a model fast.

Apple's mps and some XPUs have no float64; there the CPU holds what needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Precision = Literal["fp32", "bf16", "fp16"]
# calls with fewer rows gain nothing from bfloat16, as their weight is rounded in each
_ROWS = 64


def float64_device(device: torch.device) -> torch.device:
    """The device of float64 tensors for data on `device`."""
    return device if device.type in ("cpu", "cuda", "meta") else torch.device("cpu")


def to_float64(tensor: Tensor) -> Tensor:
    """`tensor` in float64, on `float64_device` of its own."""
    # two steps: mps refuses to copy to the CPU and into float64 at once
    return tensor.to(float64_device(tensor.device)).double()


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type that autocast computes in on `device`; None where it is off, and on the meta device, which has none."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def is_fast_in_bfloat16(device: torch.device) -> bool:
    """True where products of bfloat16 have instructions of their own: GPUs, and CPUs with AMX or AVX-512 for it."""
    known = torch.cpu.get_capabilities() if device.type == "cpu" else {"avx512_bf16": device.type == "cuda"}
    return bool(known.get("amx_bf16") or known.get("avx512_bf16"))


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is off inside for tensors on `device`."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


@contextmanager
def no_autocast() -> Iterator[None]:
    """Autocast is off inside, on the CPU, where float64 may live, and on the accelerator, if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    with ExitStack() as off:
        for kind in ("cpu",) if accelerator is None else ("cpu", accelerator.type):
            off.enter_context(torch.autocast(kind, enabled=False))
        yield


class FastLinears(TorchFunctionMode):
    """Inside, `F.linear` on float32 of the CPU rounds what it multiplies to bfloat16, forward and backward.

    Numbers in memory and sums stay float32. Only for weights that were not computed on the way: those have gradients of
    their own. Does nothing on processors without instructions for bfloat16. oneDNN rounds for AMX alone: with other
    instructions outputs are rounded, too, in calls without gradients and in backward passes; a forward that gradients
    follow stays exact, since they tell far more of what it rounds. `exactly` suspends it.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is F.linear and not kwargs and _gains(*args):
            if torch.is_grad_enabled():
                return _Linear.apply(*args)
            return _rounded(F.linear, *args) if _has_tiles() else _in_bfloat16(F.linear, *args)
        return function(*args, **(kwargs or {}))


@contextmanager
def exactly() -> Iterator[None]:
    """Products inside are those of their own types again."""
    with torch._C.DisableTorchFunction():
        yield


def _gains(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = [weight] if bias is None else [weight, bias]
    return (
        all(t.device.type == "cpu" and t.dtype is torch.float32 for t in (x, *given))
        and all(t.is_leaf for t in given)
        and x.numel() >= _ROWS * x.shape[-1]
        and is_fast_in_bfloat16(x.device)
    )


class _Linear(torch.autograd.Function):
    """x [..., D] W [O, D] + b [O]; has no gradient but that of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.weight = weight
        return _rounded(F.linear, x, weight, bias) if _has_tiles() else F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        product = _rounded if _has_tiles() else _in_bfloat16
        return product(torch.matmul, grads[0], ctx.weight), None, None


def _has_tiles() -> bool:
    """True on processors with AMX."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _in_bfloat16(product: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    """The product of operands, and with an output, that are rounded to bfloat16, in float32."""
    return product(*(None if operand is None else operand.bfloat16() for operand in operands)).float()


def _rounded(product: Callable[..., Tensor], *operands: Tensor | None) -> Tensor:
    """The product of float32 operands, rounded to bfloat16 by oneDNN; torch's own setting holds again afterwards."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return product(*operands)
    finally:
        matmul.fp32_precision = before
