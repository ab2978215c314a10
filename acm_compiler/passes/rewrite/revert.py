"""Takes ACMs out of a model again, or frees what is only kept to do so."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import refuse_adapted, refuse_in_parts, refuse_without_dense
from acm_compiler.errors import NoDenseRegion, UsageError
from acm_compiler.passes.capture.normalize import replace_children, restore_fast_path
from acm_compiler.passes.capture.unpacked_attention import UnpackedAttention
from acm_compiler.passes.rewrite.conversion import sites, wholly_rewritten
from acm_compiler.passes.rewrite.dense_region import DenseRegion
from acm_compiler.passes.rewrite.graft_modules import move_hooks, put_module, registry_of
from acm_compiler.passes.rewrite.saving_hooks import drop_budgets, unguard_saving


@torch.inference_mode(False)
def revert(model: nn.Module) -> nn.Module:
    """Put the dense modules and parameters back where ACMs are, in place; gives `model`.

    The dense weights are the ones from before the rewrite; the rest of the model stays as it was trained since.
    NotRewritten without ACMs; UsageError for a part of a rewritten model; NoDenseRegion after `finalize`, or after a
    load without the base model.
    """
    found = wholly_rewritten(model, "acm.revert")
    refuse_in_parts(model, "acm.revert")
    for name, acm in found.acms.items():
        if acm.dense is None:
            refuse_without_dense(name)
    root, undo = rewritten_root(model), found.owner.undo
    if isinstance(root, fx.GraphModule) and undo.graph is None:
        raise NoDenseRegion("the graph from before the rewrite was not pickled", fix="use acm.save and acm.load")
    for acm in found.acms.values():
        _put_back(root, acm)
    if isinstance(root, fx.GraphModule):
        root.graph = undo.graph
    for path, packed in undo.packed.items():
        _repack(root, path, packed)
    restore_fast_path(root, undo.fast_paths)
    unguard_saving(root)
    drop_budgets(root)
    return model


def finalize(model: nn.Module) -> nn.Module:
    """Free the dense regions that no forward runs, in place; gives `model`.

    Sites whose learners were never fitted keep theirs. Afterwards `revert`, calibration and distillation raise
    NoDenseRegion until the model is loaded with its base model.
    """
    for acm in sites(model).values():
        if acm.state != "dense":
            acm.dense, acm.replaced = None, None
    return model


def rewritten_root(model: nn.Module) -> nn.Module:
    """The model that was rewritten, which `model` may wrap (DDP, compiled). UsageError for a part of it."""
    acms = sites(model)
    refuse_adapted(acms, "this call, for a rewritten model,")
    name, acm = next(iter(acms.items()))
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if module is acm]
    prefix = next((path.removesuffix(name) for path in paths if path.endswith(name)), "")
    root = model.get_submodule(prefix.rstrip("."))
    try:
        root.get_submodule(name)
    except AttributeError:
        raise UsageError(
            "this is a part of a rewritten model",
            found=f"a {type(model).__name__} without {name}, by that name",
            fix="name the model that acm.rewrite or acm.load gave",
        ) from None
    return root


def _put_back(root: nn.Module, acm: ACM) -> None:
    taken, dense = acm.replaced, acm.dense
    assert dense is not None  # `revert` has seen to it
    for name in taken.frozen:
        dense.get_parameter(name).requires_grad_(True)
    if isinstance(dense, DenseRegion):
        held = dense.held()
        for owner, leaf, name in taken.tensors:
            owner.__dict__.pop(leaf, None)
            registry_of(owner, leaf)[leaf] = held[name]
    elif len(set(taken.modules.values())) == 1:
        move_hooks(acm, dense)
    for path, module in taken.modules.items():
        if module is not None:
            module.train(acm.training)
        _put(root, path, module)


def _put(root: nn.Module, path: str, module: nn.Module | None) -> None:
    if module is None:
        parent, _, leaf = path.rpartition(".")
        del root.get_submodule(parent)._modules[leaf]
    elif isinstance(root, fx.GraphModule):
        root.add_submodule(path, module)
    else:
        put_module(root, path, module)


@torch.no_grad()
def _repack(root: nn.Module, path: str, packed: nn.MultiheadAttention) -> None:
    """Put `packed` back in the place of the attention at `path`, with that one's weights."""
    unpacked = root.get_submodule(path)
    assert isinstance(unpacked, UnpackedAttention)
    linears = (unpacked.q_proj, unpacked.k_proj, unpacked.v_proj)
    weights: list[Any] = [linear.weight for linear in linears]
    if packed._qkv_same_embed_dim:
        packed.in_proj_weight = _joined(weights)
    else:
        packed.q_proj_weight, packed.k_proj_weight, packed.v_proj_weight = weights
    if linears[0].bias is not None:
        packed.in_proj_bias = _joined([linear.bias for linear in linears])
    packed.out_proj = unpacked.out_proj  # type: ignore[assignment]
    packed.bias_k, packed.bias_v = unpacked.bias_k, unpacked.bias_v  # type: ignore[assignment]
    packed.training = unpacked.training
    replace_children(root, {unpacked: packed})


def _joined(parts: list[Any]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(parts)), requires_grad=any(part.requires_grad for part in parts))
