"""Graft R: stand-ins in the places of a site's parameters, where no module equals or frames the region."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.passes.rewrite.dense_region import DenseRegion
from acm_compiler.passes.rewrite.graft_modules import (
    TakenOut,
    owners_of,
    paths_of,
    put_module,
    registry_of,
    show_sizes,
    warn_of_hooks,
)
from acm_compiler.passes.rewrite.parameter_proxy import Replaced, stand_in_for, uses_of
from acm_compiler.site import Site

Tensors = Mapping[str, Tensor]


def graft_weights(model: nn.Module, sites: Sequence[Site], acms: Mapping[str, ACM], tensors: Tensors) -> None:
    """Put stand-ins in the places of the parameters of `sites`, all at once: sites may share a packed parameter.

    Each ACM is registered under its site's name. `tensors` are the model's, by name, from before the first graft.
    """
    owners = owners_of(model)
    sources: dict[str, Replaced] = {}
    former: dict[nn.Module, ACM] = {}
    for site in sites:
        acm = acms[site.name]
        for name, axis, use in uses_of(site, acm, tensors):
            sources.setdefault(name, Replaced(name=name, out_axis=axis)).uses.append(use)
        former |= dict.fromkeys(_place(model, site, acm), acm)
        acm.dense = DenseRegion(site, tensors)
    for name, source in sources.items():
        for owner, leaf in owners[id(tensors[name])]:
            if owner in former:
                # the ACM took its owner's place, and the forward asks it for the weight
                former[owner].__dict__[leaf] = stand_in_for(tensors[name], source)
            else:
                _replace(owner, leaf, source, tensors[name])


def _place(model: nn.Module, site: Site, acm: ACM) -> list[nn.Module]:
    """Register `acm` under the site's name, and wherever else the module is that was there; gives that module."""
    parent, _, leaf = site.name.rpartition(".")
    there = model.get_submodule(parent)._modules.get(leaf)
    acm.train(model.get_submodule(parent).training)
    paths = [site.name] if there is None else paths_of(model)[there]
    acm.replaced = TakenOut(modules=dict.fromkeys(paths, there))
    for path in paths:
        put_module(model, path, acm)
    if there is None:
        return []
    warn_of_hooks(there, site.name)
    show_sizes(there, acm)
    return [there]


def _replace(owner: nn.Module, leaf: str, source: Replaced, tensor: Tensor) -> None:
    """Let `owner` show a stand-in as its attribute `leaf`; where some rows stay dense it keeps the parameter too."""
    used = {row for use in source.uses for row in range(*use.rows)}
    if len(used) < tensor.shape[source.out_axis]:
        source = dataclasses.replace(source, owner=owner, leaf=leaf)
    else:
        registry_of(owner, leaf)[leaf] = None
    owner.__dict__[leaf] = stand_in_for(tensor, source)
    source.uses[0].acm.replaced.tensors.append((owner, leaf, source.name))
