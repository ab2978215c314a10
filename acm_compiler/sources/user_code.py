"""A user's code: run so that it may raise anything, and the line of it that is running, or raised."""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType

import torch

from acm_compiler.errors import AcmError, FunctionFailed
from acm_compiler.sources.inputs import ForwardEnded


class Attempt:
    """A block that runs a user's code, which may raise anything; what it raised is `error`."""

    error: BaseException | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Ctrl-C is the user's at the keyboard, GeneratorExit Python's own and ForwardEnded ours; sys.exit is the code's
        self.error = None if isinstance(error, (KeyboardInterrupt, GeneratorExit, ForwardEnded)) else error
        return self.error is not None


@contextlib.contextmanager
def users_code(where: str, what: str) -> Iterator[None]:
    """A block that runs a user's code, named `where`; FunctionFailed, with the user's own frames, where it raises."""
    attempt = Attempt()
    with attempt:
        yield
    if attempt.error is not None:
        raise failed(where, what, attempt.error)


def is_users(thing: object) -> bool:
    """True if the class of `thing` is not one of this package."""
    return type(thing).__module__.partition(".")[0] != __name__.partition(".")[0]


def failed(where: str, what: str, error: BaseException) -> AcmError:
    """The refusal for what a user's code raised; our own errors, and lack of memory, stay as they are."""
    if isinstance(error, (AcmError, MemoryError, torch.OutOfMemoryError)):
        raise error
    made = FunctionFailed(with_frames(f"{what} {first_line(error)}", error), where=where)
    made.__cause__ = error
    return made


def with_frames(text: str, error: BaseException) -> str:
    """`text`, and below it the frames that `error` passed through in the user's own files, as tracebacks show them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return "\n".join([text, *("".join(traceback.format_list(frames)).rstrip().splitlines())])


def first_line(error: BaseException) -> str:
    """The kind of `error`, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def running_line(*, until: CodeType) -> str | None:
    """`file.py:line` of the innermost running frame that is neither torch's, Python's nor this package's.

    Frames outside of the one that runs `until` are not looked at; None when there is no such line.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not until:
        name = _shown_name(frame.f_code.co_filename)
        if name is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raising_line(error: BaseException) -> str | None:
    """`file.py:line` of the innermost such frame that `error` passed through."""
    lines = (
        (_shown_name(trace.tb_frame.f_code.co_filename), trace.tb_lineno) for trace in _traces(error.__traceback__)
    )
    shown = [f"{name}:{line}" for name, line in lines if name is not None]
    return shown[-1] if shown else None


def _is_users(filename: str) -> bool:
    return _shown_name(filename) is not None and "site-packages" not in Path(filename).parts


def traced_line(stack_trace: str | None) -> str | None:
    """`file.py:line` of the innermost such frame in a formatted stack trace."""
    for text in reversed((stack_trace or "").splitlines()):
        head, _, rest = text.strip().partition('File "')
        filename, _, place = rest.partition('", line ')
        if not head and place and (name := _shown_name(filename)) is not None:
            return f"{name}:{place.partition(',')[0]}"
    return None


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


@functools.cache
def _shown_name(filename: str) -> str | None:
    """The file's name when it is a user's or another library's, else None."""
    path = Path(filename)
    hidden = (Path(torch.__file__).parent, Path(__file__).parents[1])
    if filename.startswith("<") or any(path.is_relative_to(folder) for folder in hidden):
        return None
    in_python = path.is_relative_to(sysconfig.get_paths()["stdlib"]) and "site-packages" not in path.parts
    return None if in_python else path.name
