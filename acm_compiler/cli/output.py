"""Output of verbs: tables and sentences for people, or exactly one JSON document."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from acm_compiler.errors import AcmError, RecipeError

JSON_SCHEMA = 1
# what writing to a stream that was opened before may raise; unbuffered, it leaves no trace in the stream
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO, errno.EBADF)


def sentence(error: AcmError) -> str:
    """The error as text, the number of a recipe's problems first when there are several."""
    if isinstance(error, RecipeError) and len(error.problems) > 1:
        return f"{len(error.problems)} problems\n{error}"
    return str(error)


def error_facts(error: AcmError) -> dict[str, Any]:
    """The fields of an error in a JSON document, under `error`."""
    return {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}


def is_first_process() -> bool:
    """False in the further processes of a launch (torchrun, accelerate), which leave it to the first to report."""
    return _is_first("RANK")


def is_first_of_machine() -> bool:
    """False in all processes of a launch but one on each machine."""
    return _is_first("LOCAL_RANK")


def _is_first(rank: str) -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get(rank, "0") == "0"


@dataclass(frozen=True, slots=True)
class Output:
    """Destination of a verb's output, of the first process of a launch.

    With `json`, `document` alone prints the result, and notes still go to stderr. Warnings and errors are every
    process's own.
    """

    json: bool = False

    def say(self, text: str) -> None:
        """A sentence of the result, for people."""
        if not self.json and is_first_process():
            typer.echo(text)

    def progress(self, text: str) -> None:
        """Print a line of a long verb's progress."""
        if is_first_process():
            typer.echo(text, err=True)

    def note(self, text: str) -> None:
        """Something worth knowing that is no result."""
        if is_first_process():
            self._labelled("note", typer.colors.CYAN, text)

    def warn(self, text: str) -> None:
        """Something the user should look at."""
        self._labelled("warning", typer.colors.YELLOW, text)

    def error(self, text: str) -> None:
        """Print the reason of a failure."""
        self._labelled("error", typer.colors.RED, text)

    def table(self, rows: Sequence[Sequence[Any]], headers: Sequence[str] = ()) -> None:
        """Aligned columns of the result, for people."""
        from tabulate import tabulate

        self.say(tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True))

    def document(self, facts: Mapping[str, Any]) -> None:
        """The JSON document of --json; without it, nothing."""
        if self.json and is_first_process():
            sys.stdout.write(json.dumps({"schema": JSON_SCHEMA, **facts}, indent=1) + "\n")

    def _labelled(self, label: str, colour: str, text: str) -> None:
        coloured = False if os.environ.get("NO_COLOR") else None  # None: on a terminal only
        typer.secho(f"{label}: ", fg=colour, nl=False, err=True, color=coloured)
        typer.echo(text, err=True)


@contextmanager
def ending_unwritable() -> Iterator[None]:
    """End the process with exit code 1 where what is printed cannot be written: a disk is full, a pipe was closed."""
    _open_closed_streams()
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except OSError as error:
        lost = [stream for stream in (sys.stdout, sys.stderr) if not _flushes(stream)]
        if not lost and (error.filename is not None or error.errno not in _UNWRITABLE):
            raise
        for stream in lost:  # what is left in the buffer goes nowhere, or Python says so once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if error.errno != errno.EPIPE:  # that a reader such as `head` has seen enough is no fault
            Output().error(f"the output cannot be written: {error.strerror}")
        sys.exit(1)


def _open_closed_streams() -> None:
    """Give a process that was started without standard output or error (`>&-`) streams for them.

    Their numbers must not go to the next file that is opened. Results that are printed fail there, as on a full disk;
    what goes to standard error goes nowhere.
    """
    if sys.stdout is None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _flushes(stream: Any) -> bool:
    try:
        stream.flush()
    except OSError:
        return False
    return True


def say_warnings() -> None:
    """From now on this package's warnings are sentences, without the line of code that gave them."""
    others, package = warnings.formatwarning, Path(__file__).parents[1]

    def formatted(message: Warning | str, category: type[Warning], filename: str, *place: Any) -> str:
        if Path(filename).is_relative_to(package):
            return f"warning: {message}\n"
        return others(message, category, filename, *place)

    warnings.formatwarning = formatted  # type: ignore[assignment]
