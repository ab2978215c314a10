"""A model that is run a block at a time, and can be left in between.

Shapes: B examples, S tokens (of audio: frames), D features, C classes (of CTC: labels).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from acm_compiler.baselines.method import works_of
from acm_compiler.data import Batch
from acm_compiler.passes.find.count_macs import Work
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.count_dense_work import real_work
from acm_compiler.sources.inputs import Inputs
from acm_compiler.tasks import Task

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by their places and by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Examples between two blocks.

    x_BSD: all tokens; mask_BS: False at padding, None without any. shares: which part of an axis of that size is real,
    [B]. before_B, spent_B: MACs until the first block, and so far, float64. inputs: the arguments of the model's call;
    given: those of every block, beside the tokens.
    """

    x_BSD: Tensor
    inputs: Inputs
    mask_BS: Tensor | None = None
    shares: Mapping[int, Tensor] = field(default_factory=dict)
    given: tuple[Given, ...] = ()
    before_B: Tensor = field(default_factory=lambda: torch.empty(0))
    spent_B: Tensor = field(default_factory=lambda: torch.empty(0))

    def only(self, keep_B: Tensor) -> Tokens:
        """The examples that are kept: the rows of these, of every tensor that has one for each."""

        def rows(value: Tensor) -> Tensor:
            return value[keep_B.to(value.device)] if value.shape[:1] == keep_B.shape else value

        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        return Tokens(**tree_map_only(Tensor, rows, parts))

    @property
    def real_B(self) -> Tensor:
        """The number of each example's tokens that are no padding, float64."""
        count = self.x_BSD.shape[1]
        real_B = torch.full((len(self.x_BSD),), float(count), dtype=torch.float64)
        return (self.shares[count] * count).round() if count in self.shares else real_B


class Blockwise(nn.Module, ABC):
    """A model's own modules, to be run one block after the other; in eval mode.

    As they stand here: an example has one answer, and a head reads the first token and the mean of all real ones.
    """

    known: ClassVar[str]
    """The models, in words."""
    blocks: Any

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    @classmethod
    @abstractmethod
    def runs(cls, model: nn.Module) -> bool:
        """True for the models that this class knows."""

    @classmethod
    @abstractmethod
    def least(cls, model: nn.Module, plan: Plan) -> float:
        """The share of the dense MACs that one block takes with what lies outside of all, as far as that is known."""

    @abstractmethod
    def enter(self, batch: Batch, task: Task) -> Tokens:
        """The examples as the first block gets them; what that costs is not yet counted."""

    @abstractmethod
    def block(self, place: int, tokens: Tokens) -> Tensor:
        """Tokens after one block, [B, S, D]."""

    @abstractmethod
    def answer(self, tokens: Tokens) -> Tensor:
        """The model's own logits, from tokens after the last block."""

    def read(self, tokens: Tokens) -> Tensor:
        """Inputs of a head: [B, features], or [B, S, features] where it answers for every token."""
        x_BSD, mask_BS = tokens.x_BSD, tokens.mask_BS
        if mask_BS is None:
            return torch.cat([x_BSD[:, 0], x_BSD.mean(1)], dim=-1)
        mean_BD = (x_BSD * mask_BS[..., None]).sum(1) / mask_BS.sum(1, keepdim=True).clamp_min(1)
        return torch.cat([x_BSD[:, 0], mean_BD], dim=-1)

    def confidence(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Confidence in an answer, 0 to 1, [B]: the largest probability."""
        return logits.softmax(-1).amax(-1)

    def reads(self, tokens: Tokens) -> Tensor:
        """Number of times that a head runs for each example, [B]."""
        return torch.ones(len(tokens.x_BSD), dtype=torch.float64)

    def embed(self, batch: Batch, task: Task) -> Tokens:
        """The examples before the first block, and what that cost."""
        works, tokens = works_of(lambda: self.enter(batch, task))
        before_B = self._real(works, tokens)
        return replace(tokens, before_B=before_B, spent_B=before_B)

    def advance(self, place: int, tokens: Tokens) -> Tokens:
        """The examples after one block, and what they cost so far."""
        works, x_BSD = works_of(lambda: self.block(place, tokens))
        return replace(tokens, x_BSD=x_BSD, spent_B=tokens.spent_B + self._real(works, tokens))

    def finish(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The model's own logits, from tokens after the last block, and what they cost, [B]."""
        works, logits = works_of(lambda: self.answer(tokens))
        return logits, self._real(works, tokens)

    def _real(self, works: list[Work], tokens: Tokens) -> Tensor:
        return real_work(works, tokens.shares, batch=len(tokens.x_BSD))
