"""Format checkpoint: a fixed k as an ordinary checkpoint of the model's own class, with thinner layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.reference import out_layer, prefix_output
from acm_compiler.checkpoint.hf_files import is_pretrained
from acm_compiler.errors import UsageError
from acm_compiler.exporting.fixed import fixed_ks, learner_share
from acm_compiler.passes.rewrite.conversion import Rewritten
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.site import LinearRef
from acm_compiler.sources.user_code import Attempt

FILE = "model.safetensors"
# parts of the names by which configurations of transformers call the width inside an MLP
_WIDTHS = ("intermediate", "inner", "ffn", "mlp", "hidden_dim", "d_ff", "feedforward", "feed_forward")
# keys of transformers' configurations that give biases to linears of MLPs and of attention
_BIASES = {"mlp_bias": False, "attention_bias": True}
_INSTEAD = (
    "format onnx holds a k per site; formats pt2 and aoti take every budget as an input, "
    "and k by controls=('k_lo', 'k_hi')"
)
_UNSAID = "the class cannot say how thin its layers are"
_BY_LAYER = "per_layer_config"
_BEFORE = "export it before acm.quantize; the formats pt2 and aoti hold quantised learners"


def usage(model: nn.Module) -> str:
    """Python code that loads the checkpoint."""
    name = type(model).__name__
    return f"from transformers import {name}; model = {name}.from_pretrained('.')"


def check_class(found: Rewritten, ks: Mapping[str, int]) -> None:
    """UsageError for sites whose first learners, `ks` of them, cannot be merged into layers of the class."""
    for name, acm in found.acms.items():
        site = found.plan.site(name)
        if (kind := found.owner.quantized) is not None:
            raise _refused(name, f"its learners are {kind}, and the class's layers floats", fix=_BEFORE)
        if site.kind != "linear" and site.learner_act != site.act:
            raise _refused(name, f"its learners' activation is {site.learner_act}, that of the class {site.act}")
        if site.kind == "linear" and site.learner_act != "identity" and (ks[name] < acm.count or not site.has_top):
            raise _refused(name, "its learners are not linear, and the class has one linear layer there")


@torch.no_grad()
def build(found: Rewritten, ks: Mapping[str, int]) -> nn.Module:
    """A model of the same class without ACMs, whose thinner layers are the first k learners of each site.

    UsageError where the class cannot say it.
    """
    model: Any = found.model
    if not is_pretrained(model):
        expected = "a model of transformers, whose configuration names the width of its layers"
        raise UsageError(
            "no class to write a checkpoint of", found=type(model).__name__, expected=expected, fix=_INSTEAD
        )
    given = _merged(found, ks)
    kept = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    inside = tuple(f"{name}." for name in found.acms)
    given |= {name: tensor for name, tensor in kept if not name.startswith(inside)}
    try:
        return _filled(model, _configured(found, ks), given)
    except UsageError as error:
        if len(set(ks.values())) == 1:
            raise
        more: dict[str, Any] = {"where": error.where, "found": error.found, "expected": error.expected}
        raise UsageError(error.what, **more, fix=f"{_one_k(found, ks)}{_INSTEAD}") from error


def _merged(found: Rewritten, ks: Mapping[str, int]) -> dict[str, Tensor]:
    """Parameters of the class by name, each made of the layers whose rows it packs, in their order."""
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    turned: set[str] = set()
    for name, k in ks.items():
        for ref, weight, bias in _layers(found.acms[name], found.plan.site(name), k):
            first = ref.rows[0] if ref.rows else 0
            parts.setdefault(ref.weight, []).append((first, weight))
            turned |= {ref.weight} if ref.transposed else set()
            if bias is not None:
                parts.setdefault(ref.bias or ref.weight.removesuffix("weight") + "bias", []).append((first, bias))
    given = {name: torch.cat([rows for _, rows in sorted(some, key=itemgetter(0))]) for name, some in parts.items()}
    return {name: tensor.T if name in turned else tensor for name, tensor in given.items()}


def _one_k(found: Rewritten, ks: Mapping[str, int]) -> str:
    """The largest k for all sites that costs no more than a k per site, in words; nothing where there is none."""
    share, most = learner_share(found, ks), max(acm.count for acm in found.acms.values())
    same = {k: fixed_ks(found, k) for k in range(1, most + 1)}
    within = [k for k, each in same.items() if set(each.values()) == {k} and learner_share(found, each) <= share]
    if not within:
        return ""
    try:
        _configured(found, same[within[-1]])
    except UsageError:
        return ""
    return f"fixed_k={within[-1]} (--fixed-k {within[-1]}) costs no more; "


def _layers(acm: ACM, site: PlannedSite, k: int) -> list[tuple[LinearRef, Tensor, Tensor | None]]:
    """The site's linear layers in the class, with what the first k learners make of their weights and biases."""
    weights = acm.learners.weights()
    b_O = weights.b_out[k] if bool(weights.b_out[k].any()) or (site.last or site.first[0]).bias else None
    if site.kind == "linear":
        identity = torch.eye(acm.d_in, dtype=weights.w_in.dtype, device=weights.w_in.device)
        matrix = (prefix_output(identity, weights, k) - weights.b_out[k]).T
        return _divided(site, matrix, b_O)
    assert site.last is not None
    branches = zip(site.first, ((weights.w_in, weights.b_in), (weights.w_up, weights.b_up)), strict=False)
    first = [
        (ref, w_NHD[:k].flatten(0, 1), None if b_NH is None else b_NH[:k].flatten())
        for ref, (w_NHD, b_NH) in branches
        if w_NHD is not None
    ]
    last = weights.w_top if k == acm.count and weights.w_top is not None else out_layer(weights, k)
    return [*first, (site.last, last, b_O)]


def _divided(site: PlannedSite, w_OD: Tensor, b_O: Tensor | None) -> list[tuple[LinearRef, Tensor, Tensor | None]]:
    """A projection's matrix and bias as those of the linears that the site took the place of."""
    widths = site.graft.widths or (site.d_out,)
    biases = [None] * len(widths) if b_O is None else b_O.split(widths)
    return list(zip(site.first, w_OD.split(widths), biases, strict=True))


def _configured(found: Rewritten, ks: Mapping[str, int]) -> Any:
    """The model's configuration with the width of its layers, and biases where it has a key for them."""
    config: Any = copy.deepcopy(found.model.config)
    vars(config).pop("quantization_config", None)  # of a file that the model was read from: these weights are floats
    sites = found.plan.sites
    for key, linear in _BIASES.items():
        names = [site.name for site in sites if (site.kind == "linear") == linear]
        biased = any(bool(found.acms[name].learners.b_out[ks[name]].any()) for name in names)
        for part in _parts(config):
            if biased and getattr(part, key, None) is False:
                setattr(part, key, True)
    if mlps := [site for site in sites if site.kind != "linear"]:
        widths = {site.name: ks[site.name] * site.width for site in mlps}
        _set_widths(config, widths, before={site.name: site.dense_width for site in mlps})
    return config


def _parts(config: Any) -> list[Any]:
    """A configuration and those in it, of the parts of a model (`text_config` of CLIP), at any depth."""
    inner = [getattr(config, name, None) for name in config.sub_configs]
    return [config, *(part for found in inner if found is not None for part in _parts(found))]


def _set_widths(config: Any, widths: Mapping[str, int], *, before: Mapping[str, Any]) -> None:
    """Write the width of every MLP to the key that held the one of `before`. UsageError where the class has no way to.

    A number is that of all layers (`intermediate_size` of Llama), or of all in one stack (`encoder_ffn_dim` and
    `decoder_ffn_dim` of BART, `intermediate_size` of CLIP's two parts): each of several keys takes one width. A list
    has one for each layer (Gemma 3n). Where widths differ and one key holds a number, configurations with values by
    layer take them.
    """
    old = set(before.values())
    keys = [(part, key, value) for part in _parts(config) for key, value in _widths_in(part) if old & _numbers(value)]
    keys = keys or [(config, key, None) for key in ("n_inner",) if hasattr(config, key)]  # GPT-2: four times its width
    new = [{width for name, width in widths.items() if len(keys) == 1 or before[name] == value} for *_, value in keys]
    if len(keys) == 1 and isinstance(keys[0][2], list):
        setattr(*keys[0][:2], [*_of_layers(widths, dict(enumerate(keys[0][2]))).values()])
    elif keys and all(len(some) == 1 for some in new):
        for (part, key, _), some in zip(keys, new, strict=True):
            setattr(part, key, some.pop())
    elif len(keys) == 1:
        _set_layers(*keys[0][:2], widths)
    else:
        found = ", ".join(key for _, key, _ in keys)
        raise _no_widths(widths, f"keys for it: {found}" if keys else "no key for it")


def _widths_in(config: Any) -> list[tuple[str, Any]]:
    """The keys of a configuration that may hold the width inside an MLP, each with its value."""
    return [(key, value) for key, value in config.to_dict().items() if any(part in key for part in _WIDTHS)]


def _numbers(value: Any) -> set[Any]:
    return set(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else {value}


def _of_layers(widths: Mapping[str, int], layers: dict[int, int]) -> dict[int, int]:
    """Widths by the number of the layer, which is the first in the name of its MLP, over those in `layers`."""
    given: dict[int, int] = {}
    for name, width in widths.items():
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is None or number in given or (layers and number not in layers):
            raise _no_widths(widths, f"{name}, which is not the one MLP of a numbered layer")
        given[number] = width
    return layers | given


def _set_layers(config: Any, key: str, widths: Mapping[str, int]) -> None:
    """Give each layer its own width, in a configuration of transformers that holds values by layer."""
    if not hasattr(type(config), _BY_LAYER):
        raise _no_widths(widths, "one width for all layers")
    layers: dict[int, dict[str, Any]] = {
        int(layer): dict(values) for layer, values in config.to_dict().get(_BY_LAYER, {}).items()
    }
    for number, width in _of_layers(widths, {}).items():
        layers.setdefault(number, {})[key] = width
    setattr(config, _BY_LAYER, layers)


def _no_widths(widths: Mapping[str, int], found: str) -> UsageError:
    least, most = min(widths.values()), max(widths.values())
    wanted = f"{len(set(widths.values()))} widths, from {least} to {most}" if least < most else f"the width {least}"
    return UsageError(_UNSAID, found=found, expected=wanted, fix=_INSTEAD)


def _filled(model: Any, config: Any, given: dict[str, Tensor]) -> nn.Module:
    """A new model of that class with the tensors given; layers whose bias nobody gave have zeros there."""
    attempt = Attempt()
    with attempt, torch.random.fork_rng():
        built = type(model)(config).to(next(model.parameters()))
    if attempt.error is not None:
        reason = f"{type(model).__name__} is built of one width"
        raise UsageError(_UNSAID, found=reason, fix=_INSTEAD) from attempt.error
    expected = built.state_dict()
    for name, tensor in expected.items():
        if name not in given and name.endswith(".bias"):
            given[name] = torch.zeros_like(tensor)
        if name not in given or given[name].shape != tensor.shape:
            size = list(given[name].shape) if name in given else "nothing"
            raise _refused(name, f"{size} for a parameter of {list(tensor.shape)}")
    if lost := [name for name in given if name.endswith(".bias") and name not in expected]:
        raise _refused(lost[0], "a bias, which the class does not have", fix=f"plan sites='mlp' alone; {_INSTEAD}")
    built.load_state_dict({name: given[name] for name in expected})
    built.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return built.eval()


def _refused(where: str, found: str, *, fix: str = _INSTEAD) -> UsageError:
    return UsageError("the model's class cannot hold this k", where=where, found=found, fix=fix)
