"""Hooks for the user's own saving: `state_dict()` carries budgets, `save_pretrained` writes what can be loaded.

The extra state is JSON in UTF-8 as a tensor of bytes, so that whatever copies, moves or stores the tensors of a state
dict does so with it. transformers alone would load a converted model's folder with random weights.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.errors import UsageError, counted
from acm_compiler.files import parse_json
from acm_compiler.passes.rewrite.conversion import plain_facts, restore_facts, rewritten

KEY = "_extra_state"
_FORMAT = 1


def carry_budgets(model: nn.Module) -> None:
    """Let state dicts of `model`, a rewritten one, hold its budget table once it has one, and give it back."""
    model.register_state_dict_post_hook(_add)
    model.register_load_state_dict_pre_hook(_take)


def drop_budgets(model: nn.Module) -> None:
    """Undo `carry_budgets`."""
    for hooks in (model._state_dict_hooks, model._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", hook) in (_add, _take)]:
            del hooks[key]


def _add(model: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    found = rewritten(model)
    if found.owner.table is not None:
        facts = {"format": _FORMAT, **plain_facts(found)}
        state_dict[prefix + KEY] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


def _take(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Restore what `_add` wrote; what does not belong to this model becomes one of the load's own error messages."""
    errors: list[str] = rest[-1]
    text: Tensor | None = state_dict.pop(prefix + KEY, None)
    here = [(name, module) for name, module in model.named_modules() if isinstance(module, ACM)]
    other = [name for name, acm in here if _is_of_another_form(acm, state_dict, f"{prefix}{name}.")]
    if other:
        errors.append(
            f"the learners of {counted(len(other), 'site')} have another form than here, such as {other[0]}: rewrite "
            "by the plan that acm.calibrate returned, acm.rewrite(model, plan), whose forms are decided; "
            "plan.to_json() keeps it"
        )
    kinds = [name for name, acm in here if _is_of_another_kind(acm, state_dict, f"{prefix}{name}.")]
    if kinds:
        there, own = (
            _kind(w) for w in (state_dict[f"{prefix}{kinds[0]}.{_FIRST}"], dict(here)[kinds[0]].learners.w_in)
        )
        errors.append(
            f"the learners of {counted(len(kinds), 'site')} are {there} on one side and {own} on the other, such as "
            f'{kinds[0]}: acm.quantize(model, "{there if own == "floats" else own}") before a state dict of such a '
            "model is loaded"
        )
    if text is None or other or kinds:
        return
    facts = parse_json(bytes(text.cpu().tolist()))
    found = rewritten(model)
    if facts["format"] != _FORMAT:
        errors.append(f"the budget table has format {facts['format']}, this version reads {_FORMAT}: update it")
    elif facts["sites"].keys() != found.acms.keys():
        odd = min(facts["sites"].keys() ^ found.acms.keys())
        errors.append(f"the budget table is of a model with other sites, such as {odd}: rewrite with the same plan")
    else:
        restore_facts(found.owner, found.acms, facts)


def _is_of_another_form(acm: ACM, state_dict: dict[str, Any], prefix: str) -> bool:
    """True if torch will refuse the learners under `prefix`, strict or not, because their shapes are others."""
    learners = acm.learners.named_parameters(prefix=f"{prefix}learners")
    return any(name in state_dict and state_dict[name].shape != own.shape for name, own in learners)


def _is_of_another_kind(acm: ACM, state_dict: dict[str, Any], prefix: str) -> bool:
    """True if weights of learners are there of another kind than those of `acm`: floats, int8 or int4."""
    there = state_dict.get(f"{prefix}{_FIRST}")
    return there is not None and _kind(there) != _kind(acm.learners.w_in)


def _kind(weight: Tensor) -> str:
    return {torch.int8: "int8", torch.uint8: "int4"}.get(weight.dtype, "floats")


_FIRST = "learners.w_in"


_METHOD = "save_pretrained"


class SavePretrained:
    """`save_pretrained` of a rewritten model, or of a part of one that holds ACMs; an object, so that it is copied."""

    def __init__(self, model: nn.Module, *, is_whole: bool) -> None:
        self.model, self.is_whole = model, is_whole

    def __call__(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: Any = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Write the model by `acm.save`; files of others in the folder stay. `options` are about other formats."""
        refuse_part(self.model)
        if state_dict is not None or push_to_hub:
            raise UsageError(
                "a rewritten model is saved as it is, to a folder",
                found="push_to_hub" if push_to_hub else "state_dict",
                fix="model.save_pretrained(directory); to upload it afterwards: model.push_to_hub(name)",
            )
        if is_main_process:
            # the user's own call, which ends in a room above this one
            importlib.import_module("acm_compiler").save(self.model, save_directory, among_others=True)


def refuse_part(model: nn.Module, *, whole: bool = True) -> None:
    """UsageError for a part of a rewritten model, whose plan names the sites of the whole.

    whole: whether all those sites are in `model`.
    """
    guard = model.__dict__.get(_METHOD)
    if not whole or (isinstance(guard, SavePretrained) and not guard.is_whole):
        raise UsageError(
            f"this {type(model).__name__} is a part of a rewritten model and cannot be saved by itself",
            fix="save the whole model: acm.save(model, directory)",
        )


def guard_saving(model: nn.Module) -> None:
    """Let `save_pretrained` of `model`, and of its parts that hold ACMs, write what can be loaded."""
    for module in model.modules():
        if callable(getattr(module, _METHOD, None)) and any(isinstance(part, ACM) for part in module.modules()):
            module.__dict__[_METHOD] = SavePretrained(module, is_whole=module is model)


def unguard_saving(model: nn.Module) -> None:
    """Undo `guard_saving`."""
    for module in model.modules():
        if isinstance(module.__dict__.get(_METHOD), SavePretrained):
            del module.__dict__[_METHOD]
