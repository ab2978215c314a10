"""Put ACMs into a user's fx.GraphModule as nodes of its own graph.

before: fc1 = call_module fc1 (x); gelu = call_function gelu (fc1); fc2 = call_module fc2 (gelu)
after:  acm = call_module fc2 (x)

A site's run is found by its parameters, whether the graph calls modules, functions or methods.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from acm_compiler.acm import ACM
from acm_compiler.passes.capture.graph import upwards
from acm_compiler.passes.capture.op_names import COPIES, RESHAPES, name_of
from acm_compiler.passes.rewrite.dense_region import DenseRegion, tensor_names
from acm_compiler.passes.rewrite.graft_modules import TakenOut, owners_of, put_module, registry_of
from acm_compiler.site import LinearRef, Site


def graft_graph(
    model: fx.GraphModule, site: Site, acm: ACM, regions: list[GraphRegion], tensors: Mapping[str, Tensor]
) -> None:
    """Replace `regions` of the model's graph by calls of `acm`, which is registered under the site's name.

    What nothing reads any more goes, with the parameters and modules that only it used. The caller recompiles.
    """
    for region in regions:
        with model.graph.inserting_before(region.output):
            call = model.graph.create_node("call_module", site.name, (region.x,), name="acm")
        call.meta = {key: value for key, value in region.output.meta.items() if key in ("val", "stack_trace")}
        call.meta["acm_site"] = site.name
        region.output.replace_all_uses_with(call)
        _erase_unread(region.output)
    names = tensor_names(site)
    for node in list(model.graph.nodes):
        if any(reads(model, node, tensors[name]) for name in names):
            _erase_unread(node)
    taken = acm.replaced = TakenOut(modules={site.name: _module_at(model, site.name)})
    model.add_submodule(site.name, acm)
    for name in names:
        if not any(reads(model, node, tensors[name]) for node in model.graph.nodes):
            _unregister(model, name, tensors[name], taken)
    acm.dense = DenseRegion(site, tensors)
    acm.train(model.training)


def _module_at(model: fx.GraphModule, path: str):
    parent, _, leaf = path.rpartition(".")
    try:
        return model.get_submodule(parent)._modules.get(leaf)
    except AttributeError:
        return None


def _unregister(model: fx.GraphModule, name: str, tensor: Tensor, taken: TakenOut) -> None:
    """Take a parameter out of its owners, and owners that are then empty out of the model."""
    for owner, leaf in owners_of(model)[id(tensor)]:
        registry_of(owner, leaf)[leaf] = None
        taken.tensors.append((owner, leaf, name))
        if next(owner.parameters(), None) is None and next(owner.children(), None) is None:
            paths = [path for path, module in model.named_modules(remove_duplicate=False) if module is owner and path]
            for path in paths:
                taken.modules[path] = owner
                put_module(model, path, None)


def _erase_unread(node: fx.Node) -> None:
    """Erase `node`, and upwards what only it read."""
    todo = [node]
    while todo:
        node = todo.pop()
        if not node.users and node.op not in ("placeholder", "output") and not node._erased:
            sources = node.all_input_nodes
            node.graph.erase_node(node)
            todo += sources


_MOVING = RESHAPES | {"permute", "transpose", "movedim"}


@dataclass(frozen=True, slots=True)
class GraphRegion:
    """One run of a site in a graph: the node of its input and the node of its output."""

    x: fx.Node
    output: fx.Node


@dataclass(frozen=True, slots=True)
class _Graph:
    """A model's graph, and the nodes of it that do not depend on its inputs."""

    model: fx.GraphModule
    tensors: Mapping[str, Tensor]
    constants: Collection[fx.Node]

    def data(self, node: fx.Node) -> list[fx.Node]:
        """The operands that depend on the graph's inputs."""
        return [source for source in node.all_input_nodes if source not in self.constants]


def find_in_graph(model: fx.GraphModule, site: Site, tensors: Mapping[str, Tensor]) -> list[GraphRegion] | None:
    """The site's runs in the model's own graph; None where it is not all there, as inside modules that are called."""
    if any(_inside_called_module(model, tensors[name]) for name in tensor_names(site)):
        return None
    graph = _Graph(model, tensors, _constants(model.graph))
    last = site.last or site.first[0]
    firsts = {node for ref in site.first for node in _products(graph, ref)}
    # `h = linear(x, w1, b1); a = gelu(h); y = linear(a, w2, b2)`: from the product with w2 up to those with w1
    regions = []
    for product in _products(graph, last):
        starts = [product] if site.last is None else _above(graph, product, firsts)
        inputs = {x for start in starts for x in graph.data(start)}
        output = _with_bias(graph, product, last)
        if len(inputs) != 1 or output is None:
            return None
        regions.append(GraphRegion(inputs.pop(), output))
    return regions if regions and all(_keeps_tokens(graph, region) for region in regions) else None


def reads(model: fx.GraphModule, node: fx.Node, tensor: Tensor) -> bool:
    """True if `node` reads the parameter `tensor`, by itself or through the module it calls; ACMs do not count."""
    if node.op not in ("get_attr", "call_module"):
        return False
    value: Any = model
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    if isinstance(value, nn.Module) and not isinstance(value, ACM):
        return any(held is tensor for held in (*value.parameters(), *value.buffers()))
    return value is tensor


def _inside_called_module(model: fx.GraphModule, tensor: Tensor) -> bool:
    """True if a module that is called, and is no plain linear, holds `tensor`."""
    for node in model.graph.nodes:
        if node.op == "call_module" and reads(model, node, tensor):
            parameters = dict(model.get_submodule(str(node.target)).named_parameters())
            if not set(parameters) <= {"weight", "bias"}:
                return True
    return False


def _constants(graph: fx.Graph) -> set[fx.Node]:
    constants: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (inputs and node.op != "call_module" and constants.issuperset(inputs)):
            constants.add(node)
    return constants


def _products(graph: _Graph, ref: LinearRef) -> list[fx.Node]:
    """The nodes that multiply by the rows that `ref` means."""
    weight = graph.tensors[ref.weight]
    found = []
    for node in graph.model.graph.nodes:
        if not reads(graph.model, node, weight):
            continue
        if node.op == "call_module":
            found.append(node)
            continue
        views = _views(node, weight)
        shown = [view for view, value in views.items() if isinstance(value, Tensor) and _overlaps(value, ref, weight)]
        found += [user for view in shown for user in view.users if user not in views]
    return list(dict.fromkeys(found))


def _views(node: fx.Node, weight: Tensor) -> dict[fx.Node, Any]:
    """The nodes computed from the parameter at `node` alone, each with the view of it that they give, on meta."""
    views: dict[fx.Node, Any] = {node: torch.empty_strided(weight.shape, weight.stride(), device="meta")}
    todo = [node]
    while todo:
        source = todo.pop()
        for user in source.users:
            if user in views or user.op not in ("call_function", "call_method") or user.all_input_nodes != [source]:
                continue
            views[user] = views[source] if name_of(user.target) in COPIES else _run(user, views)
            todo.append(user)
    return views


def _run(node: fx.Node, views: Mapping[fx.Node, Any]) -> Any:
    """The result of a call on views; what is none of them is a copy, and shows the same."""
    (source,) = node.all_input_nodes
    args, kwargs = fx.map_arg((node.args, node.kwargs), views.__getitem__)
    value = (
        node.target(*args, **kwargs) if callable(node.target) else getattr(args[0], node.target)(*args[1:], **kwargs)
    )
    return views[source] if isinstance(value, Tensor) and not value._is_view() else value


def _overlaps(view: Tensor, ref: LinearRef, weight: Tensor) -> bool:
    """True if `view` shows some of the rows of `ref`."""
    out_axis = 1 if ref.transposed else 0
    start = view.storage_offset() // weight.stride(out_axis)
    stop = start + view.numel() // weight.shape[1 - out_axis]
    low, high = ref.rows or (0, weight.shape[out_axis])
    return bool(start < high and low < stop)


def _above(graph: _Graph, product: fx.Node, firsts: set[fx.Node]) -> list[fx.Node]:
    """The nodes of `firsts` that `product` comes from."""
    return [node for node in upwards(graph.data(product), graph.data, stop=firsts) if node in firsts]


def _with_bias(graph: _Graph, product: fx.Node, ref: LinearRef) -> fx.Node | None:
    """The node of the product with its bias: itself, or the sum with a constant that alone reads it."""
    constants = len(product.all_input_nodes) - len(graph.data(product))
    if ref.bias is None or product.op == "call_module" or constants > 1:
        return product
    readers = list(product.users)
    is_sum = len(readers) == 1 and any(source in graph.constants for source in readers[0].all_input_nodes)
    return readers[0] if is_sum else None


def _keeps_tokens(graph: _Graph, region: GraphRegion) -> bool:
    """True if output and input have the same leading axes, which an ACM keeps."""
    before, after = (node.meta.get("val") for node in (region.x, region.output))
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return list(before.shape[:-1]) == list(after.shape[:-1])
    between = upwards([region.output], graph.data, stop={region.x})
    return not any(name_of(node.target) in _MOVING for node in between if node is not region.x)
