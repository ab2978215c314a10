"""What tasks have in common that guess tokens: cross entropy over the guessed ones, and its perplexity.

Shapes: B texts, S tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.tasks.model_inputs import padding_mask
from acm_compiler.tasks.token_logits import centred, roots, token_logits, tokens_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel(ABC):
    """A `Task` but for `inputs`: logits [B, S, V] at token s against token s + `ahead` of `input_ids` [B, S]."""

    kind: ClassVar[str]
    auto_class: ClassVar[str]
    ahead: ClassVar[int]
    lower_is_better: ClassVar[bool] = True
    answers_logits: ClassVar[bool] = True

    @abstractmethod
    def guessed(self, batch: Batch) -> Tensor:
        """bool [B, S - ahead]: at which tokens a guess counts."""

    def mask(self, batch: Batch) -> Tensor | None:
        """The batch's `attention_mask` as bool [B, S]."""
        return padding_mask(batch)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean cross entropy over all guessed tokens, in nats and fp32."""
        return self._surprise(output, batch).sum() / self.guessed(batch).sum().clamp_min(1)

    def score(self, output: Any, batch: Batch) -> Tensor:
        """Cross entropy summed over each text's guessed tokens, in nats; fp32 [B]."""
        return self._surprise(output, batch).sum(1)

    def units(self, batch: Batch) -> Tensor:
        """Guessed tokens of each text, fp32 [B]."""
        return self.guessed(batch).sum(1).float()

    def scale(self, mean: Tensor) -> Tensor:
        """Perplexity, from the mean cross entropy."""
        return mean.exp()

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The logits [B, S, V] without their mean over V, which changes no probability; 0 where `mask` [B, S] is."""
        return centred(self._logits(output), mask)

    def judged_by(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The roots of the probabilities [B, S, V], times two; 0 where `mask` [B, S] is."""
        return roots(self._logits(output), mask)

    def _surprise(self, output: Any, batch: Batch) -> Tensor:
        """-log p of what stands at every guessed token, [B, S - ahead]; 0 elsewhere."""
        ids_BS = tokens_of(batch, task=self.kind)
        logits_BSV = self._logits(output)[:, : ids_BS.shape[1] - self.ahead].float()
        found_BS = F.cross_entropy(logits_BSV.transpose(1, 2), ids_BS[:, self.ahead :], reduction="none")
        return found_BS * self.guessed(batch)

    def _logits(self, output: Any) -> Tensor:
        return token_logits(output, task=self.kind, auto_class=self.auto_class)
