"""Whose tokens the parts of an encoder-decoder work on: the decoder's own, or those of the encoder.

Shapes: B examples, S the decoder's own tokens of one call, M the encoder's (the decoder's memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from acm_compiler.acm.context import only
from acm_compiler.float64 import to_float64
from acm_compiler.inputs import by_name
from acm_compiler.kept_work import outside_acms

# "own": the decoder's tokens; "both": attention of those to the encoder's; None stands for all else
Side = Literal["own", "both"]
Lengths = dict[int, Tensor | None]


class DecoderTokens:
    """Where a forward is in an encoder-decoder, and what the decoder's latest call said about padding.

    `own` and `memory`: for the number of tokens S or M the mask, bool [B, S] or [B, M], True at real tokens, or None.
    """

    def __init__(self) -> None:
        self.own: Lengths = {}
        self.memory: Lengths = {}
        self._handed: Tensor | None = None
        self._sides: list[Side | None] = []
        self._past = False

    @property
    def side(self) -> Side | None:
        """Whose tokens the innermost running part works on; after the decoder, up to the model's end, its own."""
        if self._sides:
            return self._sides[-1]
        return "own" if self._past else None

    def begin(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The decoder is called."""
        args, kwargs = by_name(decoder, args, kwargs)
        mask, memory_mask = kwargs.get("attention_mask"), kwargs.get("encoder_attention_mask")
        handed: Any = kwargs.get("encoder_hidden_states")
        self._handed = handed
        first = next((v for v in _tensors(args, kwargs) if v is not mask and v is not handed), None)
        self.own = {} if first is None else {first.shape[1]: _last(mask, first.shape[1])}
        known = handed is not None and memory_mask is not None
        self.memory = {handed.shape[1]: _last(memory_mask, handed.shape[1])} if known else {}

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part of the decoder begins: what it reads shows in the tensors of the encoder that it is handed."""
        given = [value is self._handed for value in _tensors(args, kwargs)]
        self._sides.append("own" if not any(given) else None if given[0] else "both")

    def leave(self) -> None:
        """The innermost part of the decoder ends."""
        self._sides.pop()
        self._past = not self._sides

    def end(self) -> None:
        """The model ends."""
        self._past, self._handed = False, None


@contextmanager
def decoder_watched(model: nn.Module, here: DecoderTokens, when: Callable[[], bool]) -> Iterator[None]:
    """While open, `here` follows the decoder of `model`, where the config of transformers says that it has one.

    It follows the calls of which `when()` is true.
    """
    decoder, handles = half_of(model, "decoder"), []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is decoder:
            here.begin(module, args, kwargs)
        here.enter(args, kwargs)

    end, leave = only(when, lambda *_: here.end()), only(when, lambda *_: here.leave())

    try:
        if decoder is not None:
            handles.append(model.register_forward_hook(end, always_call=True))
            for module in outside_acms(decoder):
                handles.append(module.register_forward_pre_hook(only(when, enter), prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def half_of(model: nn.Module, name: Literal["encoder", "decoder"]) -> nn.Module | None:
    """The encoder or the decoder of a model whose config (of transformers) says that it has both."""
    config, get = getattr(model, "config", None), getattr(model, f"get_{name}", None)
    half = get() if getattr(config, "is_encoder_decoder", False) and callable(get) else None
    return None if half is model else half


def lengths_of(side: Side | None, own: Lengths, others: Lengths) -> Lengths:
    """By the size of an axis of tokens: what part of it is real, float64 [B], None where all is.

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
