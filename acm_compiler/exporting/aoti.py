"""Format aoti: a package of AOTInductor for CPUs, and the operators of ACMs in a library, which run without Python."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from acm_compiler.acm import gated_learners, ops
from acm_compiler.codegen.cpu import gate_not_covered, not_covered
from acm_compiler.codegen.cpu.build import built_from, library_file
from acm_compiler.errors import UsageError
from acm_compiler.exporting.traced import Traced, refusing
from acm_compiler.files import write_file
from acm_compiler.passes.lower.fold_norm import fold_norm
from acm_compiler.passes.lower.fuse_gate import fuse_gate
from acm_compiler.passes.lower.fuse_residual import fuse_residual
from acm_compiler.passes.rewrite.conversion import Rewritten

FILE, LIBRARY = "package.pt2", "acm_operators.so"
_NAMESPACE = "acm_package"
_FAKES: dict[str, Callable[..., Any]] = {
    "learners": ops.fake_learners,
    "gate": ops.fake_gate,
    "gated_learners": gated_learners.fake_gated,
}
_INSTEAD = "format pt2 runs it, in Python"


def usage(traced: Traced) -> str:
    """Python code that loads and calls the package, which needs nothing of this one."""
    load = f'torch.ops.load_library("{LIBRARY}"); model = torch._inductor.aoti_load_package("{FILE}")'
    return f"import torch; {load}; model({', '.join(traced.words)})"


def check_sites(found: Rewritten) -> None:
    """UsageError for a model with an ACM that the operators of the library do not run, or with a meter."""
    for name, acm in found.acms.items():
        weights = acm.learners.weights()
        if weights.b_out.device.type != "cpu":
            raise _refused(name, f"weights on {weights.b_out.device}", "packages are for CPUs", "export model.cpu()")
        reason = not_covered(act=weights.act, dtype=weights.b_out.dtype, is_quantized=weights.is_quantized)
        if reason := reason or gate_not_covered({weights.b_out.dtype, acm.gate.inner.weight.dtype}):
            raise _refused(name, reason, "a site that the native CPU kernel runs", _INSTEAD)
        if acm.counts is not None:
            raise _refused(name, "the counters of acm.meter", "a model without", "meter.stop() first, or format pt2")


def _refused(where: str, found: str, expected: str, fix: str) -> UsageError:
    return UsageError("no package can hold this ACM", where=where, found=found, expected=expected, fix=fix)


def required(value: Tensor, holds: Tensor, message: str) -> Tensor:
    """A copy of `value`; RuntimeError with the value where `holds` is not true everywhere.

    An operator of the library: an assertion of torch, in a loop that threads share, would end the process.
    """
    load()
    return torch.ops.acm_package.require(value, holds, message, built=built_from())


def write(traced: Traced, aside: Path) -> None:
    """Write package and library into the folder `aside`. UsageError, with torch's reason, where there is no package.

    KernelUnavailable without a C++ compiler.
    """
    from torch._inductor import aoti_compile_and_package, config

    with_packaged_operators(traced.program)
    with tempfile.TemporaryDirectory(dir=aside.parent) as scratch:  # torch leaves compiled weights in its cache
        # else the package had as many threads as this process
        options = {"cpp.dynamic_threads": True, "freezing": False}
        refusal = refusing("AOTInductor makes no package of this model")
        with refusal, config.patch({"aot_inductor.output_path": scratch}):
            aoti_compile_and_package(traced.program, package_path=str(aside / FILE), inductor_configs=options)
    write_file(aside / LIBRARY, library_file().read_bytes())


def runner(folder: Path) -> Callable[..., Any]:
    """The written package as a function of the call's arguments."""
    from torch._inductor import aoti_load_package

    torch.ops.load_library(str(folder / LIBRARY))
    return aoti_load_package(str(folder / FILE))


def facts(traced: Traced) -> dict[str, Any]:
    """Entries of export.json beside the common ones: outputs in order, sources of the library, and its processor."""
    processor = torch.backends.cpu.get_cpu_capability()
    return {"outputs": traced.outputs, "operators": built_from(), "processor": processor}


def with_packaged_operators(program: torch.export.ExportedProgram) -> None:
    """Give a program the library's operators for those of ACMs, in place; gates, norms and bypasses join them."""
    load()
    packaged: dict[Any, Any] = {}
    for name in _FAKES:
        operator = getattr(torch.ops.acm, name)
        packaged |= dict.fromkeys((operator, operator.default), getattr(torch.ops.acm_package, name).default)
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            fuse_residual(module.graph)
            fuse_gate(module.graph)
            fold_norm(module.graph)
            for node in module.graph.nodes:
                if node.target in packaged:
                    node.target, node.kwargs = packaged[node.target], {**node.kwargs, "built": built_from()}
            module.graph.eliminate_dead_code()
            module.recompile()


@cache
def load() -> torch.library.Library:
    """Load the library, and tell torch the shapes of what its operators return, which needs them to compile calls."""
    torch.ops.load_library(str(library_file()))
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    for name, fake in {**_FAKES, "require": lambda value, holds, message: torch.empty_like(value)}.items():
        torch.library.register_fake(f"{_NAMESPACE}::{name}", _without_version(fake), lib=library)
    return library


def _without_version(fake: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, built, **options: fake(*tensors, **options)
