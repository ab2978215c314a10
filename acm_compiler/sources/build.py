"""Build the model that a reference such as `torchvision:vit_b_16`, or the record of a saved model, names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import nn

from acm_compiler.errors import ModelSourceError, StorageError, did_you_mean
from acm_compiler.files import parse_json
from acm_compiler.recipe.fields import FUNCTION
from acm_compiler.recipe.lookup import SUFFIX
from acm_compiler.recipe.messages import wrong_values
from acm_compiler.recipe.models import SOURCES, InputConfig, ModelConfig
from acm_compiler.recipe.resolved import installed_version
from acm_compiler.sources import from_hf, from_python, from_registry
from acm_compiler.sources.builders import FAILURES, Device, Found, in_one_line
from acm_compiler.sources.inputs import Inputs, InputSpec, fit_to, make_inputs

_BUILDERS: dict[str, Callable[..., Found]] = {
    "torchvision": from_registry.build_torchvision,
    "timm": from_registry.build_timm,
    "hf": from_hf.build,
    "python": from_python.build,
    "shipped": from_registry.build_shipped,
}
_CHECKS: dict[str, Callable[[ModelConfig], None]] = {
    "torchvision": from_registry.check_torchvision,
    "timm": from_registry.check_timm,
    "hf": from_hf.check,
    "shipped": from_registry.check_shipped,
}
_LIBRARIES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}


class BuiltModel(NamedTuple):
    """A model in eval mode, example inputs for it (None when nobody said), and how to build it again."""

    model: nn.Module
    example_inputs: Inputs | None
    record: dict[str, Any]


def build(
    config: ModelConfig,
    *,
    device: Device = "cpu",
    example: InputConfig | InputSpec | None = None,
    allow_code: bool = False,
) -> BuiltModel:
    """The model that `config` names; on the meta device only its structure, without weights, and nothing is drawn.

    A `python:` function decides itself. `example` says what one example is, else the source does. `allow_code`:
    whether a saved directory may name a function.
    ModelSourceError when the reference names nothing that can be built here.
    """
    if config.source == "directory":
        record = _read_record(Path(config.name))
        if device != "meta":
            raise ModelSourceError(
                "a saved directory holds a model that is converted already", where=config.name, fix="acm.load it"
            )
        found = _rebuild(record, device=device, allow_code=allow_code)
    else:
        found = _BUILDERS[config.source](config, weights=device != "meta", device=device)
        record = _record(config, found)
    model = found.model.eval()
    inputs = make_inputs(model, example) if example is not None else found.example and found.example(model)
    return BuiltModel(model, None if inputs is None else fit_to(model, inputs), record)


def check_name(config: ModelConfig) -> None:
    """UsageError where the registry or file that `config` means has no such model, tag or weights."""
    if config.source in _CHECKS:
        _CHECKS[config.source](config)


def build_from_record(record: Mapping[str, Any], *, device: Device = "cpu", allow_code: bool = False) -> nn.Module:
    """The structure of the model that `record` describes, in eval mode, without weights, network or capture.

    ModelSourceError when it cannot be built here; for a function, unless `allow_code` says that it may be imported.
    """
    return _rebuild(record, device=device, allow_code=allow_code).model.eval()


def _rebuild(record: Mapping[str, Any], *, device: Device, allow_code: bool) -> Found:
    config = _config_of(record)
    if (config.source == "python" or config.trust_remote_code) and not allow_code:
        code = f"Python files that come with {config.name}" if config.source == "hf" else f"the function {config.name}"
        raise ModelSourceError(
            f"this model is built by {code}, which loading does not import by itself",
            fix="if you trust the directory: allow_code=True (--allow-code); or pass base_model=",
        )
    try:
        if config.source == "hf" and "config" in record and not config.trust_remote_code:
            return from_hf.rebuild(dict(record), device=device)
        return _BUILDERS[config.source](config, weights=False, device=device)
    except FAILURES as error:
        raise ModelSourceError(
            "the library does not build the model that was recorded",
            where=f"{config.source}:{config.name}",
            found=f"{type(error).__name__}: {in_one_line(error)}",
            fix="install the versions named in model.json, or pass base_model=",
        ) from error


def _record(config: ModelConfig, found: Found) -> dict[str, Any]:
    library = _LIBRARIES.get(config.source, "acm_compiler")
    said = config.model_dump(mode="json", exclude_none=True) | {"weights": config.weights}
    return {**said, **found.facts, "versions": {library: installed_version(library)}}


def _config_of(record: Mapping[str, Any]) -> ModelConfig:
    known = {key: value for key, value in record.items() if key in ModelConfig.model_fields}
    try:
        config = ModelConfig.model_validate(known)
    except ValidationError as error:
        raise _damaged(wrong_values(error)[0]) from error
    if config.source not in _BUILDERS:
        raise _damaged(f"source {config.source}")
    return config


def _damaged(found: str) -> StorageError:
    fix = "copy the folder again from where it is whole, or load it onto the model itself: base_model"
    return StorageError("the saved record of the model is damaged", found=found, fix=fix)


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record = parse_json((folder / "model.json").read_text(encoding="utf-8"))["source"]
    except FileNotFoundError as error:
        raise ModelSourceError("no saved model here", where=str(folder), expected="model.json in it") from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise StorageError(
            "model.json cannot be read", where=str(folder), found=str(error), expected="a model saved by acm.save"
        ) from error
    if record is None:
        fix = "name the model before conversion: python:my_module:my_model"
        raise StorageError("nothing here says how the model is built", where=str(folder), fix=fix)
    return record


FORMS = (
    "torchvision:NAME, timm:NAME, hf:PATH_OR_NAME, hf:FOLDER_OR_PACKAGE/FILE.gguf, python:package.module:function, "
    "shipped:NAME, a saved directory"
)


def parse_reference(text: str, **settings: Any) -> ModelConfig:
    """The model that `text` names, with further keys of `ModelConfig`; nothing is imported or looked up yet.

    ModelSourceError when it has no such form or the settings do not belong to its source.
    """
    source, colon, name = text.partition(":")
    if name.startswith("~/"):
        name = str(Path(name).expanduser())  # the shell leaves it after a colon
    if source == "hf" and name.endswith(SUFFIX) and "gguf" not in settings:
        name, _, settings["gguf"] = name.rpartition("/")
        name = name or "."
    if colon and source in SOURCES and name:
        try:
            return ModelConfig.model_validate({"source": source, "name": name, **settings})
        except ValidationError as error:
            raise ModelSourceError(error.errors()[0]["msg"], where=text) from None
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return _directory(text, folder)
    hint = did_you_mean(source, SOURCES) if colon and source not in SOURCES else ""
    is_function = not hint and re.fullmatch(FUNCTION, text)
    fix = f"did you mean python:{text}?" if is_function else None
    raise ModelSourceError(f"{text!r} is neither a model reference nor a directory{hint}", expected=FORMS, fix=fix)


def _directory(text: str, folder: Path) -> ModelConfig:
    if (folder / "model.json").is_file():
        return ModelConfig(source="directory", name=str(folder))
    if (folder / "config.json").is_file():
        raise ModelSourceError(f"{text} was saved by transformers, not by acm_compiler", fix=f"write hf:{text}")
    raise ModelSourceError(f"{text} holds no saved model", expected="model.json in it")
