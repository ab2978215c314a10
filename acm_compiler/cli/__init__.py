"""The command line, `acmc`: a file per verb, gathered in `app`."""

from acm_compiler.cli.app import app, main

__all__ = ["app", "main"]
