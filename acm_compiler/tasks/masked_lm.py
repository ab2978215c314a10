"""Hidden tokens: cross entropy and perplexity of the tokens that a text's mask stands for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.data.draws import uniform
from acm_compiler.errors import DataError
from acm_compiler.inputs import Inputs
from acm_compiler.recipe.tasks import MaskedLMTask
from acm_compiler.tasks.token_logits import centred, token_logits, tokens_of

_NOT_FOR_THE_MODEL = frozenset({"label", "index", "source"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLM:
    """A `Task`: logits [B, S, V] at the hidden tokens of `input_ids` [B, S] against what stood there.

    `share` of the tokens is hidden, all behind `mask_id`; never `marks` (the ends of a text, padding). Which ones is a
    function of `seed` and the example's `index`, so that every batch and every model sees a text alike.
    """

    share: float
    seed: int
    mask_id: int
    marks: Collection[int]
    metric: ClassVar[str] = "masked perplexity"
    lower_is_better: ClassVar[bool] = True

    def inputs(self, batch: Batch) -> Inputs:
        """The texts with tokens hidden, and which tokens are real."""
        shown = {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}
        return {**shown, "input_ids": batch["input_ids"].masked_fill(self.hidden(batch), self.mask_id)}

    def mask(self, batch: Batch) -> Tensor | None:
        """The batch's `attention_mask` as bool [B, S]."""
        mask = batch.get("attention_mask")
        return None if mask is None else mask.bool()

    def hidden(self, batch: Batch) -> Tensor:
        """bool [B, S]: the tokens that the model has to guess."""
        ids_BS = tokens_of(batch, task="masked_lm")
        index_B = batch["index"].cpu().numpy()
        drawn_BS = uniform(self.seed, index_B, ids_BS.shape[1]).to(ids_BS.device)
        allowed_BS = torch.isin(ids_BS, torch.tensor(sorted(self.marks), device=ids_BS.device), invert=True)
        mask_BS = self.mask(batch)
        return (drawn_BS < self.share) & (allowed_BS if mask_BS is None else allowed_BS & mask_BS)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """Mean cross entropy over all hidden tokens, in nats and fp32."""
        return self._surprise(output, batch).sum() / self.hidden(batch).sum().clamp_min(1)

    def score(self, output: Any, batch: Batch) -> Tensor:
        """Cross entropy summed over each text's hidden tokens, in nats; fp32 [B]."""
        return self._surprise(output, batch).sum(1)

    def units(self, batch: Batch) -> Tensor:
        """Hidden tokens of each text, fp32 [B]."""
        return self.hidden(batch).sum(1).float()

    def scale(self, mean: Tensor) -> Tensor:
        """Perplexity, from the mean cross entropy."""
        return mean.exp()

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The logits [B, S, V] without their mean over V, which changes no probability; 0 where `mask` [B, S] is."""
        return centred(self._logits(output), mask)

    def _surprise(self, output: Any, batch: Batch) -> Tensor:
        """-log p of what stands at every token, [B, S]; 0 where nothing is hidden."""
        logits_BVS = self._logits(output).float().transpose(1, 2)
        return F.cross_entropy(logits_BVS, batch["input_ids"], reduction="none") * self.hidden(batch)

    def _logits(self, output: Any) -> Tensor:
        return token_logits(output, task="masked_lm", auto_class="AutoModelForMaskedLM")


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
