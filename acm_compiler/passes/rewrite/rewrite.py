"""A model and its plan -> the same model with an ACM in every site's place.

before: x + self.mlp(self.norm(x))           mlp: Sequential(Linear, GELU, Linear)
after:  x + self.mlp(self.norm(x))           mlp: ACM(gate, learners, dense: Sequential(Linear, GELU, Linear))
"""

from __future__ import annotations

import copy
import os
import pickle
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from acm_compiler.acm import ACM
from acm_compiler.errors import AlreadyRewritten, CompiledModelError, NothingToConvert, UsageError, check_bool
from acm_compiler.passes.capture.global_state import enclosed
from acm_compiler.passes.capture.normalize import disable_fast_path, normalize, normalized
from acm_compiler.passes.rewrite.build_acm import build_acm, start
from acm_compiler.passes.rewrite.conversion import Conversion, gates_digest, refuse_inference_tensors, refuse_no_module
from acm_compiler.passes.rewrite.dense_region import check_named, check_tensors, named_tensors, weights_digest
from acm_compiler.passes.rewrite.graft_graph import find_in_graph, graft_graph
from acm_compiler.passes.rewrite.graft_modules import freeze_dense_regions, graft_modules, graft_weights, paths_of
from acm_compiler.passes.rewrite.offload import file_copy, kept, offloading
from acm_compiler.passes.rewrite.saving_hooks import carry_budgets, guard_saving
from acm_compiler.passes.rewrite.site_functions import check_functions
from acm_compiler.passes.rewrite.stand_ins import acm_class
from acm_compiler.planning.cost import learner_unit
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.planning.plan import Plan, check_fits, warn_of_class

_SHOWN = 5
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Undo:
    """Changes that `rewrite` made around the ACMs, for `revert`.

    `packed`: by path, the attentions that were unpacked, without their packed weights. `fast_paths`: switches that
    were on. `graph`: the graph of an fx.GraphModule before ACMs were put into it.
    """

    packed: dict[str, nn.MultiheadAttention] = field(default_factory=dict)
    fast_paths: dict[str, int] = field(default_factory=dict)
    graph: fx.Graph | None = None

    def __reduce__(self) -> tuple[type[Undo], tuple[Any, ...]]:
        # graphs cannot be pickled; an unpickled model runs all the same, and refuses `revert`
        return Undo, (self.packed, self.fast_paths)

    def __deepcopy__(self, memo: dict[int, Any]) -> Undo:
        return Undo(copy.deepcopy(self.packed, memo), dict(self.fast_paths), copy.deepcopy(self.graph, memo))


@torch.inference_mode(False)
def rewrite(
    model: nn.Module, plan: Plan, *, inplace: bool = False, offload: str | os.PathLike[str] | None = None
) -> nn.Module:
    """`model` with an ACM at every site of `plan`: a copy, or the model itself with `inplace`.

    Class, call, and the names in the state dict of what was not replaced stay. Its outputs stay the same up to rounding
    (MLPs run all their learners, linear sites their dense region), but for sites planned with init="random".
    Learners and gates are new parameters, and what they replaced is frozen: make optimizers afterwards.
    Its tensors are ordinary ones also when this is called inside `torch.inference_mode`.
    A class of another name with the same parameters is the same model, renamed: the log warns of it.
    offload: a folder, or "disk" for the system's own for temporary files, for models that memory does not hold: what is
    new lies in files there, without names, whose pages come and go; what the model has stays where it is. "cpu" is for
    `calibrate`: here all of it lies where the model does.
    Raises PlanMismatch for another model, also one of the same sizes with another activation, AlreadyRewritten,
    NothingToConvert for a plan without sites, StorageError for a folder that cannot be written, and UsageError for
    inference tensors that `inplace` would keep.
    """
    check_bool(inplace, "inplace")
    _check_live(model, plan)
    if inplace:
        refuse_inference_tensors(model)
    with offloading(None if offload == "cpu" else offload):
        model = model if inplace else copied(model)
        convert(model, plan)
    return model


def rewrite_beside(model: nn.Module, plan: Plan, *, offload: str | os.PathLike[str] | None = None) -> nn.Module:
    """`rewrite` of a copy that shares the memory of `model`'s weights, for callers that change none of them."""
    _check_live(model, plan)
    with torch.inference_mode(False), offloading(None if offload == "cpu" else offload):
        beside = copied(model, lent=True)
        convert(beside, plan)
    return beside


def _check_live(model: nn.Module, plan: Plan) -> None:
    """`check_convertible`, and UsageError for a model without weights."""
    check_convertible(model, plan)
    warn_of_class(plan, model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            f"this {type(model).__name__} has no weights: it is on meta", fix="load its weights, then rewrite it"
        )


def check_convertible(model: nn.Module, plan: Plan, *, resized: bool = False) -> None:
    """Raise the AcmError that says why `plan` cannot be applied to `model`, if it cannot.

    resized: parameters outside the sites may be others than in the model that the plan was made for.
    """
    if not isinstance(plan, Plan):
        raise UsageError("this is not a plan", found=type(plan).__name__, fix="plan = acm.plan(model, example_inputs)")
    refuse_no_module(model)
    if hasattr(model, "_orig_mod"):
        raise CompiledModelError("a compiled model cannot be rewritten", fix="rewrite the eager model, then compile it")
    if any(isinstance(module, ACM) for module in model.modules()):
        raise AlreadyRewritten(
            f"this {type(model).__name__} holds ACMs already", fix="rewrite the original, or acm.revert(model) first"
        )
    if not resized:
        check_fits(plan, model)
    if not plan.sites:
        skips = [f"\n  {skip.name}: {skip.reason}" for skip in plan.skipped[:_SHOWN]]
        more = len(plan.skipped) - _SHOWN
        skips += [f"\n  and {more} more"] if more > 0 else []
        raise NothingToConvert(
            f"the plan holds no site; these stay dense:{''.join(skips) or ' everything'}",
            fix="plan with sites= that select something; docs/models.md explains the reasons",
        )
    with normalized(model) as seen:
        if seen is not model:
            raise UsageError("the model is itself an attention, which cannot be replaced", fix="put it into a module")
        check_tensors(plan.sites, seen)
        modules = dict(seen.named_modules(remove_duplicate=False))
        for site in plan.sites:
            check_named(site.graft.modules, modules, "modules", site, seen)
        if not resized:
            check_functions(plan.sites, seen, named_tensors(seen))


def copied(model: nn.Module, *, lent: bool = False) -> nn.Module:
    """A deep copy of `model`, but for the memory of its parameters if that is `lent`; UsageError when it cannot be."""
    for path, module in model.named_modules():
        rebuilt = type(module).__setstate__ is not nn.Module.__setstate__  # as compiled modules are
        if _encloses_module(vars(module).get("forward")) and not rebuilt:
            raise UsageError(
                f"this {type(model).__name__} cannot be copied: the copy would run this one's modules",
                where=path or type(model).__name__,
                found="a function in the place of its forward",
                fix="pass inplace=True to change the model itself",
            )
    try:
        return copy.deepcopy(model, _copies(model, lent=lent))
    except (RuntimeError, TypeError, pickle.PickleError) as error:
        part, found = _part_of_graph(model), str(error).splitlines()[0]
        first = f"detach {part}, or " if part else ""
        if part and (norm := _old_norm(model.get_submodule(part.rpartition(".")[0]))):
            found = f"a weight that torch.nn.utils.{norm} computes"
            first = f"torch.nn.utils.remove_{norm}(module), or parametrizations.{norm} in its place, then plan it; or "
        fix = f"{first}pass inplace=True to change the model itself"
        raise UsageError(f"this {type(model).__name__} cannot be copied", where=part, found=found, fix=fix) from error


def _old_norm(module: nn.Module) -> str | None:
    """The norm of `torch.nn.utils`, by a hook and not by a parametrization, that computes a weight of `module`."""
    kinds = [type(hook).__module__ for hook in module._forward_pre_hooks.values()]
    norms = ("weight_norm", "spectral_norm")
    return next((norm for norm in norms if f"torch.nn.utils.{norm}" in kinds), None)


def _part_of_graph(model: nn.Module) -> str | None:
    """The first attribute that holds a result with gradients, which torch does not copy; None where there is none."""
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            held = () if name in _REGISTRIES else pytree.tree_leaves(value)
            if any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in held):
                return f"{path}.{name}".strip(".")
    return None


def _copies(model: nn.Module, *, lent: bool) -> dict[int, Any]:
    """Parameters that a `deepcopy` of the model is to take in place of copies of its own: copies in files while
    offloading, or what they are where that is lent.
    """
    plain = [(parameter, parameter.data) for parameter in model.parameters() if type(parameter) is nn.Parameter]
    there = ((parameter, data, data if lent else file_copy(data)) for parameter, data in plain)
    return {id(p): nn.Parameter(own, p.requires_grad) for p, data, own in there if lent or own is not data}


def _encloses_module(forward: Any) -> bool:
    """True if `forward` is a function, which is not copied, that knows a module or a method of one."""
    if not isinstance(forward, types.FunctionType):
        return False
    known = (part for value in enclosed(forward) for part in (value, getattr(value, "__self__", None)))
    return any(isinstance(part, nn.Module) for part in known)


def convert(model: nn.Module, plan: Plan, *, empty: bool = False) -> Conversion:
    """Put the ACMs of `plan` into `model`, which `check_convertible` has passed, in place; gives their conversion.

    `empty`: the ACMs have no values (they are on meta) and the states that the plan says, for a loader to fill.
    """
    undo = Undo(fast_paths=disable_fast_path(model, around=_touched(plan)))
    undo.packed = _unpack(model, plan)
    tensors = named_tensors(model)
    owner = Conversion(plan=plan, teacher=weights_digest(plan.sites, model), undo=undo)
    if isinstance(model, fx.GraphModule):
        undo.graph, model.graph = model.graph, copy.deepcopy(model.graph)
    acms = _graft_all(model, plan, tensors, empty=empty)
    freeze_dense_regions(model, acms.values())
    for acm in acms.values():
        acm.conversion = owner
    owner.start_gates = None if empty else gates_digest(acms.values())
    guard_saving(model)
    carry_budgets(model)
    return owner


def _graft_all(model: nn.Module, plan: Plan, tensors: Mapping[str, Tensor], *, empty: bool) -> dict[str, ACM]:
    unit, paths = learner_unit(plan.sites), paths_of(model)
    acms: dict[str, ACM] = {}
    by_weights: list[PlannedSite] = []
    for site in plan.sites:
        regions = find_in_graph(model, site, tensors) if isinstance(model, fx.GraphModule) else None
        like = tensors[site.first[0].weight]
        cls = acm_class(site) if regions is None else ACM
        acm = build_acm(site, like=like.to("meta") if empty else like, unit=unit, cls=cls)
        if empty:
            acm.state = site.state
        else:
            start(acm, site, tensors)
            kept(acm)
        acms[site.name] = acm
        if regions is not None:
            assert isinstance(model, fx.GraphModule)
            graft_graph(model, site, acm, regions, tensors)
        elif site.graft.kind == "R":
            by_weights.append(site)
        else:
            graft_modules(model, site, acm, tensors, paths=paths)
    graft_weights(model, by_weights, acms, tensors)
    if isinstance(model, fx.GraphModule):
        model.graph.lint()
        model.recompile()
    return acms


def _touched(plan: Plan) -> list[str]:
    """The modules and parameters that the sites name."""
    names = [name for site in plan.sites for name in site.graft.modules if name]
    return names + [ref.weight for site in plan.sites for ref in site.refs]


def _unpack(model: nn.Module, plan: Plan) -> dict[str, nn.MultiheadAttention]:
    """Unpack the attentions that hold a site; gives them by path, stripped of the weights that were copied out."""
    attentions = {path: m for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    packed = {path: attentions[path] for path in normalize(model, only=_touched(plan))}
    for attention in packed.values():
        for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            attention._parameters[name] = None
    return packed
