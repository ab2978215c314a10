"""ACMs in a model that vLLM builds: their places are kept free while it fuses layers, then they move in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.context import Said
from acm_compiler.acm.module import RUN_TIME
from acm_compiler.acm.reference import choose_k
from acm_compiler.errors import PlanMismatch, StorageError, UsageError
from acm_compiler.passes.rewrite.build_acm import build_acm
from acm_compiler.passes.rewrite.graft_modules import Paths, paths_of, put_module, stand_ins_of
from acm_compiler.passes.rewrite.stand_ins import StashedACM
from acm_compiler.planning.cost import learner_unit
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.runtime.control import highest_k
from acm_compiler.serving.vllm.budgets import SET_ONE, SavedBudgets, TokenSettings


class ServedACM(ACM):
    """An ACM whose tokens are of many requests, each with its own setting."""

    token_knob: Tensor
    token_k_lo: Tensor

    def follow(self, tokens: TokenSettings) -> None:
        """Read every token's setting from `tokens`."""
        self.register_buffer("token_knob", tokens.knob, persistent=False)
        self.register_buffer("token_k_lo", tokens.k_lo, persistent=False)

    def choose(self, x_TD: Tensor, shape: torch.Size, said: Said | None = None) -> Tensor:
        """k of every token, int32 [T]."""
        tokens = x_TD.shape[0]
        u_TC = self.utilities(x_TD, self.token_knob[:tokens])
        return choose_k(u_TC, self.token_k_lo[:tokens], self.k_hi, self.k_min)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take the weights saved for this site, by their names in it, as vLLM's loader hands them on."""
        places = dict(self.named_parameters()) | dict(self.named_buffers())
        loaded = set()
        for name, tensor in weights:
            place = None if name in RUN_TIME else places.get(name)
            if place is None or place.shape != tensor.shape:
                found, expected = tuple(tensor.shape), None if place is None else tuple(place.shape)
                raise StorageError(f"{name} does not fit", where=self.name, found=found, expected=expected)
            place.data.copy_(tensor)
            loaded.add(name)
        return loaded


class ServedStash(ServedACM, StashedACM):
    """The same on the input that was stashed at the first linear."""


class _Place(nn.Module):
    """Nothing that vLLM would replace or fuse."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Places:
    """The places of a plan's sites in a model that is being built.

    model: transformers' own, `prefix` the path at which its names begin in the plan. UsageError for sites that are no
    modules of their own, PlanMismatch where the model has no such module.
    """

    def __init__(self, model: nn.Module, sites: Iterable[PlannedSite], *, prefix: str) -> None:
        self._model, self._sites = model, tuple(sites)
        paths = paths_of(model)
        self._paths: dict[str, list[list[str]]] = {s.name: _modules(model, s, prefix, paths) for s in self._sites}
        kept = [path for of_site in self._paths.values() for of_module in of_site for path in of_module]
        for path in kept:
            put_module(model, path, _Place())
        for parent in {path.rpartition(".")[0] for path in kept}:
            _set_apart(model.get_submodule(parent))

    def fill(self, saved: SavedBudgets, tokens: TokenSettings, *, like: Tensor) -> None:
        """Put ACMs without values there, on the device and in the type of `like`."""
        unit = learner_unit(saved.owner.plan.sites)
        for site in self._sites:
            acm = _built(site, saved, like, unit)
            acm.follow(tokens)
            for paths, module in zip(self._paths[site.name], stand_ins_of(site, acm), strict=True):
                for path in paths:
                    put_module(self._model, path, module)


def _modules(model: nn.Module, site: PlannedSite, prefix: str, paths: Paths) -> list[list[str]]:
    """The paths of every module that makes room for `site`."""
    if site.graft.kind in ("R", "P"):
        raise UsageError(
            "vLLM can be given ACMs in the place of modules that are one layer",
            where=site.name,
            found="this one takes the place of " + ("parameters" if site.graft.kind == "R" else "several projections"),
            fix="plan again without it: acm.plan(model, inputs, exclude=[name]), or a rule's exclude",
        )
    inside = [name.removeprefix(f"{prefix}.") for name in site.graft.modules]
    try:
        return [paths[model.get_submodule(name)] for name in inside]
    except AttributeError as error:
        raise PlanMismatch(
            f"this {type(model).__name__} has no such module",
            where=site.name,
            found=str(error),
            fix="install the transformers that model.json names",
        ) from error


def _set_apart(parent: nn.Module) -> None:
    """Give `parent` a class of its own: what vLLM knows of fusing its class is remembered by class."""
    cls: Any = type(parent)
    parent.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _built(site: PlannedSite, saved: SavedBudgets, like: Tensor, unit: float) -> ServedACM:
    stashed = site.graft.kind == "S" and site.last is not None
    acm: Any = build_acm(site, like=like, unit=unit, cls=ServedStash if stashed else ServedACM)
    acm.gate.rule, acm.conversion = saved.rules.get(site.name, acm.gate.rule), saved.owner
    if saved.owner.quantized and acm.learners.can_quantize(saved.owner.quantized):
        acm.learners.quantize(saved.owner.quantized)  # what it holds is of the right kind then
    acm.requires_grad_(False)
    most = highest_k(acm.count, saved.owner.cap)
    for setting, chosen in zip(saved.own[:2], (saved.choices or {}).get(site.name, {}).values(), strict=False):
        if tuple(chosen[1:]) != acm.within(setting.k_lo, most):
            raise UsageError(
                "this folder was saved with a k of its own at a site",
                where=site.name,
                fix=SET_ONE,
            )
    acm.set_choices(knob=0.0, k_lo=acm.k_min, k_hi=most)
    return acm.eval()
