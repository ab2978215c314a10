"""One ACM as Inductor runs it on a GPU: its graph, its Python code, and the code's calls under the faked driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import _disable_current_modes

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import GatedArguments
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.gradients.operators import LEARNERS_BACKWARD, RELAXED, RELAXED_BACKWARD
from acm_compiler.acm.ops import LEARNERS
from acm_compiler.codegen.gpu.calls import traced
from acm_compiler.codegen.gpu.gradients import traced as traced_gradients

_FACTS = {"multi_processor_count": 132, "major": 9, "minor": 0, "warp_size": 32}


def gated_call(acm: ACM, x_TD: Tensor) -> tuple[GatedArguments, dict[str, Any]]:
    """The operator's call that a compiled pre-norm block makes: gate, learners and residual in one."""
    weights = acm.learners.weights()
    scalars, residual = (acm.knob, acm.k_lo, acm.k_hi), torch.zeros(len(x_TD), weights.b_out.shape[1], dtype=x_TD.dtype)
    call = GatedArguments(x_TD, *acm.gate.weights(), *scalars, *weights.tensors, residual)
    options = {"cost": acm.cost, "k_min": acm.k_min, "rule": acm.gate.rule}
    return call, options | {"form": weights.form, "act": weights.act}


def traced_graph(call: GatedArguments, options: dict[str, Any], *, is_free: bool = False) -> tuple[fx.GraphModule, Any]:
    """The graph that Inductor is given for a call on a GPU, and its shape environment; is_free: for any T."""

    class Whole(nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor]:
            rest = iter(given)
            return (GATED(*(None if tensor is None else next(rest) for tensor in call), **options),)

    with _fakes(call.x.shape[0], is_free=is_free) as (fake, environment):
        graph, _ = aot_export_module(
            Whole(), [fake(tensor) for tensor in call if tensor is not None], trace_joint=False
        )
    return graph, environment


def traced_step(acm: ACM, x_TD: Tensor, *, is_free: bool = False, k_min: int | None = None) -> fx.GraphModule:
    """Forward of an ACM's learners, and gradients of x and all weights, as Inductor is given them on a GPU.

    k_min: of a relaxed choice, whose gradient is there, too. By the operators themselves: autograd, which calls them in
    a compiled step, would look for the device.
    """
    weights, tokens = acm.learners.weights(), x_TD.shape[0]
    form: dict[str, Any] = {"form": weights.form, "act": weights.act}
    held = [tensor is not None for tensor in weights.tensors]
    names = ["x", "nu", *(name for name, tensor in weights.tensors._asdict().items() if tensor is not None)]
    choice = torch.zeros(tokens, dtype=torch.int32)
    if k_min is not None:
        choice = torch.zeros(tokens, acm.count + 1 - k_min)

    class Whole(nn.Module):
        def forward(self, dy: Tensor, x: Tensor, choice: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            rest = iter(given)
            tensors = [next(rest) if is_there else None for is_there in held]
            if k_min is None:
                y = LEARNERS(x, choice, *tensors, **form)
                return y, *LEARNERS_BACKWARD(dy, x, choice, *tensors, **form)
            y, *kept = RELAXED(x, choice, *tensors, k_min=k_min, **form)
            return y, *RELAXED_BACKWARD(dy, *kept, x, choice, *tensors, k_min=k_min, **form, wanted=names)

    with _fakes(tokens, is_free=is_free) as (fake, _):
        dy = torch.zeros(tokens, weights.b_out.shape[1], dtype=x_TD.dtype)
        given = [fake(tensor) for tensor in (dy, x_TD, choice, *weights.tensors) if tensor is not None]
        return aot_export_module(Whole(), given, trace_joint=False)[0]


@contextlib.contextmanager
def _fakes(tokens: int, *, is_free: bool) -> Iterator[tuple[Callable[[Tensor], Tensor], ShapeEnv]]:
    """While open, a graph of CUDA tensors may be traced: what makes them of others, and their shapes' environment."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        dynamic = [DimDynamic.STATIC] * tensor.ndim
        if is_free and tensor.ndim and tensor.shape[0] == tokens:
            dynamic[0] = DimDynamic.DYNAMIC
        context = StatelessSymbolicContext(dynamic_sizes=dynamic)
        with _disable_current_modes():  # in which detach, and what is made of it, would have a fixed shape
            made: Any = mode.from_tensor(tensor.detach(), symbolic_context=context)
        made.fake_device = torch.device("cuda", 0)
        return made

    def empty(tensor: Tensor | None, rows: int | None = None) -> Tensor | None:
        if tensor is None:
            return None
        return torch.empty(tuple(tensor.shape if rows is None else (rows, *tensor.shape[1:])), dtype=tensor.dtype)

    with contextlib.ExitStack() as stack:
        for module in (traced, traced_gradients):
            stack.enter_context(mock.patch.object(module, "empty", empty))
        stack.enter_context(mode)
        yield fake, environment


@contextlib.contextmanager
def _inductor_sees_a_gpu() -> Iterator[None]:
    from torch._inductor.runtime.hints import DeviceProperties

    facts = {"regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024}
    properties = DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, major=9, warp_size=32, **facts
    )
    nothing, zero = contextlib.nullcontext, lambda *_: 0
    answers = {
        "current_device": zero,
        "exchange_device": zero,
        "maybe_exchange_device": zero,
        "set_device": zero,
        "get_raw_stream": zero,
        "synchronize": zero,
        "get_compute_capability": lambda device=None: 90,
        "get_device_properties": lambda device=None: SimpleNamespace(**_FACTS),
    }
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (DeviceProperties, "create", lambda device: properties),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "_lazy_init", zero),
            (torch.cuda, "synchronize", zero),
            (torch.cuda, "_DeviceGuard", lambda device: nothing()),
            (torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(**_FACTS, gcnArchName="")),
            (CudaInterface, "device", lambda device: nothing()),
            (CudaInterface.Worker, "get_device_properties", lambda device=None: SimpleNamespace(**_FACTS)),
            *((CudaInterface, name, value) for name, value in answers.items()),
        ):
            stack.enter_context(mock.patch.object(owner, name, staticmethod(value)))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", zero, create=True))
        yield


def inductors_code(graph: fx.GraphModule, environment: Any) -> str:
    """The Python code that Inductor writes for the graph."""
    with _lowered(graph, environment) as lowering:
        code, _ = lowering.codegen()
    return code.value


def packages_code(graph: fx.GraphModule, environment: Any) -> str:
    """The C++ code that AOTInductor writes for the graph, with names of files for kernels that were not built."""
    from torch._inductor import config
    from torch._inductor.codecache import CudaKernelParamCache, get_cpp_wrapper_cubin_path_name
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def built(lowering: Any, code: Any, kernels: Any, inputs: Any, names: list[str]) -> None:
        for name in names:
            facts = {"mangled_name": name, "num_warps": 4, "shared_mem": 0, "config": {}}
            CudaKernelParamCache.cache[name] = facts | {get_cpp_wrapper_cubin_path_name(): f"{name}.cubin"}

    options = {"cpp_wrapper": True, "triton.autotune_at_compile_time": False, "triton.store_cubin": True}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(GraphLowering, "_run_jit_variant_for_autotune", built))
        stack.enter_context(config.patch(options))
        stack.enter_context(V.set_aot_compilation(True))
        lowering = stack.enter_context(_lowered(graph, environment, cpp_wrapper=True, aot_mode=True))
        code, _ = lowering.codegen_with_cpp_wrapper()
    return code.value


@contextlib.contextmanager
def _lowered(graph: fx.GraphModule, environment: Any, **options: bool) -> Iterator[Any]:
    """While open, code may be made of the graph, as for a GPU."""
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_post_grad_passes
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with _inductor_sees_a_gpu(), torch.no_grad(), V.set_fake_mode(values[0].fake_mode), config.patch(compile_threads=1):
        _recursive_post_grad_passes(graph, is_inference=True)
        lowering = GraphLowering(graph, example_inputs=values, shape_env=environment, is_inference=True, **options)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            lowering.run(*values)
            yield lowering


@contextlib.contextmanager
def loaded(code: str) -> Iterator[Callable[[list[Tensor]], Any]]:
    """The code's function, which takes a list of tensors that it empties; its buffers lie on the CPU."""
    from torch._inductor.codecache import PyCodeCache

    on_cpu = code.replace("guards._empty_strided_cuda", "guards._empty_strided_cpu")
    with _inductor_sees_a_gpu():
        module = PyCodeCache.load(on_cpu)
        yield module.runner.call if hasattr(module, "runner") else module.call
