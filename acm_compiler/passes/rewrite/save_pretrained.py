"""Keeps `model.save_pretrained` from writing a folder that transformers would load with random weights."""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.errors import UsageError

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
