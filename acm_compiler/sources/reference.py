"""Model references as users type them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from acm_compiler.errors import ModelSourceError, did_you_mean
from acm_compiler.recipe.models import SOURCES, ModelConfig

FORMS = "torchvision:NAME, timm:NAME, hf:PATH_OR_NAME, python:package.module:function, shipped:NAME, a saved directory"


def parse_reference(text: str, **settings: Any) -> ModelConfig:
    """The model that `text` names, with further keys of `ModelConfig`; nothing is imported or looked up yet.

    ModelSourceError when it has no such form or the settings do not belong to its source.
    """
    source, colon, name = text.partition(":")
    if name.startswith("~/"):
        name = str(Path(name).expanduser())  # the shell leaves it after a colon
    if colon and source in SOURCES and name:
        try:
            return ModelConfig.model_validate({"source": source, "name": name, **settings})
        except ValidationError as error:
            raise ModelSourceError(error.errors()[0]["msg"], where=text) from None
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return _directory(text, folder)
    hint = did_you_mean(source, SOURCES) if colon and source not in SOURCES else ""
    raise ModelSourceError(f"{text!r} is no model reference and no directory{hint}", expected=FORMS)


def _directory(text: str, folder: Path) -> ModelConfig:
    if (folder / "model.json").is_file():
        return ModelConfig(source="directory", name=str(folder))
    if (folder / "config.json").is_file():
        raise ModelSourceError(f"{text} was saved by transformers, not by acm_compiler", fix=f"write hf:{text}")
    raise ModelSourceError(f"{text} holds no saved model", expected="model.json in it")


def show_reference(config: ModelConfig) -> str:
    """The reference as a user would type it."""
    return config.name if config.source == "directory" else f"{config.source}:{config.name}"
