"""Other programs' judgement: pytest on the GPU's tests, compute-sanitizer on small calls of every form."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.first_gpu_run.device import Device
from benchmarks.first_gpu_run.parts import Row

_OUTCOME = re.compile(
    r"(?:(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)|(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+?::.+))"
)
_AT = re.compile(r"=========\s+at (?:void )?([\w:]+)")
WORKERS = 8


def tests(device: Device) -> Iterator[Row]:
    """Each test of `pytest -m gpu`, in several processes where pytest-xdist is there; all are skipped in a dry run."""
    if importlib.util.find_spec("pytest") is None:
        yield {"refused": "pytest is not installed"}
        return
    shared = ["-p", "xdist.plugin", "-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rN", "-p", "no:cacheprovider"]
    command += [*(shared if device.is_cuda else []), "tests/codegen/test_gpu.py"]
    # whatever else is installed there may bring plugins that warn
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **piped) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            if (outcome := outcome_of(text)) is not None:
                yield outcome
    if process.returncode not in (0, 5):
        yield {"test": "pytest", "outcome": f"exit status {process.returncode}", "fine": False}


def outcome_of(text: str) -> Row | None:
    """The row of a line of pytest's, None for lines about no test's end."""
    found = _OUTCOME.search(re.sub(r"\s*\[ *\d+%\]\s*", " ", text).strip())
    if found is None:
        return None
    name, outcome = found[1] or found[4], found[2] or found[3]
    return {"test": name.strip().split("::", 1)[1], "outcome": outcome, "fine": outcome in ("PASSED", "SKIPPED")}


def sanitized(device: Device, tool: str) -> Iterator[Row]:
    """Errors that compute-sanitizer reports in the parts of small calls, and in which of our kernels."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        yield {"tool": tool, "refused": "compute-sanitizer is not installed"}
        return
    # torch's cache of memory would hide whose an address is
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for part in ("nan", "forms"):
        inner = [sys.executable, "-m", "benchmarks.first_gpu_run", "correctness", "--part", part]
        command = [program, "--tool", tool, *inner, *([] if device.is_cuda else ["--dry"])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout[-100_000:], done.stderr[-10_000:], flush=True)
        yield {"tool": tool, "on part": part, **verdict_of(done.stdout)}


def verdict_of(text: str) -> Row:
    """The tool's verdict: errors in all, the kernels they are in, and whether one of them is ours."""
    summary = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if summary is None:
        return {"refused": "no summary; see the log"}
    kernels = sorted(set(_AT.findall(text)))
    ours = [name for name in kernels if name.endswith("_kernel")]
    return {"errors": int(summary[1]), "kernels": kernels, "fine": not ours}
