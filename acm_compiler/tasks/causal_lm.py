"""The next token: cross entropy and perplexity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.inputs import Inputs
from acm_compiler.tasks.token_logits import centred, token_logits, tokens_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """A `Task`: logits [B, S, V] at token s against token s + 1 of `input_ids` [B, S].

    Where `attention_mask` is 0 there is no token: nothing is predicted there, and nothing from there.
    """

    metric: ClassVar[str] = "perplexity"
    lower_is_better: ClassVar[bool] = True

    def inputs(self, batch: Batch) -> Inputs:
        """The tokens, and which of them are real."""
        return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}

    def mask(self, batch: Batch) -> Tensor | None:
        """The batch's `attention_mask` as bool [B, S]."""
        mask = batch.get("attention_mask")
        return None if mask is None else mask.bool()

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean cross entropy over all predicted tokens, in nats and fp32."""
        predicted_BS = self._predicted(batch)
        return self._surprise(output, batch).sum() / predicted_BS.sum().clamp_min(1)

    def score(self, output: Any, batch: Batch) -> Tensor:
        """Cross entropy summed over each text's predicted tokens, in nats; fp32 [B]."""
        return self._surprise(output, batch).sum(1)

    def units(self, batch: Batch) -> Tensor:
        """Predicted tokens of each text, fp32 [B]."""
        return self._predicted(batch).sum(1).float()

    def scale(self, mean: Tensor) -> Tensor:
        """Perplexity, from the mean cross entropy."""
        return mean.exp()

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The logits [B, S, V] without their mean over V, which changes no probability; 0 where `mask` [B, S] is."""
        return centred(self._logits(output), mask)

    def _surprise(self, output: Any, batch: Batch) -> Tensor:
        """-log p of every token after the first, [B, S - 1]; 0 at padding."""
        logits_BVS = self._logits(output)[:, :-1].float().transpose(1, 2)
        found_BS = F.cross_entropy(logits_BVS, batch["input_ids"][:, 1:], reduction="none")
        return found_BS * self._predicted(batch)

    def _predicted(self, batch: Batch) -> Tensor:
        """bool [B, S - 1]: tokens after the first that are real and follow a real one."""
        ids_BS = tokens_of(batch, task="causal_lm")
        mask_BS = self.mask(batch)
        if mask_BS is None:
            mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        return mask_BS[:, 1:] & mask_BS[:, :-1]

    def _logits(self, output: Any) -> Tensor:
        return token_logits(output, task="causal_lm", auto_class="AutoModelForCausalLM")
