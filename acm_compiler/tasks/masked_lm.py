"""Hidden tokens: cross entropy and perplexity of the tokens that a text's mask stands for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.data.draws import uniform
from acm_compiler.errors import DataError
from acm_compiler.inputs import Inputs
from acm_compiler.recipe.tasks import MaskedLMTask
from acm_compiler.tasks.language import LanguageModel
from acm_compiler.tasks.model_inputs import named_inputs
from acm_compiler.tasks.token_logits import tokens_of


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
        ids_BS = tokens_of(batch, task=self.kind)
        index_B = batch["index"].cpu().numpy()
        drawn_BS = uniform(self.seed, index_B, ids_BS.shape[1]).to(ids_BS.device)
        allowed_BS = torch.isin(ids_BS, torch.tensor(sorted(self.marks), device=ids_BS.device), invert=True)
        mask_BS = self.mask(batch)
        return (drawn_BS < self.share) & (allowed_BS if mask_BS is None else allowed_BS & mask_BS)


def open_masked_lm(config: MaskedLMTask, dataset: Any) -> MaskedLM:
    """The task for a data set that knows the token which hides others. DataError for one that does not."""
    mask_id = getattr(dataset, "mask_id", None)
    if mask_id is None:
        raise DataError(
            "the data set's tokenizer has no token that hides others",
            where="task masked_lm",
            expected="`mask_id` of the data set, from a tokenizer with [MASK] or <mask>",
        )
    return MaskedLM(share=config.share, seed=config.seed, mask_id=mask_id, marks=frozenset(dataset.marks))
