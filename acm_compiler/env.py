"""Every environment switch of the package, declared once. None of them changes results."""

from __future__ import annotations

import os

DUMP = "ACM_DUMP"
"""A directory: every stage of the compiler writes its result there as text."""
LOG = "ACM_LOG"
"""Rooms whose log is shown at level DEBUG, separated by commas: capture,sites,plan,rewrite,training,backend; or all."""


def dump_directory() -> str | None:
    """Where stages write their results, None when nobody asked."""
    return os.environ.get(DUMP) or None


def logged_rooms() -> tuple[str, ...]:
    """The rooms whose log was asked for."""
    return tuple(room.strip() for room in os.environ.get(LOG, "").split(",") if room.strip())
