"""Refuses an ACM that another tool changed, cannot hold or waits for, before that tool fails in its own words.

An ACM's operators read weights, and never call the layers that hold them.

Tools that quantise or adapt every `nn.Linear` of a model find the two of a gate, and put another layer or another kind
of tensor there, which the operators could not read, or would leave out without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from acm_compiler.acm.arguments import LearnerWeights
from acm_compiler.acm.check_arguments import OWN_OFFLOAD
from acm_compiler.acm.quantized.integers import stands_for_floats
from acm_compiler.errors import NoDenseRegion, UsageError

_OUTSIDE = (
    "acm.quantize(model) makes learners int8, with rest=True the linears around them, too; let other tools have the "
    "layers outside of ACMs only (acm.sites(model) names the ACMs), torchao the weights of learners, too "
    "(docs/quantise.md); LoRA can name the ACMs themselves: import acm_compiler.hf, then "
    "LoraConfig(target_modules=list(acm.sites(model)))"
)
_KIND, _DTYPE = frozenset((nn.Parameter,)), attrgetter("dtype")
_FLOATS = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_WEIGHTS = LearnerWeights._fields


def refuse_changed(name: str, layers: tuple[nn.Module, nn.Module], learners: nn.Module, *, split: bool = False) -> None:
    """Raise UsageError where a gate's `layers` are not plain linears, or they or `learners` hold no plain weights.

    Learners may hold another library's, which stand for floats. name: of the ACM, for the message.
    split: learners hold this process's part of weights.
    """
    for layer in layers:
        kind = type(layer)
        if kind is not nn.Linear and kind.forward is not nn.Linear.forward:  # of a class Dynamo guards what it reads
            raise _changed(name, f"a layer of its gate is a {kind.__module__}.{kind.__name__}", "torch.nn.Linear")
    if torch.compiler.is_compiling():
        # by key: of a dict that is iterated Dynamo guards every key and value, at each call
        held = [layer._parameters.get(key) for layer in layers for key in ("weight", "bias")]
        held += [learners._parameters.get(key) for key in _WEIGHTS]
    else:
        if torch._C._get_tracing_state() is not None:
            refuse_torchscript(name)
        held = [*layers[0]._parameters.values(), *layers[1]._parameters.values(), *learners._parameters.values()]
        # a call of a function for each of them would take longer than a small site's kernel
        if _KIND.issuperset(map(type, held)) and _FLOATS.issuperset(map(_DTYPE, held)):
            return
    for parameter in held:
        if parameter is not None and not _is_plain(parameter):
            if stands_for_floats(parameter) and any(parameter is own for own in learners._parameters.values()):
                continue
            if is_in_parts(parameter):
                if split:
                    continue
                raise UsageError(
                    "this ACM runs with parameters of which each process holds a part",
                    where=name,
                    found="fully_shard on its gate or its learners alone, or a parallel style for other layers",
                    fix="fully_shard(acm), or a module around it: its gate and learners are gathered with it; for "
                    "tensor parallelism parallelize_module(model, mesh, {name: acm_compiler.SplitLearners()})",
                )
            found = type(parameter).__name__ if is_wrapped(parameter) else f"a weight of {parameter.dtype}"
            raise _changed(name, found, "floating-point weights of torch's own kind")


def refuse_without_dense(name: str) -> NoReturn:
    """Raise NoDenseRegion: the dense region of a site is asked for, and gone."""
    raise NoDenseRegion(
        "the dense region that this ACM replaced is not there any more",
        where=name,
        fix="give the original model: acm.load(directory, base_model=model); or rewrite that anew",
    )


def refuse_torchscript(name: str) -> NoReturn:
    """Raise UsageError: TorchScript cannot hold an ACM."""
    raise UsageError(
        "TorchScript (torch.jit.trace and script, and the ONNX exporter built on them) cannot hold an ACM, which "
        "decides for each token what runs",
        where=name,
        fix="use torch.compile or torch.export.export; or the original model, or a copy after acm.revert(copy)",
    )


def refuse_onnx() -> None:
    """Raise UsageError within torch.onnx.export."""
    if torch.onnx.is_in_onnx_export():
        raise UsageError(
            "an ACM cannot be exported to ONNX so: no operator there chooses a computation per token",
            fix="acm.export(model, path, inputs, format='onnx') writes other operators in its place; "
            "torch.export.export and torch.compile take the ACMs",
        )


def refuse_adapted(acms: Mapping[str, Any], request: str) -> None:
    """Raise UsageError where adapters change what one of these ACMs, by name, computes: `request` would lose them."""
    adapted = [name for name, acm in acms.items() if acm.adapter is not None]
    if adapted:
        raise UsageError(
            f"{request} takes no adapters on learners",
            where=adapted[0],
            fix="model = adapted.merge_and_unload(); adapted.save_pretrained(folder) keeps the adapters by themselves",
        )


def refuse_quantized(acms: Mapping[str, Any], request: str) -> None:
    """UsageError where `request` would fit or train learners that were quantised, or needs their floats."""
    for name, acm in acms.items():
        if (kind := acm.learners.quantized) is not None:
            raise UsageError(
                f"{request} is for learners of floats, and those of this model are {kind}",
                where=name,
                fix="do it before they are quantised; acm.recalibrate measures the budgets of a quantised model",
            )


def refuse_skips(acms: Mapping[str, Any], request: str) -> None:
    """Raise UsageError where these ACMs, by name, skip small values, which `request` takes no notice of."""
    skipping = [name for name, acm in acms.items() if acm.skips is not None]
    if skipping:
        fix = "first acm.set_sparsity(model, None), and again afterwards"
        raise UsageError(f"{request} is for learners that skip no values", where=skipping[0], fix=fix)


def refuse_meta(acms: Mapping[str, nn.Module], request: str) -> None:
    """Raise UsageError where weights of these ACMs, by name, are on meta: elsewhere, until a forward, or nowhere."""
    for name, acm in acms.items():
        if any(parameter.is_meta for parameter in acm.parameters()):
            raise UsageError(
                f"{request} needs the weights of every site, and these are on meta",
                where=name,
                fix=OWN_OFFLOAD,
            )


def refuse_empty(acms: Mapping[str, Any]) -> None:
    """Raise UsageError where these ACMs, by name, are on meta with what they choose k by: they cannot be asked or run.

    Those whose weights alone are on meta, by another library's offload, can.
    """
    for name, acm in acms.items():
        if acm.k_lo.is_meta:
            fix = "load the weights first: acm.load(directory), or acm.rewrite of a model that has its weights"
            raise UsageError("this model has no weights: it is on the meta device", where=name, fix=fix)


def refuse_in_parts(model: nn.Module, request: str) -> None:
    """Raise UsageError where each process holds a part of the model, and `request` needs all of it."""
    if parts := in_parts(model):
        raise UsageError(
            f"{request} needs whole parameters, and each process holds a part of these (FSDP, tensor parallelism)",
            where=parts[0] or type(model).__name__,
            fix="do it before fully_shard or parallelize_module; or acm.save(model, folder) in all processes, which "
            "gathers them, and acm.load(folder)",
        )


def in_parts(model: nn.Module) -> list[str]:
    """Names of modules and parameters of which each process holds a part."""
    parts = [name for name, module in model.named_modules() if is_fully_sharded(module)]
    return parts + [name for name, parameter in model.named_parameters() if is_in_parts(parameter)]


def is_in_parts(tensor: Tensor) -> bool:
    """True for a DTensor, of which each process holds a part."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def is_fully_sharded(module: nn.Module) -> bool:
    """True for a module that `fully_shard` was given; its parameters may be gathered just now."""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def refuse_idle(acm: Any) -> None:
    """UsageError where a step under DistributedDataParallel would leave out parts of a training ACM."""
    if acm.state == "dense":
        fix = "fit them first: acm.calibrate(model, batches), or a recipe's distill phase"
        _refuse_idle(acm.name, acm.parameters(), what="learners that were never fitted", fix=fix)
    elif acm.temperature is None:
        fix = (
            "acm.relax(model, 0.8) lets training sample the gates; to train all else, before DDP wraps the model: "
            "for site in acm.sites(model).values(): site.gate.requires_grad_(False)"
        )
        _refuse_idle(acm.name, acm.gate.parameters(), what="gates that are not relaxed", fix=fix)


def _refuse_idle(name: str, parameters: Iterable[nn.Parameter], *, what: str, fix: str) -> None:
    """Raise UsageError where the wrapper whose forward runs waits for gradients of `parameters`, which get none.

    name: of the ACM; `what` takes no part, and `fix` is what to do about it.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper.find_unused_parameters or wrapper.static_graph:
        return
    if wrapper.require_backward_grad_sync and any(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"{what} take no part in this step, and DistributedDataParallel waits for the gradients of all parameters",
            where=name,
            fix=fix,
        )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and (type(tensor) is nn.Parameter or not is_wrapped(tensor))


def is_wrapped(tensor: Tensor) -> bool:
    """True for a tensor of another library that holds others, such as quantised values and their scales."""
    return is_traceable_wrapper_subclass(tensor)


def _changed(name: str, found: str, expected: str) -> UsageError:
    return UsageError(
        "another tool has quantised or adapted this ACM", where=name, found=found, expected=expected, fix=_OUTSIDE
    )
