"""The server's process: a port, a model that has run once, and an orderly end."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch
import uvicorn

from acm_compiler.errors import UsageError
from acm_compiler.progress import Say
from acm_compiler.runs.folder import load_measured
from acm_compiler.runs.given import Given
from acm_compiler.runs.opened import saved_recipe
from acm_compiler.serving.app import create_app
from acm_compiler.serving.batcher import Batcher, Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.metrics import Metrics
from acm_compiler.serving.open_served import ModelOptions, budget_range, open_served
from acm_compiler.serving.pace import Pace, measure_pace
from acm_compiler.serving.recalibration import Recalibration
from acm_compiler.serving.served import Served

_BACKLOG = 2048
# seconds after which an idle connection is closed: longer than clients keep theirs, or a request may meet its end
_IDLE_S = 75
# seconds for which one thread keeps the interpreter from another that wants it: a batch is many small steps, each of
# which would wait Python's 5 ms while requests are read and answers written
_TURN_S = 1e-4
# batches by which the pace is measured: tokens of a text, examples, repetitions
_TEXT, _MANY, _TIMES = 32, 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits of a server: bytes of a body, inputs of a request, those of batches.

    recalibrate: whether, and when, the budget table is measured anew; None: never, and no input is kept for it.
    """

    max_body: int
    max_inputs: int
    limits: Limits
    recalibrate: Literal["asked", "drift"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of a controller: an objective, budgets such as .25:1, the loss that is allowed."""

    slo_s: float | None = None
    budgets: str | None = None
    max_loss: float | None = None


def bind(host: str, port: int) -> socket.socket:
    """The socket to listen on. UsageError where it is taken or no address of this machine."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        found = getattr(error, "strerror", None) or str(error)
        fix = "stop what listens there, or name another port: --port 8001"
        raise UsageError("the server cannot listen there", where=f"{host}:{port}", found=found, fix=fix) from error


class _Server(uvicorn.Server):
    """A uvicorn server that refuses requests from the first signal on."""

    def __init__(self, config: uvicorn.Config, refuse: Callable[[], None]) -> None:
        super().__init__(config)
        self._refuse = refuse

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop."""
        self._refuse()
        super().handle_exit(sig, frame)


def open_and_serve(
    directory: Path,
    given: Given,
    options: ModelOptions,
    bounds: Bounds,
    server: ServerOptions,
    at: socket.socket,
    say: Say,
) -> None:
    """Open a folder, run the model once, serve it."""
    served = open_served(directory, given, options)
    evaluation = load_measured(directory, given, saved_recipe(directory))
    found = budget_range(served, evaluation, bounds.budgets, bounds.max_loss, slo=bounds.slo_s is not None)
    drop_wrong_names(served, found.high, say)
    pace = warm_up(served, found.low, found.high, server.limits.batch, say)
    controller = Controller(pace, low=found.low, high=found.high, slo_s=bounds.slo_s)
    say(f"budget {found.high:.3g}" + (f" to {found.low:.3g}, {found.why}" if bounds.slo_s else ""))
    serve(served, controller, server, at, say)


def serve(served: Served, controller: Controller, options: ServerOptions, at: socket.socket, say: Say) -> None:
    """Serve until a signal comes, then finish what was taken."""
    metrics = Metrics()
    batcher = Batcher(served.run, controller, options.limits, metrics, cells=served.reader.cells)
    recalibration = None
    if options.recalibrate is not None:
        by_itself = options.recalibrate == "drift"
        recalibration = Recalibration(served, is_busy=lambda: batcher.waiting > 0, by_itself=by_itself)
    bounds: dict[str, int] = {"max_body": options.max_body, "max_inputs": options.max_inputs}
    app = create_app(served, batcher, metrics, **bounds, recalibration=recalibration)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_keep_alive=_IDLE_S)
    host, port = at.getsockname()[:2]
    say(f"serving {served.name} at http://{f'[{host}]' if ':' in host else host}:{port}; Ctrl-C ends it")
    turn = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # the signal, raised again once all is done
            _Server(config, batcher.refuse).run(sockets=[at])
    finally:
        sys.setswitchinterval(turn)
    say("stopped: every accepted request is answered")


def drop_wrong_names(served: Served, budget: float, say: Say) -> None:
    """Leave out names of classes, in a row from 0, that are not as many as the model's classes: they are of others."""
    names = served.classes
    if served.kind == "classify" and names and set(names) == set(range(len(names))):
        (logits,) = served.run([served.reader.sample()], [None], budget)
        if len(logits) != len(names):
            served.classes = {}
            say(f"classes are numbers: {len(names)} names for the model's {len(logits)}")


def warm_up(served: Served, low: float, high: float, most: int, say: Say) -> Pace:
    """The pace of a server of such budgets and batches; what is compiled on first use is, afterwards.

    Batches run of one example, of several, and of several that are padded, at the server's budget and at their own.
    """
    if served.found is not None and next(iter(served.found.acms.values())).k_lo.is_cuda:
        from acm_compiler.codegen.gpu.calls import warm

        say(f"{warm.warm_up(served.found.acms.values())} kernels for a GPU are ready")
    compiled = served.call is not served.model
    if served.found is not None:
        forms = ([8], [8] * 3, [8, 5, 3])
        for done, sizes in enumerate(forms, 1):
            say(f"{'compiling' if compiled else 'running'} the model, batch form {done} of {len(forms)}")
            examples = [served.reader.sample(size) for size in sizes]
            served.run(examples, [None] * len(sizes), high)
            served.run(examples, [high] * len(sizes), high)
        served.skips_padding = is_padding_idle(served, low)
    sample = served.reader.sample(_TEXT)
    size, many = served.reader.cells(sample), min(_MANY, most)

    def seconds_of(budget: float, cells: int) -> float:
        """The least of several times, once it has run."""
        examples = [served.reader.sample(_TEXT) for _ in range(cells // size)]
        times = [_seconds(lambda: served.run(examples, [None] * len(examples), budget)) for _ in range(1 + _TIMES)]
        return min(times[1:])

    budgets = list(dict.fromkeys((low, (low + high) / 2, high)))
    pace = measure_pace(seconds_of, budgets, few=size, many=many * size)
    times = (f"{pace.seconds(budget, many * size) * 1e3:.3g} ms at budget {budget:.3g}" for budget in budgets)
    say(f"a batch of {many} takes {', '.join(times)}")
    if served.use is not None:
        served.use.begin()
    return pace


def is_padding_idle(served: Served, budget: float) -> bool:
    """True if answers stay the same where padding runs no learner, as they do in encoders that are given the mask.

    Tried on one batch; answers that are not finite show nothing.
    """
    examples, found = [served.reader.sample(size) for size in (24, 9, 3)], []
    for served.skips_padding in (False, True):
        found += [served.run(examples, [None] * len(examples), budget)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*found, strict=True))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
