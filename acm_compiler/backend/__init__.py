"""`torch.compile(model, backend="acm")`: found through the package's entry point, without importing anything first.

One page: options, passes over the ACMs of the graph, which implementation runs each of them, Inductor for the rest.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, get_origin

import torch
from torch import fx

from acm_compiler import env
from acm_compiler.acm import ops
from acm_compiler.acm.context import keep_graph_order
from acm_compiler.acm.steps import STEPS
from acm_compiler.codegen import cpu
from acm_compiler.errors import AcmError, KernelUnavailable, UsageError, counted, did_you_mean
from acm_compiler.files import dump
from acm_compiler.passes.lower.acm_nodes import GATED, acm_nodes, learners_nodes
from acm_compiler.passes.lower.bfloat16_attention import bfloat16_attention
from acm_compiler.passes.lower.drop_stand_ins import drop_stand_ins
from acm_compiler.passes.lower.fold_norm import fold_norm
from acm_compiler.passes.lower.fuse_gate import fuse_gate
from acm_compiler.passes.lower.fuse_residual import fuse_residual
from acm_compiler.passes.lower.join_calls import join_calls
from acm_compiler.passes.lower.merge_gates import merge_gates
from acm_compiler.passes.lower.verify import Call, Lowered, verify

OPTIONS: dict[str, tuple[Any, ...]] = {
    "fallback": ("warn", "silent", "error"),
    "fuse_residual": (True, False),
    "merge_gates": (True, False),
    "fuse_gate": (True, False),
    "fold_norm": (True, False),
    "bfloat16_attention": (False, True),
    "join_calls": (True, False),
}
"""Our options, their values, the default first; every other option is Inductor's."""

_PASSES: dict[str, Callable[[fx.Graph], int]] = {
    "merge_gates": merge_gates,
    "fuse_residual": fuse_residual,
    "fuse_gate": fuse_gate,
    "fold_norm": fold_norm,
    "bfloat16_attention": bfloat16_attention,
}
_INFERENCE_ALONE = (fuse_gate, bfloat16_attention)
_UNASKED = {"size_asserts": False, "alignment_asserts": False}
"""Options of Inductor for graphs of joined calls: what it would check of each tensor at each call, guards have."""
_LOG = logging.getLogger("acm_compiler.backend")


def acm_backend(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile one Dynamo graph.

    `mode` and `options` are Inductor's, plus `fallback` ("warn", "silent", "error": what to do about an ACM that no
    kernel covers, and where Inductor has no C++ compiler: then the graph runs uncompiled) and one switch per pass.
    UsageError for an unknown option or value, KernelUnavailable under `fallback="error"`: at the first call, as Dynamo
    does not ask a backend before.
    """
    try:
        return _compile(graph_module, example_inputs, mode, options or {})
    except AcmError as error:
        raise _past_dynamo(error) from None


def _compile(graph_module: fx.GraphModule, example_inputs: list[Any], mode: str | None, options: dict[str, Any]) -> Any:
    # dynamo and inductor take seconds to import and are there already when torch.compile calls
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    own, patches = split_options(options, torch._inductor.list_options())
    _require_types(patches)
    if mode:
        known = list(torch._inductor.list_mode_options())
        if mode not in known:
            what = f"unknown mode {mode!r} of backend 'acm'{did_you_mean(mode, known)}"
            raise UsageError(what, expected=" | ".join(known))
        patches = {**torch._inductor.list_mode_options(mode), **patches}
    lowered = lower(graph_module, own)
    keep_graph_order()
    _announce(lowered, own["fallback"])
    if lowered and patches.get("freezing", torch._inductor.config.freezing) and not torch.is_grad_enabled():
        _announce_freezing(any(True for _ in graph_module.parameters()))
    head = f"# {counted(len(lowered), 'ACM')}, by the passes of backend 'acm'"
    dump("40_lowered.py", lambda: f"{head}\n{graph_module.code}")
    if any(node.target is STEPS for node in graph_module.graph.nodes):
        patches = {**_UNASKED, **patches}
    if _lacks_compiler(example_inputs, patches, own["fallback"]):
        return graph_module.forward
    return compile_fx(graph_module, example_inputs, config_patches=patches)


def _past_dynamo(error: AcmError) -> AcmError:
    """The same error as one that Dynamo passes on as it is, instead of wrapping it; the traceback begins here."""
    from torch._dynamo.exc import ShortenTraceback

    kind: Any = type(type(error).__name__, (type(error), ShortenTraceback), {"__module__": type(error).__module__})
    plain = kind.__new__(kind)
    frame = inspect.currentframe()
    ShortenTraceback.__init__(plain, first_useful_frame=frame and frame.f_back)
    plain.args = error.args
    plain.__dict__.update(error.__dict__)
    return plain.with_traceback(error.__traceback__)


def lower(graph_module: fx.GraphModule, own: dict[str, Any]) -> tuple[Lowered, ...]:
    """Run the passes in place; what became of every ACM, first of those in the bodies of regions.

    Regions are those of `nested_compile_region`, which share a body where they are alike, and of checkpoints.
    """
    bodies = [child for child in graph_module.children() if isinstance(child, fx.GraphModule)]
    return (*(acm for body in bodies for acm in lower(body, own)), *_lower_own(graph_module, own))


def _lower_own(graph_module: fx.GraphModule, own: dict[str, Any]) -> tuple[Lowered, ...]:
    graph = graph_module.graph
    count = len(learners_nodes(graph))
    if not count:
        return ()
    _LOG.debug("stand-ins dropped: %d", drop_stand_ins(graph))
    for name, rewrite in _PASSES.items():
        if own[name] and not (rewrite in _INFERENCE_ALONE and torch.is_grad_enabled()):
            _LOG.debug("%s: %d", name, rewrite(graph))
    lowered = verify(graph, choose_implementation, expected=count)
    if own["join_calls"] and not torch.is_grad_enabled():
        nodes = zip(acm_nodes(graph), lowered, strict=True)
        native = [node for node, acm in nodes if node.target in GATED and acm.implementation == "cpu"]
        _LOG.debug("join_calls: %d", join_calls(graph, native))
    graph_module.recompile()
    return lowered


def choose_implementation(call: Call) -> tuple[str, str | None]:
    """The implementation that runs such an ACM, and, for the reference, the reason."""
    chosen = env.kernel()
    if chosen == "reference":
        return "reference", f"{env.KERNEL}=reference"
    ops.load_kernels(call.device)
    if not ops.has_kernels(call.device):
        return "reference", f"no kernels for device {call.device} are loaded"
    if call.device == "cpu":
        kernel, reason = "cpu", cpu.not_covered(act=call.act, dtype=call.dtype, is_quantized=call.is_quantized)
        gate_reason = call.gate and cpu.gate_not_covered((call.dtype, call.gate.dtype))
    else:
        from acm_compiler.codegen import gpu

        kernel, arch = "triton", gpu.current_machine().arch
        reason = gpu.not_covered(
            form=call.form, act=call.act, dtype=call.dtype, shape=call.shape, arch=arch, is_quantized=call.is_quantized
        )
        gate_reason = call.gate and gpu.gate_not_covered(
            (call.dtype, call.gate.dtype), width=call.gate.width, arch=arch
        )
    if reason is not None:
        return "reference", reason
    return (kernel, None) if gate_reason is None else (f"{kernel}, gate by reference", f"its gate: {gate_reason}")


def split_options(options: dict[str, Any], inductors: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our options with their defaults, and Inductor's. UsageError for a name or a value that neither has."""
    own = {name: values[0] for name, values in OPTIONS.items()}
    others = {}
    for name, value in options.items():
        plain = name.replace("-", "_")
        if plain not in OPTIONS:
            others[_known(plain, name, [*OPTIONS, *inductors])] = value
            continue
        if value not in OPTIONS[plain]:
            expected = " | ".join(str(choice) for choice in OPTIONS[plain])
            hint = did_you_mean(str(value), [str(choice) for choice in OPTIONS[plain]])
            raise UsageError(f"option {plain!r}: no such value{hint}", found=repr(value), expected=expected)
        own[plain] = value
    return own, others


def _require_types(patches: dict[str, Any]) -> None:
    """Refuse values of Inductor's options that Inductor would refuse; compile_fx does not look."""
    from torch._inductor import config

    for name, value in patches.items():
        kind = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(kind) is None and not isinstance(value, kind):
            raise UsageError(f"option {name!r} of Inductor: no such value", found=repr(value), expected=kind.__name__)


def _known(plain: str, name: str, known: list[str]) -> str:
    if plain not in known:
        raise UsageError(
            f"unknown option {name!r} of backend 'acm'{did_you_mean(plain, known)}",
            expected=f"options of torch.compile such as {', '.join(known[:3])}",
        )
    return plain


def _lacks_compiler(example_inputs: list[Any], patches: dict[str, Any], fallback: str) -> bool:
    """True if Inductor lacks the C++ compiler that this graph needs; logged once per graph."""
    from torch._inductor import config, cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    if not any(isinstance(value, torch.Tensor) and value.device.type == "cpu" for value in example_inputs):
        return False
    try:
        with config.patch(patches):
            cpp_builder.get_cpp_compiler()
    except InvalidCxxCompiler as error:
        if fallback == "error":
            fix = 'install g++ or clang++, or name one by CXX; options={"fallback": "warn"} runs the graph uncompiled'
            raise KernelUnavailable("Inductor has no C++ compiler", found=str(error), fix=fix) from None
        level = logging.WARNING if fallback == "warn" else logging.INFO
        _LOG.log(level, "Inductor has no C++ compiler (%s): the graph runs uncompiled", error)
        return True
    return False


def _announce_freezing(frozen: bool) -> None:
    if frozen:
        _LOG.info("frozen graph: it keeps the budget or k set now, and another one compiles another graph")
        return
    _LOG.warning("nothing was frozen: for Dynamo options= comes too late; set torch._inductor.config.freezing = True")


def _announce(lowered: tuple[Lowered, ...], fallback: str) -> None:
    if not lowered:
        what = "graph without ACMs, or on a GPU with one k for all tokens, compiled by Inductor as it is"
        _LOG.info("%s; acm.rewrite(model, acm.plan(model, x)) makes ACMs", what)
        return
    behind = [acm for acm in lowered if acm.reason is not None]
    kernels = len(lowered) - len(behind)
    acms = counted(len(lowered), "ACM")
    _LOG.info("graph with %s: %d by kernels, %d wholly or in part by the reference", acms, kernels, len(behind))
    asked = env.kernel() == "reference"
    for acm in behind:
        if fallback == "error" and not asked:
            raise KernelUnavailable(
                "no kernel covers this ACM or its gate",
                where=f"{acm.site} ({acm.line or 'line unknown'})",
                found=acm.reason,
                fix='compile with options={"fallback": "warn"} to run it on plain torch operations',
            )
        level = logging.WARNING if fallback == "warn" and not asked else logging.INFO
        _LOG.log(level, "%s (%s) runs on %s: %s", acm.site, acm.line or "line unknown", acm.implementation, acm.reason)
