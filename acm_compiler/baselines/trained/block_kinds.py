"""Encoders of images, of audio and of texts, run a block at a time.

Shapes: B examples, S tokens (of audio: frames), D features, C labels of CTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.baselines.trained.blocks import Blockwise, Given, Tokens
from acm_compiler.baselines.vit import image_of, layer_macs, sizes_of, why_not
from acm_compiler.baselines.vit_steps import KNOWN, steps_of
from acm_compiler.data import Batch
from acm_compiler.planning.plan import Plan
from acm_compiler.sources.inputs import ForwardEnded, call_model
from acm_compiler.tasks import Task

_NORM_LAST = "StableLayerNorm"  # ends the names of encoders that normalise after the last block
_OTHER_ORDER = ("SqueezeBert", "XLNet")  # axes of tokens and of features, or of examples, change places


class VitBlocks(Blockwise):
    """Vision transformers."""

    known = ", ".join(kind.known for kind in KNOWN)

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.steps = steps_of(model)
        self.blocks = self.steps.blocks

    @classmethod
    def runs(cls, model: nn.Module) -> bool:
        """True for those that can be run a step at a time."""
        return why_not(model) is None

    @classmethod
    def least(cls, model: nn.Module, plan: Plan) -> float:
        """The share by the sizes of the model's own layers."""
        return _least(plan, *sizes_of(model))

    def enter(self, batch: Batch, task: Task) -> Tokens:
        """Patches behind the class token."""
        inputs = task.inputs(batch)
        x_BSD = self.steps.embed(image_of(inputs))
        return Tokens(x_BSD=x_BSD, inputs=inputs)

    def block(self, place: int, tokens: Tokens) -> Tensor:
        """One block, without dropout."""
        return self.steps.run_block(place, tokens.x_BSD)

    def answer(self, tokens: Tokens) -> Tensor:
        """Logits of the class token."""
        return self.steps.head(tokens.x_BSD[:, 0])


class SpeechBlocks(Blockwise):
    """`Wav2Vec2ForCTC` and `HubertForCTC` of transformers: a head answers for every frame."""

    known = "Wav2Vec2ForCTC and HubertForCTC of transformers"
    _models = (
        "transformers.models.wav2vec2.modeling_wav2vec2.Wav2Vec2ForCTC",
        "transformers.models.hubert.modeling_hubert.HubertForCTC",
    )

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        encoder: Any = self.model.base_model.encoder
        self.blocks = encoder.layers
        self.norm = encoder.layer_norm if type(encoder).__name__.endswith(_NORM_LAST) else nn.Identity()

    @classmethod
    def runs(cls, model: nn.Module) -> bool:
        """True for these two; not where an adapter mixes frames after the blocks."""
        has_adapter = bool(getattr(getattr(model, "config", None), "add_adapter", False))
        return f"{type(model).__module__}.{type(model).__name__}" in cls._models and not has_adapter

    @classmethod
    def least(cls, model: nn.Module, plan: Plan) -> float:
        """The share by the sizes in the model's configuration, and the frames that its sites saw."""
        config: Any = model.config
        frames = max(site.tokens for site in plan.sites) // plan.model.batch
        return _least(plan, config.num_hidden_layers, config.hidden_size, config.intermediate_size, frames)

    def enter(self, batch: Batch, task: Task) -> Tokens:
        """Frames, as the model itself makes them: its call is ended at the first block."""
        found: dict[str, Any] = {}

        def stop(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.update(x_BSD=args[0], kwargs=kwargs)
            raise ForwardEnded

        inputs = task.inputs(batch)
        with self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True), suppress(ForwardEnded):
            call_model(self.model, inputs)
        masks = [task.mask(batch), batch.get("attention_mask")]
        shares = {mask.shape[1]: mask.double().mean(1).cpu() for mask in masks if mask is not None}
        x_BSD, given = found["x_BSD"], (((), found["kwargs"]),) * len(self.blocks)
        return Tokens(x_BSD=x_BSD, inputs=inputs, shares=shares, given=given)

    def block(self, place: int, tokens: Tokens) -> Tensor:
        """One block, with the arguments that the model itself gave the first."""
        return _first(self.blocks[place](tokens.x_BSD, **tokens.given[place][1]))

    def read(self, tokens: Tokens) -> Tensor:
        """All frames as they are, [B, S, D]."""
        return tokens.x_BSD

    def answer(self, tokens: Tokens) -> Tensor:
        """Logits of all frames, [B, S, C]."""
        return self.model.lm_head(self.norm(tokens.x_BSD))

    def confidence(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """The mean over real frames of the largest probability."""
        real_B = tokens.real_B.to(logits.device)
        is_real_BS = torch.arange(logits.shape[1], device=logits.device) < real_B[:, None]
        return (logits.softmax(-1).amax(-1) * is_real_BS).sum(1) / real_B.clamp_min(1)

    def reads(self, tokens: Tokens) -> Tensor:
        """One for every real frame."""
        return tokens.real_B


class TextBlocks(Blockwise):
    """Encoders of transformers that classify texts: every block gets what the model's own forward gives it."""

    known = "encoders of transformers that classify texts"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.blocks = _stack(model)
        self.model.config.use_cache = False  # of decoders: a block that is run again would find its own keys
        # turns tokens into what a block returns: the tokens alone, or a tuple of them; None until a block was run
        self._returned: Callable[[Tensor], Any] | None = None

    @classmethod
    def runs(cls, model: nn.Module) -> bool:
        """True for `…ForSequenceClassification` with one stack of blocks."""
        module, name = type(model).__module__, type(model).__name__
        is_classifier = module.startswith("transformers.") and name.endswith("ForSequenceClassification")
        return is_classifier and not name.startswith(_OTHER_ORDER) and _stack(model) is not None

    @classmethod
    def least(cls, model: nn.Module, plan: Plan) -> float:
        """One block of all: what lies outside is next to nothing."""
        stack = _stack(model)
        assert stack is not None
        return 1 / len(stack)

    def embed(self, batch: Batch, task: Task) -> Tokens:
        """The examples before the first block, and what that cost."""
        if self._returned is None:
            self.enter(batch, task)  # it runs a block, which would be counted
        return super().embed(batch, task)

    def enter(self, batch: Batch, task: Task) -> Tokens:
        """Tokens, and the arguments of all blocks: a call of the model in which blocks hand on what they get."""
        given: list[Given] = []
        found: list[Tensor] = []

        def note(place: int, x_BSD: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            found.append(x_BSD)
            if self._returned is None:
                returned = type(self.blocks[place]).forward(self.blocks[place], x_BSD, *args, **kwargs)
                others = [None] * (len(returned) - 1) if isinstance(returned, tuple) else None
                self._returned = lambda tokens: tokens if others is None else (tokens, *others)
            given.append((args, kwargs))
            if len(given) == len(self.blocks):
                raise ForwardEnded
            return x_BSD

        inputs, mask_BS = task.inputs(batch), task.mask(batch)
        with self._instead(note), suppress(ForwardEnded):
            call_model(self.model, inputs)
        shares = {} if mask_BS is None else {mask_BS.shape[1]: mask_BS.double().mean(1).cpu()}
        return Tokens(x_BSD=found[0], inputs=inputs, mask_BS=mask_BS, shares=shares, given=tuple(given))

    def block(self, place: int, tokens: Tokens) -> Tensor:
        """One block, with its own arguments."""
        args, kwargs = tokens.given[place]
        return _first(self.blocks[place](tokens.x_BSD, *args, **kwargs))

    def answer(self, tokens: Tokens) -> Tensor:
        """Logits: a call of the model in which the blocks give what they gave before."""
        with self._instead(lambda place, x_BSD, args, kwargs: tokens.x_BSD):
            return call_model(self.model, tokens.inputs).logits

    def finish(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The model's own logits and their cost, without that of reaching the first block once more."""
        logits, macs_B = super().finish(tokens)
        return logits, macs_B - tokens.before_B

    @contextmanager
    def _instead(self, run: Callable[[int, Tensor, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
        """While open, `run` stands for every block."""

        def forward(place: int) -> Callable[..., Any]:
            def instead(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                x_BSD = run(place, hidden_states, args, kwargs)
                assert self._returned is not None  # by now a block was run
                return self._returned(x_BSD)

            return instead

        for place, block in enumerate(self.blocks):
            block.forward = forward(place)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


_KINDS: tuple[type[Blockwise], ...] = (VitBlocks, SpeechBlocks, TextBlocks)


def blockwise(model: nn.Module) -> type[Blockwise] | None:
    """The class here that runs models of this one a block at a time; None where there is none."""
    return next((kind for kind in _KINDS if kind.runs(model)), None)


def known_models() -> str:
    """The models that are run a block at a time, in words."""
    return "; ".join(kind.known for kind in _KINDS)


def _stack(model: Any) -> nn.ModuleList | None:
    """The one list of all the blocks of a model of transformers; None where there are none, or several."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = [part for part in model.base_model.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    return lists[0] if len(lists) == 1 else None


def _first(found: Any) -> Tensor:
    """The tokens that a block returns, alone or before other values."""
    return found if isinstance(found, Tensor) else found[0]


def _least(plan: Plan, blocks: int, width: int, hidden: int, tokens: int) -> float:
    """The share of the dense MACs that is left without all blocks but one."""
    return 1 - (blocks - 1) * layer_macs(width, hidden, tokens) / (plan.model.dense_macs / plan.model.batch)
