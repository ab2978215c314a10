"""Rewritten models out of Python: programs, packages, ONNX and ordinary checkpoints, each in a folder of its own."""

from acm_compiler.exporting.export import FORMATS, check_format, export
from acm_compiler.exporting.folder import check_folder

__all__ = ["FORMATS", "check_folder", "check_format", "export"]
