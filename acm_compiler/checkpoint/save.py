"""`acm.save`: a rewritten model as a folder that needs no pickle, no data set and no recipe to be loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from acm_compiler.acm.intact import is_in_parts
from acm_compiler.checkpoint.documents import budgets_document, format_of
from acm_compiler.checkpoint.folder import BUDGETS, INDEX, MODEL, PLAN, WEIGHTS, Writer, checked_extra, write_folder
from acm_compiler.checkpoint.hf_files import hf_files, is_pretrained
from acm_compiler.checkpoint.source import source_of, why_none
from acm_compiler.checkpoint.tensors import collect, index_of, own_classes, shards, write_tensors
from acm_compiler.errors import check_bool
from acm_compiler.files import bytes_of, whole_file
from acm_compiler.passes.rewrite.conversion import Conversion, rewritten
from acm_compiler.passes.rewrite.revert import rewritten_root
from acm_compiler.passes.rewrite.saving_hooks import refuse_part
from acm_compiler.recipe.resolved import installed_versions
from acm_compiler.runtime.ranks import by_first

_LOG = logging.getLogger(__name__)


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    extra: Mapping[str, bytes | str] | None = None,
    among_others: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a rewritten model to `directory`: its plan, weights, source and budgets, and the `extra` files by name.

    What is set comes back with `acm.load`: the budget, its cap, a fixed k.
    Where each process holds a part of the parameters (FSDP, tensor parallelism) all of them call this: every parameter
    is gathered, and the first process writes.
    Dense regions are left out but at sites whose learners were never fitted. Wrappers (DDP, compiled) are looked
    through. Files of ours already in the folder are replaced, once all new ones are complete; those of others are
    refused, or left there with `among_others`. Models of transformers get a config.json: see `acm_compiler.hf`. The
    log warns where `acm.load` will need the base model.
    max_shard_size: bytes, or text as "5GB": weights that take more are cut into several files of at most so much, or
    one tensor, each, beside model.safetensors.index.json; tied ones are written once.
    Raises NotRewritten, UsageError for a part of a rewritten model, and StorageError for a folder that holds files of
    others or cannot be written.
    """
    check_bool(among_others, "among_others")
    root = rewritten_root(model)
    with own_classes(root):
        _save(root, directory, checked_extra(extra), among_others=among_others, max_shard_size=max_shard_size)


def _save(
    root: nn.Module,
    directory: str | os.PathLike[str],
    extra: dict[str, bytes | str],
    *,
    among_others: bool,
    max_shard_size: int | str,
) -> None:
    found = rewritten(root)
    owner = found.owner
    refuse_part(root, whole=len(found.acms) == len(owner.plan.sites))
    most = bytes_of(max_shard_size, "max_shard_size")
    tensors, aliases = collect(root)
    parts = shards(tensors, most, WEIGHTS)
    save_id = uuid.uuid4().hex
    plan = found.reached
    texts = {PLAN: plan.to_json(), BUDGETS: _json(budgets_document(found))}
    if len(parts) > 1:
        texts[INDEX] = index_of(parts)
    source = source_of(root, plan, owner.rest)
    extra = {**hf_files(root, source), **extra}
    files = [*extra, *texts, MODEL, *parts]
    description = _description(owner, texts, save_id, source=source, files=files)
    stop = _stop(root, owner, tensors)
    writers: dict[str, Writer] = {
        **{name: _writes_tensors(part, aliases, save_id, stop) for name, part in parts.items()},
        **{name: _writes(content) for name, content in (texts | extra).items()},
        MODEL: lambda path: _write_description(path, description, parts),
    }
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with by_first(in_parts=any(map(is_in_parts, root.parameters()))) as writes:
        if writes:
            write_folder(directory, writers, size_bytes=size_bytes, among_others=among_others)
    if writes and (source is None or owner.undo.graph is not None):
        _warn_of_no_source(root, directory, why_none(root, plan, owner.rest) if source is None else None)


def _warn_of_no_source(root: nn.Module, directory: str | os.PathLike[str], reason: str | None) -> None:
    _LOG.warning(
        "%s: nothing says how this %s is built again%s\n  load it into your own: acm.load(%r, base_model=…)",
        directory,
        type(root).__name__,
        f" ({reason})" if reason else "",
        str(directory),
    )


def _stop(root: nn.Module, owner: Conversion, tensors: Mapping[str, Tensor]) -> str | None:
    """A matrix that ACMs replaced. Under its name transformers finds another shape, and stops, where it would draw
    missing weights at random: when a class is given a config of its own for this folder.
    """
    names = (ref.weight for site in owner.plan.sites for ref in site.first)
    return next((name for name in names if name not in tensors), None) if is_pretrained(root) else None


def _writes(content: bytes | str) -> Writer:
    data = content.encode() if isinstance(content, str) else content

    def write(path: Path) -> None:
        with whole_file(path) as beside:
            beside.write_bytes(data)

    return write


def _writes_tensors(part: Mapping[str, Tensor], aliases: Mapping[str, str], save_id: str, stop: str | None) -> Writer:
    return lambda path: write_tensors(path, part, aliases, save_id=save_id, stop=stop)


def _write_description(path: Path, description: Mapping[str, Any], weights: Iterable[str]) -> None:
    """Write model.json beside the weights, whose digest it holds with those of the texts."""
    digests = description["digests"] | {name: file_digest(path.with_name(name)) for name in weights}
    _writes(_json({**description, "digests": digests}))(path)


def _description(
    owner: Conversion, texts: Mapping[str, str], save_id: str, *, source: dict[str, Any] | None, files: list[str]
) -> dict[str, Any]:
    return {
        "format": format_of(owner),
        "class": owner.plan.model.cls,
        "source": source,
        "graph": graph_digest(owner.undo.graph),
        "versions": installed_versions(),
        "save": save_id,
        "digests": {name: digest(text) for name, text in texts.items()},
        "files": files,
    }


def digest(text: str) -> str:
    """Hash that ties the texts of one save together."""
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def graph_digest(graph: fx.Graph | None) -> str | None:
    """A digest of the nodes of an fx.GraphModule's graph: operations, targets, and who reads whom."""
    if graph is None:
        return None
    nodes = {node: i for i, node in enumerate(graph.nodes)}
    lines = [f"{node.op} {_target(node)} {[nodes[source] for source in node.all_input_nodes]}" for node in nodes]
    return digest("\n".join(lines))


def _target(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1)
