"""Contenders: the dense model, a budget, or a controller's range; a server of its own for each that is sent to."""

from __future__ import annotations

import argparse
import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from acm_compiler.runs.given import Given
from acm_compiler.runs.opened import open_saved_run
from acm_compiler.serving.batcher import Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.open_served import ModelOptions, open_served
from acm_compiler.serving.served import Served
from acm_compiler.serving.server import ServerOptions, bind, serve, warm_up

BATCH = 32


def open_contender(directory: Path, contender: str, *, compiled: bool = False) -> Served:
    """`dense`, one budget such as `.4`, or a controller's range such as `.4:1`; compiled by Inductor or backend acm."""
    name, _, form = contender.partition("/")
    options = ModelOptions(device="cpu", compiled=compiled, quantized="int8" if form and name != "dense" else None)
    served = open_served(directory, Given(), options)
    if name == "dense":
        dense = open_saved_run(directory).dense
        assert dense is not None
        if form:
            dense = torch.ao.quantization.quantize_dynamic(dense, {torch.nn.Linear}, dtype=torch.qint8)
        served.model, served.found, served.use = dense.eval(), None, None
        served.call = torch.compile(dense, dynamic=True) if compiled else dense
    return served


def warm(served: Served, contender: str, slo_s: float, say: Callable[[str], None]) -> Callable[[], Controller]:
    """Run a contender, as a server does when it starts; gives a function that makes its controller."""
    low, _, high = contender.partition("/")[0].replace("dense", "1").partition(":")
    bounds = float(low), float(high or low)
    pace = warm_up(served, *bounds, BATCH, say)
    return lambda: Controller(copy.copy(pace), low=bounds[0], high=bounds[1], slo_s=slo_s)


def serve_one(options: argparse.Namespace, slo_s: float) -> None:
    """Serve a contender at a port of its own, until a signal."""
    served = open_contender(options.directory, options.serve, compiled=options.compile)
    controller = warm(served, options.serve, slo_s, print)()
    server = ServerOptions(max_body=1_000_000, max_inputs=16, limits=Limits(batch=BATCH))
    with bind("127.0.0.1", 0) as at:
        serve(served, controller, server, at, lambda text: print(text, flush=True))


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[dict[str, tuple[str, int]]]:
    """The address and the process of each contender's server."""
    command = [sys.executable, "-m", "benchmarks.serve_load", str(options.directory), "--slo", options.slo]
    command += ["--compile", "--serve"] if options.compile else ["--serve"]
    started, addresses = [], {}
    try:
        for contender in options.contenders.split(","):
            process = subprocess.Popen([*command, contender], stdout=subprocess.PIPE, text=True)
            started.append(process)
            assert process.stdout is not None
            found = None
            while found is None and (line := process.stdout.readline()):
                found = re.search(r"at (http://\S+);", line)
            assert found, f"{contender} does not serve"
            addresses[contender] = found[1], process.pid
        yield addresses
    finally:
        for process in started:
            process.terminate()
            process.communicate()
