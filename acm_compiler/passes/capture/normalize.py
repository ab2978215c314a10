"""Makes every projection of a model a linear of its own, and keeps torch's fused paths from going around them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from acm_compiler.passes.capture.recorder import canonical_names
from acm_compiler.passes.capture.unpacked_attention import unpack_attention

_NESTED = "use_nested_tensor"


def normalize(model: nn.Module, *, only: Collection[str] | None = None) -> list[str]:
    """The paths of the attentions of `model` that were unpacked, for good and in place, at every path they have.

    `only` names attentions, or modules in them such as `layers.0.attention.q_proj`; None means all of them. Fused
    paths around the changed ones are switched off. The root itself cannot be replaced; `unpack_attention` can.
    """
    chosen = {
        name: module
        for name, module in _unpackable(model).items()
        if name and (only is None or any(_holds(name, other) for other in only))
    }
    replace_children(model, {module: unpack_attention(module) for module in chosen.values()})
    disable_fast_path(model, around=chosen)
    return list(chosen)


@contextlib.contextmanager
def normalized(model: nn.Module) -> Iterator[nn.Module]:
    """The model with its attentions unpacked, for looking at: their parameters are views of the model's own.

    It is the model itself, with other submodules until the block ends; where the root is an attention, it is
    another module. Afterwards, also after an error, the model is as it was.
    """
    unpacked: dict[nn.Module, nn.Module] = {
        module: unpack_attention(module, share_memory=True) for module in _unpackable(model).values()
    }
    former = disable_fast_path(model)
    try:
        replace_children(model, unpacked)
        yield unpacked.get(model, model)
    finally:
        replace_children(model, {new: old for old, new in unpacked.items()})
        restore_fast_path(model, former)


def disable_fast_path(model: nn.Module, *, around: Iterable[str] | None = None) -> dict[str, int]:
    """Keep torch's encoder layers from reading their children's weights instead of calling them.

    Concerns the encoders and encoder layers that hold one of the modules named in `around`, None: all. Their
    class, parameters and results stay, but for what a nested tensor would leave out: padded positions. Gives the
    former value of each switch that was on, for `restore_fast_path`.
    """
    names = None if around is None else list(around)
    former = {}
    for module, name in canonical_names(model).items():
        switch = _switch(module)
        if switch is None or not getattr(module, switch, 0):
            continue
        if names is None or any(_holds(name, other) for other in names):
            former[name] = getattr(module, switch)
            setattr(module, switch, type(former[name])(0))
    return former


def zeroed_encoders(model: nn.Module) -> list[str]:
    """The paths of torch's encoders that leave zeros at padded positions: in eval mode, while nothing has gradients."""
    return [
        name
        for module, name in canonical_names(model).items()
        if _switch(module) == _NESTED and module.use_nested_tensor
    ]


def restore_fast_path(model: nn.Module, former: Mapping[str, int]) -> None:
    """Undo `disable_fast_path`."""
    for name, value in former.items():
        module = model.get_submodule(name)
        switch = _switch(module)
        if switch is not None:
            setattr(module, switch, value)


def _switch(module: nn.Module) -> str | None:
    """The attribute that a torch encoder asks before it takes its fused path."""
    if isinstance(module, nn.TransformerEncoderLayer):
        # 0 means an activation that the fused kernel lacks; nothing but the choice of path reads it
        return "activation_relu_or_gelu"
    if isinstance(module, nn.TransformerEncoder):
        return _NESTED
    return None


def _unpackable(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """The attentions by path, but for subclasses, whose forward may differ, and those with computed weights."""
    return {
        name: module
        for module, name in canonical_names(model).items()
        if type(module) is nn.MultiheadAttention and _has_own_weights(module)
    }


def _has_own_weights(module: nn.MultiheadAttention) -> bool:
    """True if the packed weights are parameters, not computed as those of pruned or parametrized modules are."""
    weights = ("in_proj_weight",) if module._qkv_same_embed_dim else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return all(isinstance(module._parameters.get(name), nn.Parameter) for name in weights)


def replace_children(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Put each replacement wherever the module that it replaces is a child."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in replacements:
                parent._modules[name] = replacements[child]


def _holds(name: str, other: str) -> bool:
    """True if the module called `name` is, or contains, the one called `other`."""
    return not name or other == name or other.startswith(f"{name}.")
