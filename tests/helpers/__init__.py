"""Helpers of several tests."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
