"""The functions of a live model between the linears of an MLP, as text: a plan keeps them, a rewrite compares them.

Sizes and names of parameters are the same for a model with GELU and one with ReLU, whose outputs are not.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from acm_compiler.errors import PlanMismatch
from acm_compiler.passes.capture.graph import upwards
from acm_compiler.passes.capture.op_names import ACTIVATIONS, name_of
from acm_compiler.passes.rewrite.graft_graph import find_in_graph
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.site import ACTIVATIONS as NAMES
from acm_compiler.site import Site

_NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?")
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)


def functions_of(model: nn.Module, site: Site, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every function that may be in the site's computation, by its path in `model`; none for a single linear.

    Modules without parameters, functions and names of activations that modules hold, numbers that the site's
    activation or dropout has, and the activations that a forward or an fx graph names. `tensors`: the model's by name.
    """
    if site.last is None:
        return {}
    if isinstance(model, fx.GraphModule):
        regions = find_in_graph(model, site, tensors) or []
        runs = (upwards([region.output], lambda node: node.all_input_nodes, stop={region.x}) for region in regions)
        return {f"graph.{i}": ", ".join(_names_in_graph(model, run)) for i, run in enumerate(runs)}
    numbers = {abs(float(number)) for number in _NUMBER.findall(site.act)} | {site.graft.dropout}
    found: dict[str, str] = {}
    for path, module in _parts(model, site).items():
        for name, text in _functions(module, numbers - {0.0}, drops=site.graft.dropout > 0):
            found[f"{path}.{name}".strip(".")] = text
    return dict(sorted(found.items()))


def check_functions(sites: Iterable[PlannedSite], model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise PlanMismatch where `model` computes something else between a site's linears than the planned one did.

    Plans that were written before they said so are taken to fit.
    """
    for site in sites:
        if not (expected := site.functions):
            continue
        found = functions_of(model, site, tensors)
        for path in sorted(expected.keys() | found.keys()):
            if found.get(path) != expected.get(path):
                raise PlanMismatch(
                    f"the plan, whose activation is {site.act} here, was made for a model that computes something else",
                    where=site.name,
                    found=f"{path}: {found.get(path, 'nothing')}",
                    expected=expected.get(path, "nothing"),
                    fix="plan again: acm.plan(model, example_inputs)",
                )


def _parts(model: nn.Module, site: Site) -> dict[str, nn.Module]:
    """The modules that a graft takes the place of, with all inside them; else those around functions between them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    grafted = site.graft.modules
    if site.graft.kind in ("W", "T"):
        inside = (name for name in modules if any(f"{name}.".startswith(f"{g}.") for g in grafted))
        return {name: modules[name] for name in inside}
    owners = dict.fromkeys(ref.weight.rpartition(".")[0] for ref in site.refs)
    around = dict.fromkeys(name.rpartition(".")[0] for name in grafted) if site.graft.kind == "S" else grafted
    named = {name: modules[name] for name in (*owners, *around) if name in modules}
    leaves = {
        f"{name}.{leaf}".strip("."): child for name, module in named.items() for leaf, child in module.named_children()
    }
    return named | {name: child for name, child in leaves.items() if _is_function(child)}


def _is_function(module: nn.Module) -> bool:
    """True for a module that holds nothing and does something, such as an activation."""
    holds_nothing = next(module.children(), None) is None and not module._parameters and not module._buffers
    return holds_nothing and not isinstance(module, nn.Identity)


def _is_dropout(module: nn.Module) -> bool:
    """True for dropout, of paths too, which a trained model does not need as it was."""
    return "drop" in type(module).__name__.lower()


def _functions(module: nn.Module, numbers: set[float], *, drops: bool) -> Iterator[tuple[str, str]]:
    own = not type(module).__module__.startswith("torch.")
    if _is_function(module) and (drops or not _is_dropout(module)):
        yield "", _module_text(module)
    for name, value in vars(module).items():
        # what others put on modules, as for checkpoints of activations, is theirs
        if isinstance(value, _FUNCTIONS) and name != "forward" and not name.startswith("_"):
            yield name, _function_text(value)
        elif own and isinstance(value, str) and (value in NAMES or hasattr(torch.nn.functional, value)):
            yield name, value
        elif own and isinstance(value, float) and abs(value) in numbers:
            yield name, str(value)
    code = getattr(type(module).forward, "__code__", None)
    if own and code is not None and (names := _activations(code)):
        yield "forward", names


def _module_text(module: nn.Module) -> str:
    """The module as it prints, whether it writes over its operand or not."""
    return re.sub(r"(, )?inplace=\w+", "", f"{type(module).__name__}({module.extra_repr()})")


def _function_text(function: Any) -> str:
    if isinstance(function, functools.partial):
        named = [f"{name}={_value_text(value)}" for name, value in function.keywords.items()]
        return f"{_function_text(function.func)}({', '.join(['...', *map(_value_text, function.args), *named])})"
    name = getattr(function, "__name__", str(function))
    code = getattr(function, "__code__", None)
    return f"{name} of {_activations(code) or 'no activation'}" if name == "<lambda>" and code is not None else name


def _value_text(value: Any) -> str:
    """A number or text as it prints, of other objects their type: they may print their place in memory."""
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def _activations(code: types.CodeType) -> str:
    """The activations that compiled Python names."""
    return ", ".join(name for name in code.co_names if name in NAMES or name in ACTIVATIONS)


def _names_in_graph(model: fx.GraphModule, nodes: Iterable[fx.Node]) -> Iterator[str]:
    for node in nodes:
        if node.op == "call_module":
            module = model.get_submodule(str(node.target))
            if _is_function(module) and not _is_dropout(module):
                yield _module_text(module)
        elif node.op.startswith("call") and (name := name_of(node.target)) in ACTIVATIONS:
            yield name
