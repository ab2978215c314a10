"""A rewritten model's tensors as a file: each storage once, ties between names kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import is_fully_sharded, is_in_parts, is_wrapped
from acm_compiler.acm.module import COUNTS, RUN_TIME
from acm_compiler.errors import StorageError, a_few_of
from acm_compiler.files import parse_json, whole_file


class Slot(NamedTuple):
    """One place of a model where a tensor is registered."""

    owner: nn.Module
    leaf: str
    tensor: Tensor


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every tensor that a saved model carries, under each of its names.

    All parameters and buffers, but for run-time choices and counters of ACMs, and for dense regions that no forward
    runs. What `state_dict` leaves out (rotary tables and the like) is among them: it cannot be rebuilt without the
    class.
    """
    acms = [module for module in model.modules() if isinstance(module, ACM)]
    left_out = {id(acm.dense) for acm in acms if acm.state != "dense"} | {id(acm.skips) for acm in acms}
    return dict(_walk(model, "", left_out))


def _walk(module: nn.Module, prefix: str, left_out: set[int]) -> Iterator[tuple[str, Slot]]:
    run_time = (*RUN_TIME, COUNTS) if isinstance(module, ACM) else ()
    for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and leaf not in run_time:
            yield f"{prefix}{leaf}", Slot(module, leaf, tensor)
    for name, child in module._modules.items():
        if child is not None and id(child) not in left_out:
            # a part that torch.compile wraps keeps its own name
            yield from _walk(getattr(child, "_orig_mod", child), f"{prefix}{name}.", left_out)


def collect(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, aliases): each storage under its first name, and the other names of tied ones.

    StorageError for modules that keep state which is no tensor.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise StorageError(
                "the module keeps state that is not a tensor",
                where=name,
                found="get_extra_state",
                fix="keep it as a parameter or a buffer: a saved folder holds tensors only",
            )
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    wholes: dict[int, Tensor] = {}
    for name, slot in slots(model).items():
        tensor = slot.tensor.detach()
        if is_in_parts(tensor):  # every process gets all of it, and the first writes
            if id(slot.tensor) not in wholes:
                wholes[id(slot.tensor)] = tensor.full_tensor().cpu()  # type: ignore[attr-defined]
            tensor = wholes[id(slot.tensor)]
        packed = isinstance(slot.tensor, nn.Parameter) and not (tensor.is_floating_point() or tensor.is_complex())
        if packed or is_wrapped(tensor):
            raise StorageError(
                "another library has quantised this weight, which a saved model has no form for",
                where=name,
                found=f"{type(slot.tensor).__name__} of {tensor.dtype}",
                fix="acm.save before that library quantises, and quantise again after acm.load; or acm.quantize(model, "
                "rest=True), whose weights are saved",
            )
        if tensor.is_meta:
            found, fix = "a tensor on the meta device", "give the model its weights first"
            raise StorageError("the model has no values to save", where=name, found=found, fix=fix)
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        owner = first.setdefault(key, name)
        if owner == name:
            tensors[name] = tensor
        else:
            aliases[name] = owner
    return tensors, aliases


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """Inside, modules that `fully_shard` made of a class of its own are of their former classes, by which they load.

    Their parameters are in parts, of which nothing was rounded; a forward may have left others.
    """
    changed: list[Any] = [module for module in model.modules() if is_fully_sharded(module)]
    kinds = [type(module) for module in changed]
    for module, kind in zip(changed, kinds, strict=True):
        module.reshard()
        module.__class__ = kind.__mro__[2]  # after FSDP's own two
    try:
        yield
    finally:
        for module, kind in zip(changed, kinds, strict=True):
            module.__class__ = kind


def shards(tensors: Mapping[str, Tensor], most: int, name: str) -> dict[str, dict[str, Tensor]]:
    """The tensors by file, in their order: one called `name`, or several of at most so many bytes, or one tensor, each.

    model.safetensors becomes model-00001-of-00003.safetensors and so on.
    """
    parts: list[dict[str, Tensor]] = [{}]
    left = most
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and size > left:
            parts.append({})
            left = most
        parts[-1][key] = tensor
        left -= size
    stem, _, suffix = name.partition(".")
    several = {f"{stem}-{i:05d}-of-{len(parts):05d}.{suffix}": part for i, part in enumerate(parts, start=1)}
    return several if len(parts) > 1 else {name: parts[0]}


def index_of(files: Mapping[str, Mapping[str, Tensor]]) -> str:
    """The list of tensors by file, as transformers writes and reads it."""
    places = {key: file for file, part in files.items() for key in part}
    size = sum(t.numel() * t.element_size() for part in files.values() for t in part.values())
    return json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=1)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], *, save_id: str, stop: str | None = None
) -> None:
    """Write weights to one file; an empty tensor called `stop` keeps others from taking it for weights of theirs."""
    # views of one storage become tensors of their own: the format holds no overlaps
    own = {name: tensor.contiguous().clone() if _is_part(tensor) else tensor for name, tensor in tensors.items()}
    metadata = {"aliases": json.dumps(dict(aliases)), "save": save_id}
    if stop is not None:
        own[stop], metadata["stop"] = torch.empty(0), stop
    with whole_file(path) as beside:
        save_file(own, beside, metadata=metadata)


def _is_part(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


class Stored(NamedTuple):
    """Content of a saved model's files of weights."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    save_id: str | None


def read_tensors(paths: Iterable[Path]) -> Stored:
    """Read files of weights onto the CPU, one after the other; StorageError where one is missing or damaged.

    There is no identifier of the save where they differ in it.
    """
    parts = [_read(path) for path in paths]
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    ids = {part.save_id for part in parts}
    return Stored(tensors, parts[0].aliases, ids.pop() if len(ids) == 1 else None)


def _read(path: Path) -> Stored:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # copies, because the file's tensors are not aligned, which costs time and changes last bits
            names = [name for name in file.keys() if name != metadata.get("stop")]  # noqa: SIM118
            tensors = {name: file.get_tensor(name).clone() for name in names}
        aliases = parse_json(metadata.get("aliases", "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        fix = "copy or download the file again from where it is whole, or save the model again"
        raise StorageError(
            "the weights cannot be read", where=str(path), found=str(error).splitlines()[0], fix=fix
        ) from error
    return Stored(tensors, aliases, metadata.get("save"))


def fill(model: nn.Module, stored: Stored, *, where: str) -> None:
    """Give `model` the stored tensors, in place: types and ties are the file's, whatever the model had.

    StorageError unless names and shapes agree exactly.
    """
    there = slots(model)
    _check_names(set(there), {*stored.tensors, *stored.aliases}, where)
    parameters: dict[str, nn.Parameter] = {}
    for name, slot in there.items():
        source = stored.aliases.get(name, name)
        tensor = stored.tensors.get(source)
        if tensor is None or tensor.shape != slot.tensor.shape:
            found = "nothing" if tensor is None else tuple(tensor.shape)
            raise StorageError(
                f"the weights do not fit at {name}", where=where, found=found, expected=tuple(slot.tensor.shape)
            )
        if slot.leaf not in slot.owner._parameters:
            slot.owner._buffers[slot.leaf] = tensor
            continue
        if source not in parameters:
            parameters[source] = _parameter(tensor, slot.tensor)
        slot.owner._parameters[slot.leaf] = parameters[source]


def _parameter(tensor: Tensor, former: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor, requires_grad=former.requires_grad)
    # transformers draws new values for parameters without this mark
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def _check_names(expected: set[str], found: set[str], where: str) -> None:
    if expected == found:
        return
    missing, unknown = sorted(expected - found), sorted(found - expected)
    raise StorageError(
        "the weights belong to another model",
        where=where,
        found=f"missing: {a_few_of(missing) or 'none'}; unknown: {a_few_of(unknown) or 'none'}",
        fix="check that the libraries are the versions named in model.json",
    )


def left_on_meta(model: nn.Module) -> list[str]:
    """Tensors without values that a module keeps outside its parameters and buffers, as `module.attribute`."""
    found = []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            values = value if isinstance(value, (list, tuple)) else (value,)
            if any(isinstance(v, Tensor) and v.is_meta for v in values):
                found.append(f"{name}.{attribute}")
    return found


def renew_run_time(acm: ACM) -> None:
    """Make the run-time choices of a loaded ACM anew: it runs all its learners."""
    for leaf, value in acm.written.items():
        acm._buffers[leaf] = torch.full((), value, dtype=torch.int32, device=acm.learners.w_in.device)
