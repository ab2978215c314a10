"""Print microseconds of the processor per ACM in bfloat16: eager calls, and Inductor's code, of a ViT-B MLP; a step.

Launches go to a driver that does nothing, so the driver's own time, a microsecond or two each, is not in them.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import tabulate
import torch
import triton

from acm_compiler.acm import ACM
from acm_compiler.acm.learners import Gate, Learners
from benchmarks.host_time.driver import faked_gpu
from benchmarks.host_time.graph import gated_call, inductors_code, loaded, traced_graph

TOKENS = (1, 64, 1024, 1576)  # memory of more, of the CPU here, would take longer than launches
STEP = {"d_in": 64, "width": 256}  # narrow, so that memory takes no time; as many launches as any MLP
CALLS, ROUNDS = 300, 9
_TRIM, _MAP = -1, -3  # of mallopt


def mlp(d_in: int = 768, *, learners: int = 4, gate: int = 64, width: int = 768) -> ACM:
    """An ACM of a ViT-B MLP's shape, unless other sizes are given."""
    dtype = torch.bfloat16
    made = ACM(
        Gate(d_in, gate, learners + 1, dtype=dtype),
        Learners(d_in, d_in, learners, width, form="mlp", act="gelu", dtype=dtype),
        name="mlp",
        k_min=0,
        layout=None,
        cost=1.0,
        dropout=0.0,
    )
    made.gate.rule = "damage"
    made.set_choices(knob=0.0, k_lo=0, k_hi=learners)  # the gate's choice among all
    return made.eval()


def per_call_us(call: Callable[[], object]) -> float:
    """Median over rounds of the processor's microseconds per call, once all is built."""
    for _ in range(5):
        call()
    spent = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(CALLS):
            call()
        spent.append(1e6 * (time.process_time() - start) / CALLS)
    return sorted(spent)[ROUNDS // 2]


def step_of(acm: ACM, x_TD: torch.Tensor) -> Callable[[], None]:
    """Forward and backward with a frozen gate; gradients are given away, as an optimiser would."""
    acm.gate.requires_grad_(False)
    acm.train()
    x, dy, leaves = x_TD.requires_grad_(), torch.randn_like(x_TD), list(acm.learners.parameters())

    def step() -> None:
        with torch.enable_grad():
            acm(x).backward(dy)
        for leaf in (x, *leaves):
            leaf.grad = None

    return step


def keep_memory() -> None:
    """Make the C library keep what is freed, as the allocator of a GPU does."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for setting in (_TRIM, _MAP):
            library.mallopt(setting, 1 << 30)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    keep_memory()
    print(f"torch {torch.__version__}, triton {triton.__version__}; processor time, one thread")
    rows = []
    with tempfile.TemporaryDirectory() as folder, faked_gpu(Path(folder)) as stub, torch.no_grad():
        acm = mlp()
        for tokens in TOKENS:
            x = torch.randn(tokens, acm.d_in, dtype=torch.bfloat16)
            for _ in range(3):
                acm(x)
            before = stub.stub_launches()
            acm(x)
            rows.append(
                ["eager: gate, learners", tokens, stub.stub_launches() - before, per_call_us(lambda x=x: acm(x))]
            )
        for name, made in (("forward alone", lambda acm, x: lambda: acm(x)), ("forward and backward", step_of)):
            call = made(mlp(**STEP), torch.randn(1024, STEP["d_in"], dtype=torch.bfloat16))
            for _ in range(3):
                call()
            before = stub.stub_launches()
            call()
            rows.append([f"eager, narrow: {name}", 1024, stub.stub_launches() - before, per_call_us(call)])
        for tokens in TOKENS:
            call, options = gated_call(acm, torch.randn(tokens, acm.d_in, dtype=torch.bfloat16))
            given = [tensor for tensor in call if tensor is not None]
            with loaded(inductors_code(*traced_graph(call, options))) as run:
                run(list(given))
                before = stub.stub_launches()
                run(list(given))
                launches = stub.stub_launches() - before
                spent = per_call_us(lambda run=run, given=given: run(list(given)))
            rows.append(["Inductor: gate, learners, residual", tokens, launches, spent])
    print(tabulate.tabulate(rows, ["ACM", "tokens", "launches", "us"], floatfmt=".0f"))


if __name__ == "__main__":
    main()
