"""Padding: the mask that a call carries, from audio samples to frames, and whose tokens the parts of an
encoder-decoder work on: the decoder's own, or those of the encoder.

Shapes: B examples, R places of what the model is given (tokens, or samples of audio), S the decoder's own tokens of one
call, M the encoder's (the decoder's memory).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from acm_compiler.acm.context import recomputing
from acm_compiler.acm.precision import to_float64
from acm_compiler.runtime.count_dense_work import outside_acms
from acm_compiler.sources.inputs import by_name

# methods of transformers
_COUNTS_FRAMES = ("_get_subsampling_output_length", "_get_feat_extract_output_lengths")
_TORCHS = ("src_key_padding_mask", "key_padding_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMask:
    """`real_BR`: bool, True at what is no padding. `heard`: what the mask speaks of."""

    model: nn.Module
    real_BR: Tensor
    heard: Tensor

    @property
    def is_of_audio(self) -> bool:
        """True if the mask is one of audio [B, R]."""
        return _is_audio(self.model, self.heard, self.real_BR)

    def tokens(self) -> Tensor:
        """bool [B, tokens]: the mask, of audio that of its frames."""
        return frame_mask(self.model, self.heard, self.real_BR)

    def new_tokens(self) -> Tensor:
        """`tokens` without those of the cache, which the mask covers too: the sites see the last ones."""
        return frame_mask(self.model, self.heard, self.real_BR[:, -self.heard.shape[1] :])


def call_mask(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallMask | None:
    """The padding mask [B, R] of a call, given by name or by its place; None where there is none.

    That is its `attention_mask`, of one row per query those tokens that any query attends to, or else, in torch's
    sense, its `src_key_padding_mask` or `key_padding_mask`.
    """
    args, kwargs = by_name(model, args, kwargs)
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3, 4):
        real_BR = _outside_key_padding(kwargs)
        return None if real_BR is None else CallMask(model=model, real_BR=real_BR, heard=real_BR)
    named = (value for name, value in kwargs.items() if not name.startswith("decoder_") and value is not mask)
    heard = next((value for value in (*args, *named) if isinstance(value, Tensor)), mask)
    return CallMask(model=model, real_BR=mask.bool() if mask.dim() == 2 else _attended(mask), heard=heard)


def _attended(mask: Tensor) -> Tensor:
    """bool [B, R]: the keys of a mask [B, queries, R] or [B, heads, queries, R] that any query attends to.

    A mask of floating point is added to the scores: its padding is minus infinity, or its type's lowest number.
    """
    attended = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()
    return attended.flatten(1, -2).any(1)


def _outside_key_padding(named: Mapping[str, Any]) -> Tensor | None:
    """Mask [B, R] of real tokens from torch's own padding mask, which is True, or minus infinity, at padding.

    None beside a target of the same shape: what fits the one's tokens would be taken for the other's too.
    """
    masks = (named.get(name) for name in _TORCHS)
    mask = next((value for value in masks if isinstance(value, Tensor) and value.dim() == 2), None)
    target = named.get("tgt")
    if mask is None or (isinstance(target, Tensor) and set(mask.shape) == set(target.shape[:2])):
        return None
    if mask.is_floating_point():
        return ~mask.isneginf()
    return ~mask if mask.dtype == torch.bool else None


def frame_mask(model: nn.Module, heard: Tensor | None, mask_BR: Tensor) -> Tensor:
    """bool [B, S]: the frames made of what is real, as the model itself counts them.

    heard: what `mask_BR` [B, R] speaks of. Where that is no audio, or the model does not say how it makes frames, the
    mask as it is.
    """
    mask_BR = mask_BR.bool()
    if heard is None or not _is_audio(model, heard, mask_BR):
        return mask_BR
    ways = (getattr(module, name, None) for module in model.modules() for name in _COUNTS_FRAMES)
    frames = next((way for way in ways if way is not None), None)
    if frames is None:
        return mask_BR
    if "add_adapter" in inspect.signature(frames).parameters:  # the blocks see what an adapter has not yet joined
        frames = functools.partial(frames, add_adapter=False)
    # one length at a time: some models count in numbers, not in tensors
    lengths_B = [int(frames(length)) for length in mask_BR.sum(1)]
    places_S = torch.arange(int(frames(torch.tensor(mask_BR.shape[1]))), device=mask_BR.device)
    return places_S < torch.tensor(lengths_B, device=mask_BR.device)[:, None]


def _is_audio(model: nn.Module, heard: Tensor, mask_BR: Tensor) -> bool:
    """True for samples [B, R], and for features [B, R, ...] of a model that is made for such."""
    if not heard.is_floating_point() or heard.shape[:2] != mask_BR.shape:
        return False
    return heard.dim() == 2 or getattr(model, "main_input_name", None) == "input_features"


# "own": the decoder's tokens; "both": attention of those to the encoder's; None stands for all else
Side = Literal["own", "both"]
Lengths = dict[int, Tensor | None]
Hook = Callable[..., None]


class DecoderTokens:
    """Position of a forward in an encoder-decoder, and the padding masks of the decoder's latest call.

    `own` and `memory`: for the number of tokens S or M the mask, bool [B, S] or [B, M], True at real tokens, or None.
    `enter`, `leave` and `end` are hooks of the decoder's modules and of the model; graphs leave them out.
    """

    def __init__(self, decoder: nn.Module | None = None) -> None:
        self.own: Lengths = {}
        self.memory: Lengths = {}
        self._decoder = decoder
        self._handed: Tensor | None = None
        self._sides: list[Side | None] = []
        self._past = False

    @property
    def side(self) -> Side | None:
        """The side whose tokens the innermost running part works on; after the decoder, up to the model's end: own."""
        if self._sides:
            return self._sides[-1]
        return "own" if self._past else None

    def _begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The decoder is called."""
        args, kwargs = by_name(decoder, args, kwargs)
        mask, memory_mask = kwargs.get("attention_mask"), kwargs.get("encoder_attention_mask")
        handed: Any = kwargs.get("encoder_hidden_states")
        self._handed = handed
        first = next((v for v in _tensors(args, kwargs) if v is not mask and v is not handed), None)
        self.own = {} if first is None else {first.shape[1]: _last(mask, first.shape[1])}
        known = handed is not None and memory_mask is not None
        self.memory = {handed.shape[1]: _last(memory_mask, handed.shape[1])} if known else {}

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part of the decoder begins: what it reads shows in the tensors of the encoder that it is handed."""
        if torch.compiler.is_compiling() or recomputing():
            return
        if module is self._decoder:
            self._begin(module, args, kwargs)
        given = [value is self._handed for value in _tensors(args, kwargs)]
        self._sides.append("own" if not any(given) else None if given[0] else "both")

    def leave(self, *_: Any) -> None:
        """The innermost part of the decoder ends."""
        if self._sides and not recomputing():
            self._sides.pop()
            self._past = not self._sides

    def end(self, *_: Any) -> None:
        """The model ends."""
        self._past, self._handed = False, None


class CallPadding:
    """Padding mask of the latest call of a model, for every site that it fits.

    forward: the number, from 1, of the model's running call; 0 outside of one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.decoder = DecoderTokens(half_of(model, "decoder"))
        self.given_BR: Tensor | None = None
        self.forward = self._forwards = 0
        self._model = model
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self._names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is named]
        self._tokens_BS: Tensor | None = None
        self._first: Tensor | None = None

    def watch(self, hook: Callable[[Hook], Hook] = lambda hook: hook) -> list[RemovableHandle]:
        """Follow the calls of the model from now on; `hook` changes what is registered for that."""
        # generate() calls an encoder by itself, and a loop of the user's may call the model without its head
        inner = (half_of(self._model, "encoder"), getattr(self._model, "base_model", None))
        parts = dict.fromkeys((self._model, *(part for part in inner if isinstance(part, nn.Module))))
        handles = [part.register_forward_pre_hook(hook(self.begin), with_kwargs=True) for part in parts]
        handles.append(self._model.register_forward_hook(hook(self.end), always_call=True))
        if self.decoder._decoder is not None:
            for module in outside_acms(self.decoder._decoder):
                handles.append(
                    module.register_forward_pre_hook(hook(self.decoder.enter), prepend=True, with_kwargs=True)
                )
                handles.append(module.register_forward_hook(hook(self.decoder.leave), always_call=True))
        return handles

    def begin(self, part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take the padding mask from a call of the model, or from one of its parts that has a mask."""
        self._first = next((value for value in _tensors(args, kwargs) if value.dim()), None)
        if torch.compiler.is_compiling():  # graphs would break at the signature
            if part is not self._model:
                return
            args, kwargs = (), dict(zip(self._names, args, strict=False)) | dict(kwargs)
        elif part is self._model:
            self.forward = self._forwards = self._forwards + 1
        elif by_name(part, args, kwargs)[1].get("attention_mask") is None:
            return
        self.given_BR = self._tokens_BS = None
        found = call_mask(part, args, kwargs)
        if found is not None and found.heard.dim() >= 2 and not (torch.compiler.is_compiling() and found.is_of_audio):
            self._tokens_BS, self.given_BR = found.new_tokens(), found.real_BR

    def end(self, *_: Any) -> None:
        """The model ends."""
        self._first, self.forward = None, 0
        self.decoder.end()

    def examples(self) -> int | None:
        """The number of examples in the latest call: the entries of its first tensor; None where it has no tensor."""
        return None if self._first is None else self._first.shape[0]

    def mask_of(self, shape_BS: torch.Size) -> Tensor | None:
        """The mask [batch, tokens] for a site with so many tokens, where the call's fits them."""
        own = self.decoder.own if self.decoder.side == "own" else {}
        mask_BS = own.get(shape_BS[1], self._tokens_BS)
        return mask_BS if mask_BS is not None and mask_BS.shape == shape_BS else None


def watch_padding(model: nn.Module) -> CallPadding:
    """Follow the calls of `model`, or of what it wraps (DDP, compiled), until `unwatch_padding`."""
    children = list(model.named_children())
    while len(children) == 1 and children[0][0] in ("_orig_mod", "module"):
        model = children[0][1]
        children = list(model.named_children())
    padding = CallPadding(model)
    padding.watch()
    return padding


def unwatch_padding(model: nn.Module) -> None:
    """Take away what `watch_padding` put on `model`, or on the model that this one is a copy of."""
    for module in model.modules():
        for kind in ("_forward_pre_hooks", "_forward_hooks"):
            hooks: dict[int, Any] = getattr(module, kind)
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), (CallPadding, DecoderTokens)):
                    for part in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
                        getattr(module, part, {}).pop(key, None)


def half_of(model: nn.Module, name: Literal["encoder", "decoder"]) -> nn.Module | None:
    """The encoder or the decoder of a model whose config (of transformers) says that it has both."""
    config, get = getattr(model, "config", None), getattr(model, f"get_{name}", None)
    half = get() if getattr(config, "is_encoder_decoder", False) and callable(get) else None
    return None if half is model else half


def lengths_of(side: Side | None, own: Lengths, others: Lengths) -> Lengths:
    """Share of each example that is real, float64 [B], by the size of an axis of tokens; None where all is.

    own, others: masks of the decoder's tokens and of all others. Where an axis of either could have that size, work of
    one `side` means its own; products of both have one of each, so that each stands for the root of the two's product.
    """
    first, second = (_parts(lengths) for lengths in ((own, others) if side else (others, own)))
    if side == "both":
        for size in first.keys() & second.keys():
            known = [part for part in (first[size], second[size]) if part is not None]
            first[size] = None if not known else (known[0] * known[1] if len(known) > 1 else known[0]).sqrt()
    return second | first


def _parts(lengths: Lengths) -> Lengths:
    return {size: None if mask is None else to_float64(mask).mean(1).cpu() for size, mask in lengths.items()}


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def _last(mask: object, size: int) -> Tensor | None:
    """A mask [B, tokens] for the last `size` tokens: those before are in the cache."""
    return mask[:, -size:].bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
