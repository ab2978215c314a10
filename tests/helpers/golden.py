"""Texts that are compared with a file; `ACM_ACCEPT=1` writes the file anew."""

from __future__ import annotations

import os

from tests.helpers import ROOT

FOLDER = ROOT / "tests" / "goldens"


def check(name: str, text: str) -> None:
    """Assert that `text` is what `goldens/<name>` holds."""
    path = FOLDER / name
    if os.environ.get("ACM_ACCEPT"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
