"""Rewritten models out of Python: programs, packages, ONNX and ordinary checkpoints, each in a folder of its own."""

from acm_compiler.exporting.export import FORMATS, export

__all__ = ["FORMATS", "export"]
