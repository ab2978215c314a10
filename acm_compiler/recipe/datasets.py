"""Data sets of a recipe: one section per kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from acm_compiler.recipe.fields import (
    Count,
    NotNegative,
    PathLike,
    PathText,
    Positive,
    PythonKind,
    Section,
    Texts,
    Three,
    Whole,
    refusal,
)


class PictureData(Section):
    """Images with classes, read from disk, and how they become a model's inputs."""

    kind: str
    root: PathText
    """The folder that holds one folder per class; of `kind: torchvision` the one that its class is given."""
    image_size: Count | None = None
    """Side of the square a model gets; unset: what `input.image` says, else what the model takes."""
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 0.875
    """Without augmentation: the share of the resized image's side that the centre crop keeps."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Method of resizing images."""
    mean: Three[float] = (0.485, 0.456, 0.406)
    """Subtracted from each channel; pixels are between 0 and 1."""
    std: Three[Positive] = (0.229, 0.224, 0.225)
    """Each channel is divided by this afterwards."""
    augment: Literal["none", "resize_crop", "three_augment"] = "none"
    """resize_crop: random crop and mirroring. three_augment: DeiT III's greyscale, solarise or blur."""
    color_jitter: NotNegative = 0.3
    """Strength of three_augment's change of brightness, contrast and saturation."""
    mixup: NotNegative = 0.0
    """Alpha of mixup; 0 switches it off."""
    cutmix: NotNegative = 0.0
    """Alpha of cutmix; with mixup, each batch takes one of the two by chance."""


class ImageFolderData(PictureData):
    """Images in one folder per class, as torchvision's ImageFolder reads them."""

    kind: Literal["imagefolder"]


class TorchvisionData(PictureData):
    """A data set of images with classes that torchvision reads, such as CIFAR100 or Flowers102, already on disk."""

    kind: Literal["torchvision"]
    name: str
    """A class of torchvision.datasets, such as CIFAR100."""
    args: Annotated[dict[str, Any], PathLike()] = Field(default_factory=dict)
    """Keyword arguments of the class beside `root`; they say which part is read: {train: false}, {split: test}."""


class ClutteredDigitsData(Section):
    """The demo's canvases: scikit-learn's handwritten digits among stroke fragments and noise."""

    kind: Literal["cluttered_digits"]
    split: Literal["train", "eval"]
    """Part of the source digits; no digit is in both."""
    count: Count = 10_000
    """Canvases in one epoch."""
    seed: Whole = 0
    """Seed for drawing canvases."""


class TextData(Section):
    """Paragraphs of text files, or of the documentation of the installed Python packages."""

    kind: Literal["texts"]
    tokenizer: PathText
    """A tokenizer.json, the folder that holds one, or a GGUF file; `package:NAME/FILE` for one in a package."""
    root: PathText | None = None
    """A folder of .txt, .md and .rst files; unset: docstrings and text files of the installed packages."""
    classes: Texts = ()
    """Packages, or folders below `root`: only they are read, in all their depth, and `label` says which; then each file
    is in one split. Unset: no labels, and every package, or file below `root`, is in one split."""
    split: Literal["train", "eval"]
    """Part of the sources (files, packages); none is in both."""
    count: Count = 2000
    """At most so many paragraphs."""
    max_tokens: Annotated[int, Field(ge=2)] = 128
    """Longer ones are cut."""
    seed: Whole = 0
    """Seed for drawing paragraphs."""


class TextRowsData(Section):
    """Texts in rows that a function of the user's gives, such as a data set of the package `datasets`."""

    kind: Literal["text_rows"]
    rows: PythonKind
    """A function that returns a sequence of mappings."""
    args: Annotated[dict[str, Any], PathLike()] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    tokenizer: PathText
    """A tokenizer.json, the folder that holds one, or a GGUF file; `package:NAME/FILE` for one in a package."""
    text: str = "text"
    """The rows' key of the text."""
    label: str | None = None
    """The rows' key of the class, 0, 1, 2, …; unset: no labels."""
    max_tokens: Annotated[int, Field(ge=2)] = 128
    """Longer ones are cut."""


class CommonVoiceData(Section):
    """A release of Common Voice on disk: one table per split beside `clips/`."""

    kind: Literal["common_voice"]
    root: PathText
    """The release's folder of one language, such as cv-corpus-17.0/es."""
    split: str = "train"
    """Name of the table: train, dev, test, validated, …"""
    vocabulary: PathText
    """The vocab.json that the model was trained with."""
    case: Literal["lower", "upper", "as_is"] = "lower"
    """Case of letters in the vocabulary."""
    remove: str = r"[^\w\s']|[\d_]"
    """A regular expression; what it finds in a transcript is no letter."""
    max_seconds: Positive = 15.0
    """Longer clips are left out."""
    max_broken: Whole = 100
    """Clips that may be missing, unreadable, empty, too short or too long, all together, before the run ends."""
    max_unknown: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the letters that may be missing from the vocabulary."""


class SpokenDigitsData(Section):
    """One to a few spoken digits among pauses and noise, said by the voices of espeak-ng (a package of the system)."""

    kind: Literal["spoken_digits"]
    split: Literal["train", "eval"]
    """Part of the takes (a voice at one speed and pitch); none is in both."""
    count: Count = 2000
    """Utterances in one epoch."""
    most_words: Annotated[int, Field(ge=1, le=20)] = 3
    """Digits in one utterance, at most."""
    seed: Whole = 0
    """Seed for drawing utterances."""


class PythonData(Section):
    """A data set that a function of the user's builds."""

    kind: PythonKind
    args: Annotated[dict[str, Any], PathLike()] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def kind_tag(value: Any) -> str | None:
    """The tag by which a section with `kind` is told from the others; `python` for every function."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str):
        return None
    return "python" if kind.startswith("python:") else kind


DataConfig = Annotated[
    Annotated[ImageFolderData, Tag("imagefolder")]
    | Annotated[TorchvisionData, Tag("torchvision")]
    | Annotated[ClutteredDigitsData, Tag("cluttered_digits")]
    | Annotated[TextData, Tag("texts")]
    | Annotated[TextRowsData, Tag("text_rows")]
    | Annotated[CommonVoiceData, Tag("common_voice")]
    | Annotated[SpokenDigitsData, Tag("spoken_digits")]
    | Annotated[PythonData, Tag("python")],
    Discriminator(kind_tag),
]


def plain(config: DataConfig) -> DataConfig:
    """The same data without augmentation."""
    if isinstance(config, PictureData):
        return config.model_copy(update={"augment": "none", "mixup": 0.0, "cutmix": 0.0})
    return config


class DataSection(Section):
    """The examples that a model is trained on, and those that it is measured on."""

    train: DataConfig
    """Examples for training and calibration."""
    eval: DataConfig
    """Examples for evaluation, as they are: without augmentation."""

    @model_validator(mode="after")
    def _measured_as_it_is(self) -> DataSection:
        if plain(self.eval) != self.eval:
            raise refusal("data.eval is measured as it is: augment, mixup and cutmix belong to data.train", "eval")
        return self
