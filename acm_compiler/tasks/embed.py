"""Sentence vectors: how near they stay to those of the dense model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.data.batch import Batch
from acm_compiler.errors import DataError
from acm_compiler.sources.inputs import Inputs
from acm_compiler.tasks.base import Likeness, Task, named_inputs, part_of


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


# the number of pairs grows with the square of the examples
_COMPARED = 1024


def pairwise_spearman(found_ED: Tensor, wanted_ED: Tensor) -> float:
    """Rank correlation of the similarities v . w of all pairs of examples; nan for fewer than three examples.

    Over the first 1,024 examples where there are more.
    """
    count = min(len(found_ED), _COMPARED)
    if count < 3:
        return float("nan")
    rows, columns = torch.triu_indices(count, count, 1)
    ranks_2P = [_ranks((v[:count].double() @ v[:count].double().T)[rows, columns]) for v in (found_ED, wanted_ED)]
    return float(torch.corrcoef(torch.stack(ranks_2P))[0, 1])


def _ranks(value_P: Tensor) -> Tensor:
    """The place of each value in rising order, float64; equal values share the mean of theirs."""
    _, group_P, sizes = torch.unique(value_P, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0).double()
    return (last - (sizes.double() - 1) / 2)[group_P]
