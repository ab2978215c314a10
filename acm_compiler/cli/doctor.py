"""`acmc doctor`: what is installed, what it runs on, and whether the parts see each other."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib.metadata import entry_points
from typing import Any

import typer

from acm_compiler.cli.options import JsonOption
from acm_compiler.cli.output import Output

_DISTRIBUTIONS = ("acm_compiler", "torch", "torchvision", "triton", "transformers", "timm", "accelerate")
_BACKEND = "acm"


def doctor(json: JsonOption = False) -> None:
    """Print the facts; exit code 1 when something is broken that every run needs."""
    from acm_compiler.codegen.cpu.build import carried_library, find_compiler, levels_here

    out = Output(json=json)
    versions, devices, backend = _versions(), _devices(), _backend()
    compiler, recipes = _inductors_compiler(), _recipes()
    kernel_compiler = _with_version(path) if (path := find_compiler()) else None
    named = f" (CXX={name})" if (name := os.environ.get("CXX")) else ""
    rows = [(name, version or "not installed") for name, version in versions.items()]
    rows += [("device", device) for device in devices]
    rows += [("backend", backend["error"] or f"torch.compile(model, backend={_BACKEND!r}) finds it")]
    rows += [("C++ compiler of Inductor", compiler or f"none found{named}: graphs run uncompiled on the CPU")]
    level, carried = levels_here()[0].name, carried_library()
    ready = None if carried is None else carried[0].name
    without = "none found" if ready else "none found: ACMs run on plain torch operations"
    rows += [("C++ compiler of the CPU kernel", kernel_compiler or without)]
    rows += [("CPU kernel", _kernel(level, ready, compiles=kernel_compiler is not None))]
    rows += [("recipes", ", ".join(recipes) or "none found")]
    out.table(rows)
    missing = None if recipes else "the shipped recipes are missing"
    problems = [f"{problem}; reinstall acm_compiler" for problem in (backend["error"], missing) if problem]
    kernel = {"level": level, "prebuilt": ready}
    compilers = {"compiler": compiler, "kernel_compiler": kernel_compiler, "kernel": kernel}
    facts = {"versions": versions, "devices": devices, "backend": backend, **compilers, "recipes": recipes}
    out.document({**facts, "problems": problems})
    for problem in problems:
        out.error(problem)
    if problems:
        raise typer.Exit(1)


def _kernel(level: str, ready: str | None, *, compiles: bool) -> str:
    if ready is not None:
        return f"came with the package, for {ready}" + (f" (this processor has {level})" if ready != level else "")
    return f"compiled at first use, for {level}" if compiles else "none"


def _versions() -> dict[str, str | None]:
    from acm_compiler.recipe.resolved import installed_version

    return {"python": platform.python_version(), **{name: installed_version(name) for name in _DISTRIBUTIONS}}


def _devices() -> list[str]:
    import torch

    from acm_compiler.errors import counted

    cpu = f"cpu ({counted(torch.get_num_threads(), 'thread')}, {torch.backends.cpu.get_cpu_capability()})"
    cuda = [f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    return [cpu, *cuda]


def _backend() -> dict[str, Any]:
    """Visibility of the backend: found by its name in torch, and leading to a function."""
    found = entry_points(group="torch_dynamo_backends", name=_BACKEND)
    if not found:
        return {"visible": False, "error": f"torch does not see {_BACKEND!r}: no entry point is installed"}
    try:
        next(iter(found)).load()
    except (ImportError, AttributeError) as error:
        return {"visible": True, "error": f"{_BACKEND!r} is installed but cannot be loaded: {error}"}
    return {"visible": True, "error": None}


def _inductors_compiler() -> str | None:
    """The C++ compiler that Inductor takes here, and its version; it looks no further than CXX where that is set."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return _with_version(get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


def _with_version(command: str) -> str:
    call = [*shlex.split(command), "--version"]
    answer = subprocess.run(call, capture_output=True, text=True, check=False, timeout=20)
    return f"{command} ({answer.stdout.splitlines()[0]})" if answer.stdout else command


def _recipes() -> list[str]:
    from acm_compiler.errors import StorageError
    from acm_compiler.recipe import shipped_recipes

    try:
        return list(shipped_recipes())
    except StorageError:
        return []
