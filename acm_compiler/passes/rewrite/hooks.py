"""What becomes of the user's hooks on modules that an ACM replaces."""

from __future__ import annotations

import warnings

from torch import nn

_TABLES = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook"),
)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class LostHookWarning(UserWarning):
    """A hook, or a forward that was patched, on a module that no longer runs."""


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the hooks of `old` to `new`, which takes its place with the same inputs and outputs."""
    for name in _TABLES:
        # the very tables, so that handles given out before still remove their hooks
        mine, theirs = getattr(new, name), getattr(old, name)
        setattr(new, name, theirs)
        setattr(old, name, mine)


def warn_of_hooks(module: nn.Module, site: str) -> None:
    """Warn, by name, of hooks and patched forwards on `module` and inside it that will not run any more."""
    for path, part in module.named_modules():
        kinds = [name.strip("_").replace("_", " ") for name in _HOOKS if getattr(part, name)]
        if "forward" in part.__dict__:
            kinds.append("a forward of its own")
        if kinds:
            where = f"{type(part).__name__} {path}".strip()
            warnings.warn(
                f"{site}: {', '.join(kinds)} of the {where} that was here will not run: an ACM took its place",
                LostHookWarning,
                stacklevel=2,
            )
