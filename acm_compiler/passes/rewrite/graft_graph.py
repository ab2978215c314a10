"""Puts ACMs into a user's fx.GraphModule as nodes of its own graph.

before: fc1 = call_module fc1 (x); gelu = call_function gelu (fc1); fc2 = call_module fc2 (gelu)
after:  acm = call_module fc2 (x)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from acm_compiler.acm import ACM
from acm_compiler.passes.rewrite.dense_region import DenseRegion, tensor_names
from acm_compiler.passes.rewrite.graft_modules import TakenOut, owners_of, put_module, registry_of
from acm_compiler.passes.rewrite.graph_regions import GraphRegion, reads
from acm_compiler.site import Site


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
