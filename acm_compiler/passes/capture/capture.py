"""Sees a live model as a graph: records one run, or exports it where that cannot be recorded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from acm_compiler.errors import CaptureFailed
from acm_compiler.passes.capture.export import capture_exported
from acm_compiler.passes.capture.global_state import EAGER
from acm_compiler.passes.capture.graph import Capture, ModuleCall, Signature, map_tensors, tensors
from acm_compiler.passes.capture.isolate import preserve_state
from acm_compiler.passes.capture.recorder import Recorder, UnseenTensor
from acm_compiler.sources.inputs import Inputs, call_model, split_inputs
from acm_compiler.sources.user_code import Attempt, first_line, raising_line, with_frames

__all__ = ["Capture", "ModuleCall", "Signature", "capture"]


def capture(model: nn.Module, example_inputs: Inputs) -> Capture:
    """The model's forward for `example_inputs`, in eval mode and without gradients, as a graph.

    Works without memory or compute for the model's tensors, which may be on `meta`; only where a value decides
    the control flow is the model really run. Model, inputs and random generators are left as they were.
    Raises CaptureFailed when the model raises with these inputs, or when it cannot be seen as a graph; UsageError for
    what is no inputs.
    """
    split_inputs(example_inputs)
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise CaptureFailed("the model has parameters without a shape", fix="run it once first, so that they get one")
    first = record(model, example_inputs, fake=True)
    if isinstance(first, Capture):
        return first
    error = first
    if not isinstance(error, UnseenTensor):
        if _on_meta(model):
            raise _meta_model_raises(error) from error
        second = record(model, example_inputs, fake=False)
        if isinstance(second, Capture):
            return second
        error = second
    if not isinstance(error, UnseenTensor) and (own := _plain_error(model, example_inputs)) is not None:
        raise _model_raises(own, "pass inputs that the model accepts when you call it") from own
    third = export(model, example_inputs)
    if isinstance(third, Capture):
        return third
    raise CaptureFailed(
        "the model cannot be seen as a graph",
        found=f"recording: {error}; exporting: {first_line(third)}",
        fix=_way_out(model),
    ) from error


def _way_out(model: nn.Module) -> str:
    """Advice for a model that cannot be captured."""
    scripted = [name for name, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        part = scripted[0] or "the model"
        return f"put the module that {part} was scripted from in its place: TorchScript hides what it runs"
    return "make the part named run through torch functions, or rewrite a part of the model without it"


def capture_again(model: nn.Module, inputs: Inputs, *, like: Capture) -> Capture | None:
    """A capture for other inputs, made as `like` was; None where it fails."""
    if like.method == "export":
        exported = export(model, inputs)
        return exported if isinstance(exported, Capture) else None
    for fake in (True, False):
        recorded = record(model, inputs, fake=fake)
        if isinstance(recorded, Capture):
            return recorded
    return None


def record(model: nn.Module, example_inputs: Inputs, *, fake: bool) -> Capture | BaseException:
    """A recording of the model's forward, or what was raised; `fake` runs without values, on fake tensors."""
    attempt = Attempt()
    with attempt, preserve_state(model) as owned, _recordable(model), torch.no_grad():
        names = _input_names(example_inputs)
        if not fake:
            recorder = Recorder(model, existing=owned)
            return recorder.run(map_tensors(example_inputs, _copy), names)
        with fake_mode() as mode:
            stand_in = _StandIn(mode, _pretended_device(model, example_inputs))
            recorder = Recorder(model, stand_in=stand_in)
            return recorder.run(map_tensors(example_inputs, stand_in.fresh), names)
    assert attempt.error is not None
    return attempt.error


def export(model: nn.Module, example_inputs: Inputs) -> Capture | BaseException:
    """The model as torch.export sees it, or what was raised."""
    attempt = Attempt()
    with attempt, preserve_state(model), _recordable(model), torch.no_grad():
        on_meta = _on_meta(model)
        return capture_exported(model, map_tensors(example_inputs, lambda t: t.to("meta") if on_meta else _copy(t)))
    assert attempt.error is not None
    return attempt.error


class _StandIn:
    """Fake tensors for real ones, one per tensor; those of a model on `meta` pretend to be on `device`."""

    def __init__(self, mode: Any, device: torch.device) -> None:
        self._mode, self._device = mode, device
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor):
            return tensor
        if id(tensor) not in self._known:
            # the real tensor is held too, so that its id stays its own
            self._known[id(tensor)] = (tensor, self.fresh(tensor))
        return self._known[id(tensor)][1]

    def fresh(self, tensor: Tensor) -> Tensor:
        """A fake tensor like `tensor`, a new one at each call."""
        if tensor.is_meta:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device)
        return self._mode.from_tensor(tensor.detach())


@contextlib.contextmanager
def fake_mode() -> Iterator[Any]:
    """A mode for fake tensors that does not log what it refuses: another attempt may follow, or our own error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.disabled = disabled


def _pretended_device(model: nn.Module, inputs: Inputs) -> torch.device:
    """Device that tensors on `meta` claim: that of the model's real tensors or of the inputs, else the CPU."""
    owned = (*model.parameters(), *model.buffers(), *tensors(inputs))
    return next((t.device for t in owned if not t.is_meta), torch.device("cpu"))


def _on_meta(model: nn.Module) -> bool:
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _input_names(inputs: Inputs) -> list[str]:
    """A placeholder name for each tensor of `inputs`: its argument's position or keyword."""
    args, kwargs = split_inputs(inputs)
    named = [*((f"arg{i}", value) for i, value in enumerate(args)), *kwargs.items()]
    return [name for name, value in named for _ in tensors(value)]


@contextlib.contextmanager
def _recordable(model: nn.Module) -> Iterator[None]:
    """Within it the model's attention and caches are of a kind that shows in a graph; `preserve_state` undoes it."""
    for module in model.modules():
        config: Any = module.__dict__.get("config")
        attention = getattr(config, "_attn_implementation", None)
        if attention is not None and attention not in ("eager", "sdpa"):
            config._attn_implementation = "sdpa" if getattr(module, "_supports_sdpa", False) else "eager"
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
    with EAGER.held():
        yield


def _plain_error(model: nn.Module, inputs: Inputs) -> BaseException | None:
    """The exception that the model itself raises with `inputs`, if any."""
    attempt = Attempt()
    with attempt, preserve_state(model), _recordable(model), torch.no_grad():
        call_model(model, map_tensors(inputs, _copy))
    return attempt.error


def _meta_model_raises(error: BaseException) -> CaptureFailed:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return CaptureFailed(
            "what the model runs depends on values, and tensors on `meta` have none",
            where=raising_line(error),
            found=first_line(error),
            fix="load the model with real weights",
        )
    return _model_raises(error, "pass inputs that the model accepts, or try it with real weights")


def _model_raises(error: BaseException, fix: str) -> CaptureFailed:
    return CaptureFailed(
        "the model itself raises with these example inputs",
        where=raising_line(error),
        found=first_line(error),
        fix=with_frames(fix, error),
    )
