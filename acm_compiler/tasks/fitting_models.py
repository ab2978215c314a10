"""Which task a model of transformers is for, told by its class: answers of another one have the right shape, too."""

from __future__ import annotations

import re

from torch import nn

from acm_compiler.errors import UsageError

# XLM's and Flaubert's …WithLMHeadModel may be either
_HEADS = {
    r"ForCausalLM|(?<!With)LMHeadModel": ("causal_lm", "writes the next token, and sees only what came before"),
    r"ForMaskedLM": ("masked_lm", "guesses hidden tokens, and sees what comes after them"),
    r"ForCTC": ("ctc", "writes down audio"),
    r"For(Sequence|Image|Audio|Video)Classification": ("classify", "answers one class per example"),
}


def refuse_other_head(task: str, model: nn.Module, *, auto_class: str) -> None:
    """Refuse a model whose class says that it is for another task; `auto_class`: the one that fits. UsageError."""
    name = type(model).__name__
    for pattern, (fits, what) in _HEADS.items():
        if re.search(rf"({pattern})$", name) and task != fits:
            raise UsageError(
                f"the model is not for task {task}",
                where=name,
                found=f"a model that {what}: task {fits}",
                fix=f"use task {fits}, or another model (for hf: auto_class {auto_class})",
            )
