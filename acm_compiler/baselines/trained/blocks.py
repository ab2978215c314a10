"""Models that are run a block at a time, and can be left in between: vision transformers, and wav2vec2 with CTC.

Shapes: B examples, S tokens (of audio: frames), R samples of audio, D features, C classes (of CTC: labels).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from acm_compiler.baselines.vit import VIT, Steps, run_block, sizes_of
from acm_compiler.data import Batch
from acm_compiler.passes.find.count_macs import Work
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.count_dense_work import kept_work_watched, real_work
from acm_compiler.sources.inputs import call_model
from acm_compiler.tasks import Task

_SPEECH = "transformers.models."
_NORM_LAST = "StableLayerNorm"  # ends the names of encoders that normalise after the last block


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Examples between two blocks.

    x_BSD: all tokens; real_B: how many of each example are no padding. before_B: MACs until the first block. given:
    further arguments of every block, tensors with a row for each example among them.
    """

    x_BSD: Tensor
    real_B: Tensor
    before_B: Tensor
    given: Mapping[str, Any] = field(default_factory=dict)

    def only(self, keep_B: Tensor) -> Tokens:
        """The examples that are kept."""
        rows = {
            k: v[keep_B] if isinstance(v, Tensor) and v.shape[:1] == keep_B.shape else v for k, v in self.given.items()
        }
        here = keep_B.cpu()
        return Tokens(x_BSD=self.x_BSD[keep_B], real_B=self.real_B[here], before_B=self.before_B[here], given=rows)


class Blockwise(nn.Module, ABC):
    """A model's own modules, to be run one block after the other; in eval mode."""

    models: ClassVar[tuple[str, ...]]
    blocks: nn.ModuleList

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @classmethod
    @abstractmethod
    def sizes(cls, model: nn.Module, plan: Plan) -> tuple[int, int, int, int]:
        """Blocks, width, hidden width of the MLPs, and tokens of the plan's example."""

    @property
    @abstractmethod
    def seen(self) -> int:
        """Features that a head reads at once."""

    @property
    @abstractmethod
    def own_head(self) -> nn.Module:
        """The model's own last layers."""

    @abstractmethod
    def enter(self, batch: Batch, task: Task) -> tuple[Tensor, Mapping[int, Tensor], Mapping[str, Any]]:
        """Tokens [B, S, D] as the first block gets them; which share of an axis of that size is real; its arguments."""

    @abstractmethod
    def block(self, place: int, tokens: Tokens) -> Tensor:
        """Tokens after one block, [B, S, D]."""

    @abstractmethod
    def read(self, x_BSD: Tensor) -> Tensor:
        """Inputs of a head: [B, features], or [B, S, features] where it answers for every token."""

    @abstractmethod
    def answer(self, x_BSD: Tensor) -> Tensor:
        """The model's own logits, from tokens after the last block."""

    @abstractmethod
    def confidence(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Confidence in an answer, 0 to 1, [B]."""

    @abstractmethod
    def reads(self, tokens: Tokens) -> Tensor:
        """Number of times that a head runs for each example, [B]."""

    def embed(self, batch: Batch, task: Task) -> Tokens:
        """The examples before the first block, and what that cost."""
        works: list[Work] = []

        def add(found: Mapping[Any, list[Work]]) -> None:
            works.extend(work for part in found.values() for work in part)

        with kept_work_watched(self.model, add, side=lambda: None, when=lambda: True):
            x_BSD, shares, given = self.enter(batch, task)
        size = x_BSD.shape[1]
        real_B = (shares[size].double() * size).round() if size in shares else torch.full((len(x_BSD),), float(size))
        before_B = real_work(works, shares, batch=len(x_BSD))
        return Tokens(x_BSD=x_BSD, real_B=real_B.double(), before_B=before_B, given=given)


class VitBlocks(Blockwise):
    """torchvision's `VisionTransformer`: a head reads the class token and the mean of all tokens."""

    models = (VIT,)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.steps = Steps(model)
        self.blocks = self.steps.blocks

    @classmethod
    def sizes(cls, model: nn.Module, plan: Plan) -> tuple[int, int, int, int]:
        """Read them off the model's own layers."""
        return sizes_of(model)

    @property
    def seen(self) -> int:
        """Twice the model's width: the class token and the mean of all tokens."""
        return 2 * sizes_of(self.model)[1]

    @property
    def own_head(self) -> nn.Module:
        """The classification head."""
        return self.model.heads  # type: ignore[return-value]

    def enter(self, batch: Batch, task: Task) -> tuple[Tensor, Mapping[int, Tensor], Mapping[str, Any]]:
        """Patches behind the class token."""
        return self.steps.embed(task.inputs(batch)), {}, {}  # type: ignore[arg-type]

    def block(self, place: int, tokens: Tokens) -> Tensor:
        """One block, without dropout."""
        return run_block(self.blocks[place], tokens.x_BSD)

    def read(self, x_BSD: Tensor) -> Tensor:
        """The class token and the mean, [B, 2D]."""
        return torch.cat([x_BSD[:, 0], x_BSD.mean(1)], dim=-1)

    def answer(self, x_BSD: Tensor) -> Tensor:
        """Logits of the class token."""
        return self.steps.head(x_BSD[:, 0])

    def confidence(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """The largest probability."""
        return logits.softmax(-1).amax(-1)

    def reads(self, tokens: Tokens) -> Tensor:
        """One, for every image."""
        return torch.ones_like(tokens.real_B)


class _Entered(Exception):
    """Ends a call of a model at its first block."""


class SpeechBlocks(Blockwise):
    """`Wav2Vec2ForCTC` and `HubertForCTC` of transformers: a head answers for every frame."""

    models = (
        f"{_SPEECH}wav2vec2.modeling_wav2vec2.Wav2Vec2ForCTC",
        f"{_SPEECH}hubert.modeling_hubert.HubertForCTC",
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        encoder: Any = model.base_model.encoder  # type: ignore[union-attr]
        self.blocks = encoder.layers
        self.norm = encoder.layer_norm if type(encoder).__name__.endswith(_NORM_LAST) else nn.Identity()

    @classmethod
    def sizes(cls, model: nn.Module, plan: Plan) -> tuple[int, int, int, int]:
        """Sizes in the model's configuration, and the frames that its sites saw."""
        config: Any = model.config
        frames = max(site.tokens for site in plan.sites)
        return config.num_hidden_layers, config.hidden_size, config.intermediate_size, frames // plan.model.batch

    @property
    def seen(self) -> int:
        """The model's width."""
        return self.model.config.hidden_size  # type: ignore

    @property
    def own_head(self) -> nn.Module:
        """The layer that maps frames to labels."""
        return self.model.lm_head  # type: ignore[return-value]

    def enter(self, batch: Batch, task: Task) -> tuple[Tensor, Mapping[int, Tensor], Mapping[str, Any]]:
        """Frames, as the model itself makes them: its call is ended at the first block."""
        found: dict[str, Any] = {}

        def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.update(kwargs, x_BSD=args[0])
            raise _Entered

        handle = self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            call_model(self.model, task.inputs(batch))
        except _Entered:
            pass
        finally:
            handle.remove()
        masks = [task.mask(batch), batch.get("attention_mask")]
        shares = {mask.shape[1]: mask.double().mean(1).cpu() for mask in masks if mask is not None}
        return found.pop("x_BSD"), shares, found

    def block(self, place: int, tokens: Tokens) -> Tensor:
        """One block, with the arguments that the model itself gave the first."""
        found = self.blocks[place](tokens.x_BSD, **tokens.given)
        return found if isinstance(found, Tensor) else found[0]

    def read(self, x_BSD: Tensor) -> Tensor:
        """All frames as they are, [B, S, D]."""
        return x_BSD

    def answer(self, x_BSD: Tensor) -> Tensor:
        """Logits of all frames, [B, S, C]."""
        return self.own_head(self.norm(x_BSD))

    def confidence(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """The mean over real frames of the largest probability."""
        real_B = tokens.real_B.to(logits.device)
        is_real_BS = torch.arange(logits.shape[1], device=logits.device) < real_B[:, None]
        return (logits.softmax(-1).amax(-1) * is_real_BS).sum(1) / real_B.clamp_min(1)

    def reads(self, tokens: Tokens) -> Tensor:
        """One for every real frame."""
        return tokens.real_B


def blockwise(model: nn.Module) -> type[Blockwise] | None:
    """The class here that runs models of this one a block at a time; None where there is none."""
    name = f"{type(model).__module__}.{type(model).__name__}"
    has_adapter = bool(getattr(getattr(model, "config", None), "add_adapter", False))  # mixes frames after the blocks
    return next((kind for kind in (VitBlocks, SpeechBlocks) if name in kind.models and not has_adapter), None)
