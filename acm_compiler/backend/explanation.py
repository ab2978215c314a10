"""`acm.explain`: how the backend would run each ACM of a model, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn

from acm_compiler.backend import OPTIONS, lower
from acm_compiler.backend.dynamo_remarks import without_remarks
from acm_compiler.backend.size_conditions import SizeCondition, size_conditions
from acm_compiler.errors import AcmError, UsageError
from acm_compiler.inputs import split_inputs
from acm_compiler.passes.capture.capture import Attempt, first_line
from acm_compiler.passes.lower.verify import Lowered
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.user_code import raising_line

_NOT_SEEN = "its learners were in no graph: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What became of every site; `str()` is a table.

    graphs: into how many graphs the model falls. conditions: what they ask of the sizes of its inputs; for others, and
    for a size of 0 or 1 where the example has more, more are compiled.
    """

    sites: tuple[Lowered, ...]
    graphs: int
    conditions: tuple[SizeCondition, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        sites, conditions = ([asdict(part) for part in parts] for parts in (self.sites, self.conditions))
        return {"schema": 1, "graphs": self.graphs, "sites": sites, "conditions": conditions}

    def __str__(self) -> str:
        rows = [
            [site.site, site.implementation, " + ".join(site.fused) or "-", site.reason or "", site.line or ""]
            for site in self.sites
        ]
        table = tabulate(rows, headers=["site", "runs on", "fused with", "why", "line"])
        graphs = f"{len(rows)} ACMs in {self.graphs} graph{'s' * (self.graphs != 1)}"
        asked = "".join(f"\n  {condition}" for condition in self.conditions)
        return f"{table}\n{graphs}" + (f", compiled with dynamic=True for inputs with{asked}" if asked else "")


def explain(model: nn.Module, *inputs: Any, **kwargs: Any) -> Explanation:
    """How `torch.compile(model, backend="acm")` runs each ACM: by which implementation, fused with what, and why not.

    model: a rewritten model, compiled or not; `inputs` and `kwargs` as it takes them, or, as in `acm.plan`, one mapping
    of keyword arguments or one tuple of arguments. Nothing is compiled: the model is traced, with dynamic=True, and run
    once, without gradients, in the mode that it is in, with the backend's default options, whatever a compiled model
    was given.
    NotRewritten when it holds no ACMs; UsageError for inputs with which the model itself raises.
    """
    if len(inputs) == 1 and not kwargs:
        inputs, kwargs = split_inputs(inputs[0])
    live = getattr(model, "_orig_mod", model)
    acms = sites(live)
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
    with attempt, torch.no_grad(), without_remarks():
        torch.compile(live, backend=look, dynamic=True)(*inputs, **kwargs)
    if attempt.error is not None:
        _refuse_inputs(live, inputs, kwargs)
        raise attempt.error
    named = [_named(site, list(acms)) for site in found]
    seen = {site.site for site in named}
    missing = [_not_seen(name, acm.state) for name, acm in acms.items() if name not in seen]
    return Explanation(sites=(*named, *missing), graphs=graphs, conditions=tuple(dict.fromkeys(conditions)))


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
    """With the plan's name in place of the path below whatever module was compiled."""
    fitting = [name for name in names if name == site.site or name.endswith(f".{site.site}")]
    return replace(site, site=fitting[0]) if len(fitting) == 1 else site


def _not_seen(name: str, state: str) -> Lowered:
    reason = "it runs its dense region until learners are fitted" if state == "dense" else "another graph or no call"
    runs_on = "dense" if state == "dense" else "-"
    return Lowered(site=name, implementation=runs_on, reason=_NOT_SEEN + reason, fused=(), line=None)
