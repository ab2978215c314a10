"""In what a base model is not built as the model that was saved."""

from __future__ import annotations

from torch import nn

from acm_compiler.checkpoint.tensors import Stored
from acm_compiler.errors import PlanMismatch
from acm_compiler.passes.capture.normalize import normalized
from acm_compiler.passes.rewrite.dense_region import check_tensors, named_tensors, tensor_names
from acm_compiler.planning.plan import Plan

Shape = tuple[int, ...]


def first_difference(base: nn.Module, plan: Plan, stored: Stored) -> tuple[str, str] | None:
    """What is found in `base` first that is otherwise in the saved model, and what is expected there; None if nothing.

    First what stays beside ACMs, then the dense weights of sites.
    """
    kept = _kept_shapes(plan, stored)
    replaced = {name for site in plan.sites for name in tensor_names(site)}
    with normalized(base) as unpacked:
        packed, own = named_tensors(base), named_tensors(unpacked)
        for name, tensor in own.items():
            found = tuple(tensor.shape)
            if name in kept and found != kept[name]:
                return _text(name, found), _text(name, kept[name])
            known = name in kept or name in replaced or _is_in_site(plan, name)
            if name in packed and not known and isinstance(tensor, nn.Parameter):
                return _text(name, found), "nothing of that name"
        for name, expected in kept.items():
            if name not in own and name not in packed:
                return f"no {name}", _text(name, expected)
        try:
            check_tensors(plan.sites, unpacked)
        except PlanMismatch as error:
            missing = error.expected is None
            return f"{error.where} {'without ' if missing else ''}{error.found}", str(error.expected or "them")
    return None


def _kept_shapes(plan: Plan, stored: Stored) -> dict[str, Shape]:
    """The saved tensors that are of no ACM, under all their names."""
    tensors = stored.tensors | {name: stored.tensors[owner] for name, owner in stored.aliases.items()}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if not _is_in_site(plan, name)}


def _is_in_site(plan: Plan, name: str) -> bool:
    return any(name.startswith(f"{site.name}.") for site in plan.sites)


def _text(name: str, shape: Shape) -> str:
    return f"{name} {list(shape)}"
