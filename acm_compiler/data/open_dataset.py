"""From a recipe's `data.train` or `data.eval` to a data set."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from acm_compiler.data.common_voice import CommonVoice
from acm_compiler.data.digits import SIDE, CanvasSet, digit_bank
from acm_compiler.data.spoken_digits import UtteranceSet, voices
from acm_compiler.data.texts import TextRows, TextSet
from acm_compiler.errors import DataError
from acm_compiler.recipe.datasets import (
    ClutteredDigitsData,
    CommonVoiceData,
    DataConfig,
    PictureData,
    SpokenDigitsData,
    TextData,
    TextRowsData,
)
from acm_compiler.sources.from_python import call_function

Size = tuple[int, int]


def open_dataset(config: DataConfig, *, image_size: Size | None = None) -> Dataset[Any]:
    """The data set that `config` describes; images come at `image_size` (height, width), unless it names its own.

    None: of no importance; image files come at 224 x 224. DataError when it is missing, empty, or of another size than
    the model's; UsageError for an unknown function.
    """
    if isinstance(config, ClutteredDigitsData):
        return _canvases(config, image_size)
    if isinstance(config, PictureData):
        from acm_compiler.data.images import Pictures  # torchvision takes seconds to import

        return Pictures(config, image_size or (224, 224))
    if isinstance(config, TextData):
        return TextSet(config)
    if isinstance(config, TextRowsData):
        return TextRows(config)
    if isinstance(config, CommonVoiceData):
        return CommonVoice(config)
    if isinstance(config, SpokenDigitsData):
        voices(config.split)  # a missing synthesiser is reported now, not at the first batch
        return UtteranceSet(config.split, count=config.count, most_words=config.most_words, seed=config.seed)
    return _users(config.kind, config.args)


def _canvases(config: ClutteredDigitsData, image_size: Size | None) -> Dataset[Any]:
    if image_size is not None and image_size != (SIDE, SIDE):
        raise DataError(
            "cluttered digits come in one size",
            where="data",
            found="a model for {} x {}".format(*image_size),
            expected=f"{SIDE} x {SIDE}",
            fix=f"write input: {{image: [3, {SIDE}, {SIDE}]}}",
        )
    digit_bank(config.split)  # a missing scikit-learn is reported now, not at the first batch
    return CanvasSet(config.split, count=config.count, seed=config.seed)


def _users(reference: str, arguments: dict[str, Any]) -> Dataset[Any]:
    dataset = call_function(reference, arguments)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DataError(
            "the function did not return a data set",
            where=reference,
            found=type(dataset).__name__,
            expected="an object with __len__ and __getitem__",
        )
    return dataset
