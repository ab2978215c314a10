"""Sentence vectors: how near they stay to those of the dense model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.errors import DataError
from acm_compiler.sources.inputs import Inputs
from acm_compiler.tasks.base import Likeness, Task, named_inputs, pairwise_spearman, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Embed(Task):
    """A `Task`: a text's vector is the mean of its tokens' last hidden states, of length 1.

    It is judged by its cosine to the dense model's vector, which `remember` puts into the batch.
    """

    metric: ClassVar[str] = "cosine"

    def inputs(self, batch: Batch) -> Inputs:
        """All tensors of the batch, by name, that the model takes."""
        return named_inputs(batch)

    def remember(self, output: Any, batch: Batch) -> Batch:
        """The batch with the dense model's vectors, from its `output`."""
        return {**batch, "teacher": self.answer(output, self.mask(batch)).detach()}

    def loss(self, output: Any, batch: Batch) -> Tensor:
        """1 - cosine to the dense model's vector, the mean over the batch. DataError where that is not known."""
        return (1 - self._cosine(output, batch)).mean()

    def score(self, output: Any, batch: Batch) -> Tensor:
        """Cosine to the dense model's vector, fp32 [B]. DataError where that is not known."""
        return self._cosine(output, batch)

    @property
    def likeness(self) -> Likeness:
        """Rank correlation of all pairs' similarities: high if both models find the same texts similar."""
        return Likeness(
            name="Spearman",
            keep=lambda output, batch: self.answer(output, self.mask(batch)),
            compare=pairwise_spearman,
        )

    def answer(self, output: Any, mask: Tensor | None = None) -> Tensor:
        """The vectors [B, D]; padding is left out by `mask` [B, S]."""
        fix = "use a model without a head (for hf: auto_class AutoModel)"
        axes = "batch, tokens, features"
        hidden_BSD = part_of(output, "last_hidden_state", "hidden states", axes=axes, task="embed", fix=fix)
        if mask is None:
            return F.normalize(hidden_BSD.float().mean(1), dim=-1)
        weight_BS1 = mask.to(hidden_BSD.device).float()[..., None]
        return F.normalize((hidden_BSD.float() * weight_BS1).sum(1), dim=-1)

    def _cosine(self, output: Any, batch: Batch) -> Tensor:
        if "teacher" not in batch:
            raise DataError(
                "the dense model's vectors are not known here",
                where="task embed",
                fix="evaluate and train beside the dense model, whose output `remember` puts into the batch",
            )
        return (self.answer(output, self.mask(batch)) * batch["teacher"]).sum(-1)
