"""Format aoti: a package of AOTInductor, which runs without Python.

For a CPU the operators of ACMs lie in a library beside it; for a GPU their Triton kernels are part of the package.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from acm_compiler.acm import ACM, gated_learners, ops
from acm_compiler.codegen import cpu, gpu
from acm_compiler.codegen.cpu.build import built_from, library_file
from acm_compiler.errors import UsageError, VerificationFailed
from acm_compiler.exporting.controls import asserted
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
_LOAD_LIBRARY = f'torch.ops.load_library("{LIBRARY}"); '
_INSTEAD = "format pt2 runs it, in Python"


def usage(traced: Traced) -> str:
    """Python code that loads and calls the package, which needs nothing of this one."""
    load = f'model = torch._inductor.aoti_load_package("{FILE}"); model({", ".join(traced.words)})'
    return f"import torch; {'' if traced.device.type == 'cuda' else _LOAD_LIBRARY}{load}"


def check_sites(found: Rewritten) -> None:
    """UsageError for a model with an ACM that a package cannot run, or with a meter, or on several devices."""
    home = next(iter(found.acms.values())).k_lo.device
    for name, acm in found.acms.items():
        device = acm.k_lo.device
        if device != home or device.type not in ("cpu", "cuda"):
            raise _refused(name, f"weights on {device}", "all on the CPU or on one GPU", "export model.cpu()")
        if reason := _not_covered(acm, device):
            kernel = "Triton kernels run" if device.type == "cuda" else "the native CPU kernel runs"
            raise _refused(name, reason, f"a site that {kernel}", _INSTEAD)
        if acm.counts is not None:
            raise _refused(name, "the counters of acm.meter", "a model without", "meter.stop() first, or format pt2")


def _not_covered(acm: ACM, device: torch.device) -> str | None:
    """Reason why no kernel of that device runs an ACM."""
    weights, gate = acm.learners.weights(), acm.gate.inner.weight
    dtypes = (weights.b_out.dtype, gate.dtype)
    facts: dict[str, Any] = {"act": weights.act, "dtype": dtypes[0], "is_quantized": weights.is_quantized}
    if device.type == "cpu":
        return cpu.not_covered(**facts) or cpu.gate_not_covered(dtypes)
    arch = gpu.machine_of(device).arch
    reason = gpu.not_covered(**facts, form=weights.form, shape=tuple(weights.w_in.shape), arch=arch)
    return reason or gpu.gate_not_covered(dtypes, width=gate.shape[0], arch=arch)


def _refused(where: str, found: str, expected: str, fix: str) -> UsageError:
    return UsageError("no package can hold this ACM", where=where, found=found, expected=expected, fix=fix)


def required(value: Tensor, holds: Tensor, message: str) -> Tensor:
    """A copy of `value`; RuntimeError with the value where `holds` is not true everywhere; on a GPU as `asserted`.

    An operator of the library: an assertion of torch, in a loop that threads share, would end the process.
    """
    if value.device.type != "cpu":
        return asserted(value, holds, message)
    load()
    return torch.ops.acm_package.require(value, holds, message, built=built_from())


def write(traced: Traced, aside: Path) -> None:
    """Write package and library into the folder `aside`. UsageError, with torch's reason, where there is no package.

    KernelUnavailable without a C++ compiler.
    """
    from torch._inductor import aoti_compile_and_package, config

    on_gpu = traced.device.type == "cuda"
    options: dict[str, Any] = {"freezing": False}
    if on_gpu:
        fuse(traced.program)
        # kernels are built while the model runs on the example inputs: those that torch draws mean nothing to a sort
        options["triton.autotune_at_compile_time"] = False
    else:
        with_packaged_operators(traced.program)
        options["cpp.dynamic_threads"] = True  # else the package had as many threads as this process
    with tempfile.TemporaryDirectory(dir=aside.parent) as scratch:  # torch leaves compiled weights in its cache
        refusal = refusing("AOTInductor makes no package of this model")
        with refusal, config.patch({"aot_inductor.output_path": scratch}):
            aoti_compile_and_package(traced.program, package_path=str(aside / FILE), inductor_configs=options)
    if on_gpu:
        check_launches(aside / FILE)
    else:
        write_file(aside / LIBRARY, library_file().read_bytes())


def check_launches(file: Path) -> None:
    """VerificationFailed for a package that asks Python for an operator of ACMs, where Triton built no kernel."""
    with zipfile.ZipFile(file) as package:
        asked = any(b"acm::" in package.read(name) for name in package.namelist() if name.endswith(".json"))
    if asked:
        raise VerificationFailed(
            "the package would need Python for an ACM that Triton built no kernel of",
            found="; ".join(sorted(set(gpu.UNBUILT.values()))) or "an operator acm::",
            fix=_INSTEAD,
        )


def runner(folder: Path) -> Callable[..., Any]:
    """The written package as a function of the call's arguments."""
    from torch._inductor import aoti_load_package

    if (folder / LIBRARY).exists():
        torch.ops.load_library(str(folder / LIBRARY))
    return aoti_load_package(str(folder / FILE))


def facts(traced: Traced) -> dict[str, Any]:
    """Entries of export.json beside the common ones: outputs in order, what its operators are of, and its processor."""
    if traced.device.type == "cuda":
        name, arch = torch.cuda.get_device_name(traced.device), gpu.machine_of(traced.device).arch
        return {"outputs": traced.outputs, "operators": "Triton kernels", "processor": f"{name}, sm_{arch}"}
    processor = torch.backends.cpu.get_cpu_capability()
    return {"outputs": traced.outputs, "operators": built_from(), "processor": processor}


def fuse(program: torch.export.ExportedProgram, *, norms: bool = False) -> None:
    """Make gates and bypasses part of their learners' operators, in place; of CPUs norms, too."""
    for module in _modules(program):
        fuse_residual(module.graph)
        fuse_gate(module.graph)
        if norms:
            fold_norm(module.graph)
        module.graph.eliminate_dead_code()
        module.recompile()


def with_packaged_operators(program: torch.export.ExportedProgram) -> None:
    """Give a program the library's operators for those of ACMs, in place; gates, norms and bypasses join them."""
    load()
    packaged: dict[Any, Any] = {}
    for name in _FAKES:
        operator = getattr(torch.ops.acm, name)
        packaged |= dict.fromkeys((operator, operator.default), getattr(torch.ops.acm_package, name).default)
    fuse(program, norms=True)
    for module in _modules(program):
        for node in module.graph.nodes:
            if node.target in packaged:
                node.target, node.kwargs = packaged[node.target], {**node.kwargs, "built": built_from()}
        module.recompile()


def _modules(program: torch.export.ExportedProgram) -> list[fx.GraphModule]:
    return [module for module in program.graph_module.modules() if isinstance(module, fx.GraphModule)]


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
