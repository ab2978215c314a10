"""Every environment switch of the package, declared once. None but ACM_KERNEL changes results, and that by rounding."""

from __future__ import annotations

import os

DUMP = "ACM_DUMP"
"""A directory: every stage of the compiler writes its result there as text."""
LOG = "ACM_LOG"
"""Rooms whose log is shown at level DEBUG, separated by commas: capture,sites,plan,rewrite,training,backend; or all."""
KERNEL = "ACM_KERNEL"
"""Implementation of ACMs: reference, cpu or triton; unset: the best one. Tells a graph's faults from a kernel's."""
CHECK = "ACM_CHECK"
"""1: every kernel call is compared with the reference, and the first site that differs is named."""
KEEP = "ACM_KEEP_PANELS"
"""0: the CPU kernel packs weights at every call and keeps nothing, for less memory and more time."""
KERNELS = ("reference", "cpu", "triton")


def dump_directory() -> str | None:
    """Folder for the stages' results, None when nobody asked."""
    return os.environ.get(DUMP) or None


def logged_rooms() -> tuple[str, ...]:
    """The rooms whose log was asked for."""
    return tuple(room.strip() for room in os.environ.get(LOG, "").split(",") if room.strip())


def kernel() -> str | None:
    """The implementation asked for, None when nobody did. UsageError for one that is not known."""
    name = os.environ.get(KERNEL)
    if name and name not in KERNELS:
        from acm_compiler.errors import UsageError, did_you_mean  # the package reads this file at its import

        hint = did_you_mean(name, KERNELS)
        raise UsageError(f"unknown kernel{hint}", where=KERNEL, found=name, expected=f"one of {', '.join(KERNELS)}")
    return name or None


def check() -> bool:
    """True if kernels are to be compared with the reference."""
    return os.environ.get(CHECK, "") not in ("", "0")


def keeps_panels() -> bool:
    """True unless the CPU kernel is to keep no packed weights from call to call."""
    return os.environ.get(KEEP, "1") != "0"
