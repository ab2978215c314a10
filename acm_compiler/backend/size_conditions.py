"""What Dynamo took for granted about the sizes of a graph's inputs while it traced them as free."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
from torch._guards import TracingContext
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._traceback import shorten_filename

# what Dynamo calls one size of an argument, such as L['args'][0].size()[1]
_SIZE = re.compile(r"L\['(?!self'\])(?:kwargs'\]\[')?(\w+)'\](.*)\.size\(\)\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeCondition:
    """A graph holds for inputs that meet `expression`, others get another one; `line`: what asked for it, if known."""

    expression: str
    line: str | None

    def __str__(self) -> str:
        return f"{self.expression} ({self.line})" if self.line else self.expression


def size_conditions() -> tuple[SizeCondition, ...]:
    """The conditions of the graph whose backend is being called; none where nothing is being compiled.

    Sizes that were equal are taken for one by torch, which asks the same of all inputs.
    """
    tracing = TracingContext.try_get()
    shapes = tracing.fake_mode.shape_env if tracing and tracing.fake_mode else None
    if shapes is None:
        return ()
    named = {symbol: sizes for symbol, sources in shapes.var_to_sources.items() if (sizes := _sizes(sources))}
    alike = (f"{first} == {other}" for first, *others in named.values() for other in others)
    return (*_asked(shapes.guards, named), *(SizeCondition(expression=both, line=None) for both in alike))


def _asked(guards: Any, named: dict[Any, list[str]]) -> Iterator[SizeCondition]:
    """What the model's operations asked of single sizes."""
    names = {symbol: sympy.Symbol(sizes[0]) for symbol, sizes in named.items()}
    for guard in guards:
        if guard.expr.free_symbols and guard.expr.free_symbols <= names.keys():
            yield SizeCondition(expression=_words(guard.expr.xreplace(names)), line=_line(guard.sloc))


def _sizes(sources: Any) -> list[str]:
    """The sources that are sizes of arguments, as the user would write them."""
    # torch made the name a property in 2.12
    names = (source.name if isinstance(source.name, str) else source.name() for source in sources)
    return [f"{found[1]}{found[2]}.size({found[3]})" for name in names if (found := _SIZE.fullmatch(name))]


def _words(expression: Any) -> str:
    return str(PythonPrinter().doprint(expression))


def _line(place: Any) -> str | None:
    """`file:line in function` of the line that asked."""
    if not place.maybe_user_loc:
        return None
    cut, colon, rest = place.maybe_user_loc.rpartition("  # ")[2].rpartition(":")
    # torch leaves out what a path has in common with its own, and where that is "/" a letter more
    whole = (name for name in tuple(linecache.cache) if shorten_filename(name) == cut)
    return f"{next(whole, cut)}{colon}{rest}"
