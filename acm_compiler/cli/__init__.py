"""The command line, `acmc`: one file per verb, gathered in `app`."""

from acm_compiler.cli.app import app, main

__all__ = ["app", "main"]
