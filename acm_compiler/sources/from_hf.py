"""`hf:PATH_OR_NAME`: models of transformers, from a local folder, a config file, a GGUF file, or the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from acm_compiler.errors import ModelSourceError, did_you_mean, nearest
from acm_compiler.recipe.load import installed_path
from acm_compiler.recipe.lookup import gguf_file
from acm_compiler.recipe.models import AUTO_CLASSES, ModelConfig
from acm_compiler.sources import from_gguf
from acm_compiler.sources.builders import (
    Device,
    Found,
    build_on,
    in_one_line,
    load_own_file,
    refuse_names,
    refuse_reserved,
    unloadable,
)
from acm_compiler.sources.inputs import default_inputs

# keys of a saved config that make transformers fetch or run code of others
_UNSAFE = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config", "trust_remote_code")


def check(config: ModelConfig) -> None:
    """UsageError where the GGUF file that `config` names is not here, or is of another format."""
    if config.gguf:
        gguf_file(config)


def build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    """The model at `config.name`, built by its auto class; code that comes with it runs only if `config` says so."""
    refuse_names(config)
    with from_gguf.parsed_once():
        return _build(config, weights=weights, device=device)


def _build(config: ModelConfig, *, weights: bool, device: Device) -> Found:
    opened = _open_gguf(config) if config.gguf else _open(config)
    settings = opened.settings
    auto = _auto_class(config.auto_class or opened.auto_class, settings)
    if weights and config.weights == "default":
        model = opened.fetch(auto)
    else:
        model = build_on(device, lambda: auto.from_config(settings, trust_remote_code=config.trust_remote_code))
        if weights:
            load_own_file(model, config)
    is_own_code = type(model).__module__.startswith("transformers.")
    facts = {"auto_class": auto.__name__, "config": settings.to_dict(), "trust_remote_code": not is_own_code}
    return Found(model=model, example=default_inputs, facts=facts)


class _Opened(NamedTuple):
    """A model's config, the auto class that builds it unless another is asked for, and a function that loads it."""

    settings: Any
    auto_class: str
    fetch: Callable[[Any], nn.Module]


def _open(config: ModelConfig) -> _Opened:
    """The model in a folder or on the hub."""
    place = place_of(config.name)
    import_transformers()
    offline = out_of_reach(place)
    settings = _settings(config, place, offline=offline)
    return _Opened(
        settings, _named_class(settings), lambda auto: _fetch(auto, settings, config, place, offline=offline)
    )


def _open_gguf(config: ModelConfig) -> _Opened:
    """The model in a GGUF file."""
    path = gguf_file(config)
    import_transformers()
    refuse_reserved(config)
    settings, unknown = from_gguf.read_config(path, **config.args)
    _refuse_unknown(unknown, settings, config)
    return _Opened(settings, from_gguf.writer_of(settings), lambda auto: from_gguf.read_model(path, auto, settings))


def rebuild(record: dict[str, Any], *, device: Device) -> Found:
    """The model that `record` describes, from the config stored in it: no folder, no hub."""
    config = recorded_config(record)
    auto = _auto_class(record["auto_class"], config)
    model = build_on(device, lambda: auto.from_config(config, trust_remote_code=False))
    return Found(model=model, example=default_inputs)


def recorded_config(record: dict[str, Any]) -> Any:
    """The config stored in `record`; ModelSourceError where transformers here does not know its kind."""
    transformers = import_transformers()
    from huggingface_hub.errors import StrictDataclassError

    settings = _with_floats(_without_unsafe(record["config"]))
    try:
        return transformers.AutoConfig.for_model(**settings)
    except (ValueError, StrictDataclassError) as error:
        fix = "install a transformers that knows it: pip install -U transformers"
        what = "transformers here does not know this model"
        raise ModelSourceError(what, found=in_one_line(error), fix=fix) from error


def import_transformers() -> Any:
    """The package. ModelSourceError where it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ModelSourceError("transformers is not installed", fix="pip install 'acm_compiler[hf]'") from error
    return transformers


def _settings(config: ModelConfig, place: str, *, offline: str | None) -> Any:
    """The model's config, with `args` applied; from the hub's cache alone where `offline` says why."""
    from transformers import AutoConfig

    refuse_reserved(config)
    trusted = config.trust_remote_code
    if (Path(place) / "model.json").is_file():
        raise ModelSourceError(
            "this folder holds a model that is converted already", where=place, fix="acm.load it, or plan its base"
        )
    try:
        settings, unused = AutoConfig.from_pretrained(
            place,
            trust_remote_code=trusted,
            return_unused_kwargs=True,
            **{"local_files_only": offline is not None} | config.args,
        )
    except (OSError, ValueError, TypeError, ImportError) as error:
        if "trust_remote_code" in str(error) and not trusted:
            raise _untrusted(config) from error
        raise ModelSourceError(
            f"transformers finds no model at {config.name!r}{similar_paths(place)}",
            found=_why(error, offline),
            fix="give a folder or config.json on this machine, or a name on the hub while it can be reached",
        ) from error
    _refuse_unknown(unused, settings, config)
    return settings


def _refuse_unknown(keys: Iterable[str], settings: Any, config: ModelConfig) -> None:
    for key in keys:
        hint = did_you_mean(key, settings.to_dict())
        raise ModelSourceError(f"the config of {config.name} has no key {key!r}{hint}", fix="leave it out")


def _why(error: Exception, offline: str | None) -> str:
    if offline is None:
        return in_one_line(error)
    return f"no such folder here, and nothing of that name in the hub's cache; {offline}"


def _untrusted(config: ModelConfig) -> ModelSourceError:
    return ModelSourceError(
        f"hf:{config.name} comes with Python files of its own, which are not run unasked",
        fix="read them; if you trust them: trust_remote_code: true (--trust-remote-code)",
    )


def classes_of(auto_class: str, settings: Any) -> tuple[type, ...]:
    """The classes of transformers' own that an auto class of theirs builds from such a config."""
    import transformers

    known = getattr(transformers, auto_class)._model_mapping.get(type(settings), ())
    return tuple(known) if isinstance(known, (tuple, list)) else (known,)


def _named_class(settings: Any) -> str:
    """The auto class that builds the class named in the config; AutoModel when none is named."""
    wanted = (getattr(settings, "architectures", None) or [None])[0]
    for name in AUTO_CLASSES if wanted is not None else ():
        if wanted in (_own_class(settings, name), *(cls.__name__ for cls in classes_of(name, settings))):
            return name
    return next((name for name in AUTO_CLASSES if _own_class(settings, name)), "AutoModel")


def _own_class(settings: Any, auto_class: str) -> str | None:
    """The class in the model's own Python files that stands behind `auto_class`, None where there is none."""
    reference = (getattr(settings, "auto_map", None) or {}).get(auto_class)
    return None if reference is None else reference.rpartition(".")[2]


def _auto_class(name: str, settings: Any) -> Any:
    import transformers

    if name not in AUTO_CLASSES:
        raise ModelSourceError(
            f"unknown auto_class {name!r}{did_you_mean(name, AUTO_CLASSES)}", expected=", ".join(AUTO_CLASSES)
        )
    auto = getattr(transformers, name)
    if type(settings) not in auto._model_mapping and _own_class(settings, name) is None:
        fitting = [known for known in AUTO_CLASSES if type(settings) in getattr(transformers, known)._model_mapping]
        raise ModelSourceError(
            f"{name} builds no {settings.model_type} models", expected=", ".join(fitting) or "another model"
        )
    return auto


def _fetch(auto: Any, settings: Any, config: ModelConfig, place: str, *, offline: str | None) -> nn.Module:
    try:
        trusted, local = config.trust_remote_code, offline is not None
        return auto.from_pretrained(place, config=settings, trust_remote_code=trusted, local_files_only=local)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        raise unloadable(config, in_one_line(error)) from error


def _without_unsafe(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_unsafe(item) for key, item in value.items() if key.lstrip("_") not in _UNSAFE}
    return [_without_unsafe(item) for item in value] if isinstance(value, list) else value


def _with_floats(value: Any) -> Any:
    """A config's values as they were before transformers wrote those that JSON lacks as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if list(value) == ["__float__"]:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def place_of(name: str) -> str:
    """The path or hub name by which transformers finds `name`. ModelSourceError for a path that leads nowhere."""
    place = installed_path(name)
    if os.path.exists(place) or not _is_path(place):
        return place
    folders = Path(place).absolute().parents
    last = next(folder for folder in folders if folder.is_dir())
    raise ModelSourceError(
        f"there is no folder or file {place!r}{similar_paths(place)}",
        where=f"hf:{name}",
        found=f"the path ends at {last}" if last != folders[0] else None,
        fix="give a folder or config.json on this machine, or a name on the hub, such as google/vit-base-patch16-224",
    )


def _is_path(place: str) -> bool:
    """True if `place` cannot be meant as a name on the hub, which is NAME or OWNER/NAME."""
    return place.startswith((".", os.sep, "~")) or place.count("/") > 1 or place.endswith("/")


def similar_paths(place: str) -> str:
    """A hint at what lies beside a path that leads nowhere; empty where nothing is alike, or where it does not."""
    folder, name = os.path.split(place)
    if os.path.exists(place) or not os.path.isdir(folder or "."):
        return ""
    alike = nearest(name, os.listdir(folder or "."), count=1)
    return f" (did you mean {os.path.join(folder, alike[0])!r}?)" if alike else ""


def out_of_reach(place: str) -> str | None:
    """Reason why the hub cannot be asked now; None where it answers, or need not be asked.

    It is asked once: transformers itself tries for half a minute, for every file.
    """
    if os.path.exists(place):
        return None
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(place, "config.json"))
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except (HfHubHTTPError, ValueError):
        return None  # an answer, or no name that could be asked for: transformers says what is wrong
    except (HTTPError, OSError) as error:
        return f"the hub cannot be reached: {error}"
    return None


PROCESSOR_FILES = frozenset(
    (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
        *("vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm"),
        *("target.spm", "preprocessor_config.json", "processor_config.json", "chat_template.jinja"),
    )
)


def processor_files(config: ModelConfig) -> dict[str, bytes]:
    """The files that `pipeline()` needs beside the weights of an `hf:` model, from its folder or GGUF file; by name."""
    if config.gguf:
        return from_gguf.tokenizer_files(gguf_file(config))
    folder = Path(installed_path(config.name)) if config.source == "hf" else None
    return {} if folder is None or not folder.is_dir() else processor_files_in(folder)


def processor_files_in(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name that transformers reads to prepare inputs: of tokenizers and processors."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name in PROCESSOR_FILES}
