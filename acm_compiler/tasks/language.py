"""Language models: loss and perplexity of the next token or of masked tokens.

Shapes: B texts, S tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.calibration.answer import root_probabilities
from acm_compiler.data.batch import Batch, Facts
from acm_compiler.data.draws import uniform
from acm_compiler.errors import DataError
from acm_compiler.recipe.tasks import MaskedLMTask
from acm_compiler.sources.inputs import Inputs
from acm_compiler.tasks.base import Likeness, Task, entry_of, named_inputs, part_of
from acm_compiler.tasks.distance import agreement


class TokenLogits(Task, ABC):
    """A `Task` of models that give logits [B, S, V]: what two of them are compared by."""

    answers_logits: ClassVar[bool] = True

    @abstractmethod
    def logits(self, output: Any) -> Tensor:
        """The logits [B, S, V]. UsageError where there are none."""

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The logits without their mean over V, which changes no probability; 0 where `mask` [B, S] is."""
        logits_BSV = self.logits(output)
        around_BSV = logits_BSV - logits_BSV.mean(-1, keepdim=True)
        return around_BSV if mask is None else around_BSV.masked_fill(~mask[..., None].bool(), 0)

    def judged_by(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The roots of the probabilities [B, S, V], times two; 0 where `mask` [B, S] is."""
        return root_probabilities(self.logits(output), mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel(TokenLogits):
    """A `Task` but for `inputs`: logits [B, S, V] at token s against token s + `ahead` of `input_ids` [B, S]."""

    kind: ClassVar[str]
    auto_class: ClassVar[str]
    ahead: ClassVar[int]
    lower_is_better: ClassVar[bool] = True

    @abstractmethod
    def guessed(self, batch: Batch) -> Tensor:
        """bool [B, S - ahead]: at which tokens a guess counts."""

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean cross entropy over all guessed tokens, in nats and fp32."""
        return self._surprise(output, batch).sum() / self.counted(batch).clamp_min(1)

    def counted(self, batch: Batch) -> Tensor:
        """All guessed tokens."""
        return self.guessed(batch).sum()

    def score(self, output: Any, batch: Batch) -> Tensor:
        """Cross entropy summed over each text's guessed tokens, in nats; fp32 [B]."""
        return self._surprise(output, batch).sum(1)

    def units(self, batch: Batch) -> Tensor:
        """Guessed tokens of each text, fp32 [B]."""
        return self.guessed(batch).sum(1).float()

    def scale(self, mean: Tensor) -> Tensor:
        """Perplexity, from the mean cross entropy."""
        return mean.exp()

    @property
    def likeness(self) -> Likeness:
        """Share of guessed tokens for which two models find the same one likeliest."""
        return Likeness(name="agreement", keep=self._likeliest, compare=agreement)

    def _likeliest(self, output: Any, batch: Batch) -> Tensor:
        """The likeliest token of each guess of all texts, [guesses]."""
        guessed_BG = self.guessed(batch)
        return self.logits(output)[:, : guessed_BG.shape[1]].argmax(-1)[guessed_BG]

    def _surprise(self, output: Any, batch: Batch) -> Tensor:
        """-log p of what stands at every guessed token, [B, S - ahead]; 0 elsewhere."""
        ids_BS = entry_of(batch, "input_ids", "tokens", task=self.kind)
        logits_BSV = self.logits(output)[:, : ids_BS.shape[1] - self.ahead].float()
        wanted_BS = ids_BS[:, self.ahead :]
        # token by token: over a middle axis torch takes three times as long
        found_T = F.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten(), reduction="none")
        # no product: a model may give nan at padding
        return found_T.view_as(wanted_BS).masked_fill(~self.guessed(batch), 0)

    def logits(self, output: Any) -> Tensor:
        fix = f"use a model with a language head (for hf: auto_class {self.auto_class})"
        axes = "batch, tokens, vocabulary"
        return part_of(output, "logits", "logits of tokens", axes=axes, task=self.kind, fix=fix)


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
        ids_BS, mask_BS = entry_of(batch, "input_ids", "tokens", task=self.kind), self.mask(batch)
        if mask_BS is None:
            mask_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        return mask_BS[:, 1:] & mask_BS[:, :-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLM(LanguageModel):
    """A `Task`: logits [B, S, V] at the hidden tokens of `input_ids` [B, S] against what stood there.

    `share` of the tokens is hidden, all behind `mask_id`; never `marks` (the ends of a text, padding). Which ones is a
    function of `seed` and the example's `index`, so that every batch and every model sees a text alike.
    """

    share: float
    seed: int
    mask_id: int
    marks: Collection[int]
    metric: ClassVar[str] = "masked perplexity"
    kind: ClassVar[str] = "masked_lm"
    auto_class: ClassVar[str] = "AutoModelForMaskedLM"
    ahead: ClassVar[int] = 0

    def inputs(self, batch: Batch) -> Inputs:
        """The texts with tokens hidden, and which tokens are real."""
        shown = batch["input_ids"].masked_fill(self.guessed(batch), self.mask_id)
        return {**named_inputs(batch), "input_ids": shown}

    def guessed(self, batch: Batch) -> Tensor:
        """bool [B, S]: the hidden tokens."""
        ids_BS = entry_of(batch, "input_ids", "tokens", task=self.kind)
        index_B = batch["index"].cpu().numpy()
        drawn_BS = uniform(self.seed, index_B, ids_BS.shape[1]).to(ids_BS.device)
        allowed_BS = torch.isin(ids_BS, torch.tensor(sorted(self.marks), device=ids_BS.device), invert=True)
        mask_BS = self.mask(batch)
        return (drawn_BS < self.share) & (allowed_BS if mask_BS is None else allowed_BS & mask_BS)


def open_masked_lm(config: MaskedLMTask, dataset: Any) -> MaskedLM:
    """The task for a data set that knows the token which hides others. DataError for one that does not."""
    facts = Facts.of(dataset)
    if facts.mask_id is None:
        raise DataError(
            "the data set's tokenizer has no token that hides others",
            where="task masked_lm",
            expected="`mask_id` of the data set, from a tokenizer with [MASK] or <mask>",
        )
    return MaskedLM(share=config.share, seed=config.seed, mask_id=facts.mask_id, marks=frozenset(facts.marks))
