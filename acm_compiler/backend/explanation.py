"""`acm.explain`: how the backend would run each ACM of a model, and why.

It includes the conditions that Dynamo put on the sizes of a graph's inputs, and hides its remarks on libraries' code.
"""

from __future__ import annotations

import linecache
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import sympy
import torch
from tabulate import tabulate
from torch import fx, nn
from torch._guards import TracingContext
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._traceback import shorten_filename

from acm_compiler.acm import ACM
from acm_compiler.acm.context import DENSE_PREFIXES
from acm_compiler.backend import OPTIONS, lower
from acm_compiler.errors import AcmError, UsageError, counted
from acm_compiler.passes.lower.verify import Lowered
from acm_compiler.passes.rewrite.conversion import rewritten
from acm_compiler.sources.inputs import split_inputs
from acm_compiler.sources.user_code import Attempt, first_line, raising_line

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
    """Conditions that the model's operations put on single sizes."""
    names = {symbol: sympy.Symbol(sizes[0]) for symbol, sizes in named.items()}
    for guard in guards:
        if guard.expr.free_symbols and guard.expr.free_symbols <= names.keys():
            words = str(PythonPrinter().doprint(guard.expr.xreplace(names)))
            yield SizeCondition(expression=words, line=_line(guard.sloc))


def _sizes(sources: Any) -> list[str]:
    """The sources that are sizes of arguments, as the user would write them."""
    # torch made the name a property in 2.12
    names = (source.name if isinstance(source.name, str) else source.name() for source in sources)
    return [f"{found[1]}{found[2]}.size({found[3]})" for name in names if (found := _SIZE.fullmatch(name))]


def _line(place: Any) -> str | None:
    """`file:line in function` of the line that asked."""
    if not place.maybe_user_loc:
        return None
    cut, colon, rest = place.maybe_user_loc.rpartition("  # ")[2].rpartition(":")
    # torch leaves out what a path has in common with its own, and where that is "/" a letter more
    whole = (name for name in tuple(linecache.cache) if shorten_filename(name) == cut)
    return f"{next(whole, cut)}{colon}{rest}"


_NOT_SEEN = "its learners were in no graph: "
_SKIPPING = (
    "they skip small values (acm.set_sparsity), natively on CPUs for up to 16 tokens, in float32 and bfloat16, by "
    "weights that are not offloaded and no inference tensors; else the reference runs them, and saves no time"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Implementation of every site, and of every quantised linear outside of ACMs; `str()` is a table.

    sites: one for each call. linears: how many such linears there are. graphs: into how many graphs the model falls.
    conditions: what they ask of the sizes of its inputs; for others, and for a size of 0 or 1 where the example has
    more, more are compiled.
    """

    sites: tuple[Lowered, ...]
    graphs: int
    conditions: tuple[SizeCondition, ...] = ()
    linears: int = 0

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        sites, conditions = ([asdict(part) for part in parts] for parts in (self.sites, self.conditions))
        found = {"schema": 1, "graphs": self.graphs, "sites": sites, "conditions": conditions}
        return found | ({"linears": self.linears} if self.linears else {})

    def __str__(self) -> str:
        calls = Counter(
            (site.site, site.implementation, " + ".join(site.fused) or "-", site.reason or "", site.line or "")
            for site in self.sites
        )
        often = max(calls.values(), default=1) > 1
        headers = ["site", "runs on", "fused with", "why", "line"] + ["calls"] * often
        table = tabulate([[*row, *[count] * often] for row, count in calls.items()], headers=headers)
        others = f" and {counted(self.linears, 'quantised linear')}" if self.linears else ""
        acms = len({site for site, *_ in calls}) - self.linears
        graphs = f"{counted(acms, 'ACM')}{others} in {counted(self.graphs, 'graph')}"
        asked = "".join(f"\n  {condition}" for condition in self.conditions)
        return f"{table}\n{graphs}" + (f", compiled with dynamic=True for inputs with{asked}" if asked else "")


def explain(model: nn.Module, *inputs: Any, **kwargs: Any) -> Explanation:
    """Explain how `torch.compile(model, backend="acm")` runs each ACM: the implementation, fusions, and why not.

    model: a rewritten model, compiled or not; `inputs` and `kwargs` as it takes them, or, as in `acm.plan`, one mapping
    of keyword arguments or one tuple of arguments. Nothing is compiled: the model is traced, with dynamic=True, and run
    once, without gradients, in the mode that it is in, with the backend's default options, whatever a compiled model
    was given.
    NotRewritten when it holds no ACMs; UsageError for inputs with which the model itself raises.
    """
    if len(inputs) == 1 and not kwargs:
        inputs, kwargs = split_inputs(inputs[0])
    live = getattr(model, "_orig_mod", model)
    whole = rewritten(live)
    acms, rest = whole.acms, whole.owner.rest
    found: list[Lowered] = []
    conditions: list[SizeCondition] = []
    graphs = 0
    defaults = {name: values[0] for name, values in OPTIONS.items()}

    def look(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        conditions.extend(size_conditions())
        found.extend(lower(graph_module, defaults))
        return graph_module.forward

    attempt = Attempt()
    # torch's own regions of `nested_compile_region` take no numbers, such as a norm's eps, as dynamic=True has them
    with attempt, torch.no_grad(), without_remarks(), torch._dynamo.config.patch(specialize_float=True):
        torch.compile(live, backend=look, dynamic=True)(*inputs, **kwargs)
    if attempt.error is not None:
        _refuse_inputs(live, inputs, kwargs)
        raise attempt.error
    named = [_named(site, [*acms, *rest]) for site in found]
    seen = {site.site for site in named}
    missing = [_not_seen(name, acm) for name, acm in acms.items() if name not in seen]
    return Explanation(
        sites=(*named, *missing),
        graphs=graphs,
        conditions=tuple(dict.fromkeys(conditions)),
        linears=len(seen.intersection(rest)),
    )


def _refuse_inputs(model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """UsageError where the model raises with these inputs uncompiled, too: what Dynamo says of them says less."""
    attempt = Attempt()
    with attempt, torch.no_grad():
        model(*inputs, **kwargs)
    error = attempt.error
    if error is None:
        return
    if isinstance(error, (AcmError, MemoryError, torch.OutOfMemoryError)):
        raise error
    raise UsageError(
        "the model itself raises with these inputs",
        where=raising_line(error),
        found=first_line(error),
        fix="give inputs that the model takes: as in its own call, or one mapping of its arguments",
    ) from error


def _named(site: Lowered, names: list[str]) -> Lowered:
    """Replace the path as Dynamo saw it by the plan's name.

    It starts below whatever module was compiled, or, under a forward that a library has wrapped, above the model.
    """
    below = [name for name in names if f".{name}".endswith(f".{site.site}")]
    above = [name for name in names if f".{site.site}".endswith(f".{name}")]
    fitting = below or sorted(above, key=len)[-1:]
    return replace(site, site=fitting[0]) if len(fitting) == 1 else site


def _not_seen(name: str, acm: ACM) -> Lowered:
    runs_on, reason = "-", "another graph, the body of a region with others, or no call"
    if acm.state == "dense":
        runs_on, reason = "dense", "it runs its dense region until learners are fitted"
    elif acm.skips is not None:
        runs_on, reason = "skipping", _SKIPPING
    elif acm.knob.device.type in DENSE_PREFIXES and (k := acm.only_k.of(is_decode=False)) is not None:
        runs_on, reason = "dense products", f"its bounds leave k = {k} to every token"
    return Lowered(site=name, implementation=runs_on, reason=_NOT_SEEN + reason, fused=(), line=None)


# transformers asks a cached function of its own whether modules are sharded
_OF_CACHES = "Dynamo detected a call to a `functools.lru_cache`"


@contextmanager
def without_remarks() -> Iterator[None]:
    """Leave out what Dynamo warns of in code that is not the user's; nothing else."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _OF_CACHES, UserWarning)
        yield
