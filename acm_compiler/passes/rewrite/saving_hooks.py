"""Lets `model.state_dict()` carry what budgets need beside the weights: the budget table, and what every site runs.

It is text, JSON in UTF-8, under the key that torch keeps for extra state; a tensor of bytes, so that whatever copies,
moves or stores the tensors of a state dict does so with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.files import parse_json
from acm_compiler.passes.rewrite.conversion import BudgetTable, conversion, sites

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
    owner = conversion(model)
    if owner.table is not None:
        facts = {
            "format": _FORMAT,
            "sites": {name: {"state": acm.state, "rule": acm.gate.rule} for name, acm in sites(model).items()},
            "table": asdict(owner.table),
            "damage": owner.damage,
            "default_budget": owner.default_budget,
        }
        state_dict[prefix + KEY] = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


def _take(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Restore what `_add` wrote; what does not belong to this model becomes one of the load's own error messages."""
    errors: list[str] = rest[-1]
    text: Tensor | None = state_dict.pop(prefix + KEY, None)
    other = [name for name, acm in _acms(model) if _is_of_another_form(acm, state_dict, f"{prefix}{name}.")]
    if other:
        errors.append(
            f"the learners of {len(other)} sites have another form than here, such as {other[0]}: rewrite by the plan "
            "that acm.calibrate returned, acm.rewrite(model, plan), whose forms are decided; plan.to_json() keeps it"
        )
    if text is None or other:
        return
    facts = parse_json(bytes(text.cpu().tolist()))
    acms = sites(model)
    if facts["format"] != _FORMAT:
        errors.append(f"the budget table has format {facts['format']}, this version reads {_FORMAT}: update it")
    elif facts["sites"].keys() != acms.keys():
        odd = min(facts["sites"].keys() ^ acms.keys())
        errors.append(f"the budget table is of a model with other sites, such as {odd}: rewrite with the same plan")
    else:
        for name, acm in acms.items():
            acm.state, acm.gate.rule = facts["sites"][name]["state"], facts["sites"][name]["rule"]
        owner = conversion(model)
        owner.table, owner.default_budget = BudgetTable.from_plain(facts["table"]), facts["default_budget"]
        owner.damage = {name: tuple(values) for name, values in facts["damage"].items()}


def _acms(model: nn.Module) -> list[tuple[str, ACM]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, ACM)]


def _is_of_another_form(acm: ACM, state_dict: dict[str, Any], prefix: str) -> bool:
    """Whether torch will refuse the learners under `prefix`, strict or not, because their shapes are others."""
    learners = acm.learners.named_parameters(prefix=f"{prefix}learners")
    return any(name in state_dict and state_dict[name].shape != own.shape for name, own in learners)
