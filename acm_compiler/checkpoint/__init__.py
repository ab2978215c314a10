"""Saved models: directories with all that building, filling and running a rewritten model takes."""

from acm_compiler.checkpoint.folder import check_own_folder, holds_model, locked, save_id
from acm_compiler.checkpoint.load import build_dense, load, saved_conversion
from acm_compiler.checkpoint.save import save

__all__ = [
    "build_dense",
    "check_own_folder",
    "holds_model",
    "load",
    "locked",
    "save",
    "save_id",
    "saved_conversion",
]
