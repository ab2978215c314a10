"""The next token: cross entropy and perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.inputs import Inputs
from acm_compiler.tasks.language import LanguageModel
from acm_compiler.tasks.token_logits import tokens_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM(LanguageModel):
    """A `Task`: logits [B, S, V] at token s against token s + 1 of `input_ids` [B, S].

    Where `attention_mask` is 0 there is no token: nothing is predicted there, and nothing from there.
    """

    metric: ClassVar[str] = "perplexity"
    kind: ClassVar[str] = "causal_lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    ahead: ClassVar[int] = 1

    def inputs(self, batch: Batch) -> Inputs:
        """The tokens, and which of them are real."""
        return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}

    def guessed(self, batch: Batch) -> Tensor:
        """bool [B, S - 1]: tokens after the first that are real and follow a real one."""
        ids_BS, mask_BS = tokens_of(batch, task=self.kind), self.mask(batch)
        if mask_BS is None:
            mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        return mask_BS[:, 1:] & mask_BS[:, :-1]
