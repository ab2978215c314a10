"""Triton and `torch.cuda` made to believe in one GPU, by a CUDA driver that does nothing; tensors lie on the CPU.

Kernels are compiled for it, and Triton's own launcher starts them: the time of the host is that of a real launch, less
what the real driver takes.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _triton

from acm_compiler.acm import ops
from acm_compiler.codegen.gpu.stages import Machine, puts_fences

H200 = Machine(arch=90, processors=132, fenced=puts_fences())


def build_stub(folder: Path) -> Path:
    """The stub as libcuda.so.1 in that folder; subprocess.CalledProcessError where no C compiler works."""
    library = folder / "libcuda.so.1"
    source = Path(__file__).parent / "stub_driver.c"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


@contextlib.contextmanager
def faked_gpu(folder: Path) -> Iterator[ctypes.CDLL]:
    """While open, CPU tensors are taken for CUDA tensors by the operators' CUDA kernels; yields the stub.

    The process keeps the stub: it should do nothing else on a GPU afterwards.
    """
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    from acm_compiler.codegen import gpu
    from acm_compiler.codegen.gpu.calls import operators, traced
    from acm_compiler.codegen.gpu.calls.sites import run_site
    from acm_compiler.codegen.gpu.gradients import rule
    from acm_compiler.codegen.gpu.gradients import traced as traced_gradients

    with FakeTensorMode():  # torch looks for its own driver once, and should not find the stub
        torch.empty(1)
    stub = ctypes.CDLL(str(build_stub(folder)), mode=ctypes.RTLD_GLOBAL)
    stub.stub_launches.restype = ctypes.c_long
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", {"TRITON_LIBCUDA_PATH": str(folder)}))
        for name, value in {
            "is_available": lambda: False,  # torch itself must not ask the stub
            "current_device": lambda: -1,  # as tensors of the CPU have it
            "get_device_capability": lambda device=None: (9, 0),
            "set_device": lambda device: None,
            "device": lambda device: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: False,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        # as an H200 has them; torch 2.11 asks when it traces a launch
        stack.enter_context(mock.patch.object(_triton, "has_triton_tensor_descriptor_host_tma", lambda: True))
        driver = CudaDriver()
        driver.get_current_device = lambda: 0
        driver.get_current_stream = lambda device: 0
        driver.get_device_capability = lambda device: (9, 0)
        triton.runtime.driver.set_active(driver)
        stack.enter_context(mock.patch.object(gpu, "machine_of", lambda device: H200))
        stack.enter_context(mock.patch.object(gpu, "is_here", lambda: True))
        ops._ASKED.add("cpu")
        traced.register()
        traced_gradients.register()
        for name in ("learners", "gate", "gated_learners"):
            torch.library.impl(f"acm::{name}", "CPU", getattr(operators, name), lib=ops.LIBRARY)
        stack.enter_context(mock.patch.dict(ops.SITES, {"cpu": run_site}))
        stack.enter_context(mock.patch.dict(ops.DIFFERENTIATED))
        rule.register()
        ops.DIFFERENTIATED["cpu"] = ops.DIFFERENTIATED["cuda"]
        yield stub
