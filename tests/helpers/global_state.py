"""State of the process that one test could leave behind for the next."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from pathlib import Path

import torch

# get_hash() of an unchanged one costs nothing
_CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")
_VARIABLE = "the variable "
# of libraries, which add to sys.path in passing
_OTHERS_FOLDERS = ("site-packages", "huggingface")


def global_state() -> dict[str, object]:
    """Everything that a test has to put back as it found it, by name."""
    state: dict[str, object] = {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "the fast path of attention": torch.backends.mha.get_fastpath_enabled(),
        "the process group": torch.distributed.is_initialized(),
        "the folder": Path.cwd(),
        "the arguments": tuple(sys.argv),
        "the garbage collector": gc.isenabled(),
        "logging": (logging.root.level, logging.root.manager.disable, len(logging.root.handlers)),
        "the package's logger": (logger := logging.getLogger("acm_compiler")).level,
        "the handlers of the package's logger": len(logger.handlers),
        "sys.path": tuple(p for p in sys.path if not any(part in p for part in _OTHERS_FOLDERS)),
    }
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.aot_inductor.metadata.clear()  # AOTInductor notes the machine in it, seen when all is hashed anew
    state |= {f"signal {number}": signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    state |= {f"{_VARIABLE}{name}": said for name, said in os.environ.items() if not name.startswith("PYTEST_")}
    return state | {name: sys.modules[name].get_hash() for name in _CONFIGS if name in sys.modules}


def left_behind(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Differences as lines; configs and variables of libraries that were first loaded in between do not count."""
    return [
        f"{name}: {before.get(name)!r}, then {after.get(name)!r}{_settings(name)}"
        for name in sorted(before | after)
        if before.get(name) != after.get(name) and (name in before or not _of_library(name))
    ]


def _settings(name: str) -> str:
    """The settings of a config that are not its defaults, which its hash does not tell."""
    return f", and now\n{sys.modules[name].codegen_config()}" if name in _CONFIGS else ""


def _of_library(name: str) -> bool:
    return name in _CONFIGS or (name.startswith(_VARIABLE) and not name.startswith(f"{_VARIABLE}ACM_"))
