"""Images with classes, in folders or as torchvision reads them; transforms that recipes name; mixup and cutmix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder, VisionDataset
from torchvision.transforms import InterpolationMode, v2

from acm_compiler.data.batch import Batch
from acm_compiler.errors import DataError, UsageError
from acm_compiler.recipe.datasets import PictureData, TorchvisionData
from acm_compiler.sources.from_python import PREFIX, call_function

Size = tuple[int, int]
_BLUR_SIGMA = (0.1, 2.0)
_CROP_MARGIN = 4


class Pictures(Dataset[dict[str, Any]]):
    """`image` float [3, H, W], standardised, and `label`, for every image of folders or of one of torchvision's sets.

    DataError, with the path: a missing root, no class folder, a class without images, an unreadable image. UsageError:
    a class that torchvision lacks, or other arguments than it takes; FunctionFailed where it does not find its files.
    """

    def __init__(self, config: PictureData, size: Size) -> None:
        self._source: Any = _torchvision(config) if isinstance(config, TorchvisionData) else _folders(Path(config.root))
        self.classes: list[str] | None = getattr(self._source, "classes", None)
        self.mix = None
        if config.mixup > 0 or config.cutmix > 0:
            if self.classes is None:
                what = "mixup and cutmix need the number of classes, which this data set does not say"
                raise UsageError(what, where=config.kind, fix="leave mixup and cutmix out")
            self.mix = Mix(mixup=config.mixup, cutmix=config.cutmix, classes=len(self.classes))
        self._transform = picture_transform(config, size)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, label = self._source[index]
        return {"image": self._transform(picture.convert("RGB")), "label": int(label)}


def _folders(root: Path) -> ImageFolder:
    """Image files in one folder per class."""
    if not root.is_dir():
        raise DataError("the folder of images is missing", where=str(root), fix="check the recipe's root")
    try:
        return ImageFolder(str(root), loader=load_picture)
    except PermissionError as error:
        raise DataError(
            "the folder of images cannot be read", where=str(root), found=error, fix="check its permissions"
        ) from error
    except FileNotFoundError as error:
        raise DataError(
            "the data set is empty: " + str(error).split("\n")[0],
            where=str(root),
            expected="one folder per class, each with at least one image (png, jpg, webp, …)",
        ) from error


def _torchvision(config: TorchvisionData) -> Any:
    """A data set of torchvision's, whose examples are an image and the number of its class."""
    reference = f"{PREFIX}torchvision.datasets:{config.name}"
    source = call_function(reference, {"root": config.root, **config.args})
    if not (isinstance(source, VisionDataset) and isinstance(source[0][1], int)):
        what = "it must be a data set of images with one class each"
        raise UsageError(what, where=reference, fix="name another class of torchvision.datasets")
    return source


def load_picture(path: str) -> Any:
    """The file as a PIL image in RGB. DataError names a file that cannot be read."""
    return read_picture(path, path)


def read_picture(file: str | BinaryIO, name: str) -> Any:
    """The image of a path or an open file, in RGB; `name` is for messages. DataError where it cannot be read."""
    try:
        with Image.open(file) as picture:
            return picture.convert("RGB")
    except (OSError, SyntaxError, TypeError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's own words name an open file by its address in memory
        found = "no format that Pillow knows" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            "the image cannot be read", where=name, found=found, fix="repair the file, or remove it"
        ) from error


def picture_transform(config: PictureData, size: Size) -> Callable[[Any], Tensor]:
    """From a PIL image to a standardised float tensor [3, *size], as `config` says; random where it augments.

    The config's own `image_size` goes before `size`.
    """
    size = size if config.image_size is None else (config.image_size, config.image_size)
    augment = {"none": _centre, "resize_crop": _resize_crop, "three_augment": _three_augment}[config.augment]
    return v2.Compose(
        [
            v2.ToImage(),
            *augment(config, size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(mean=list(config.mean), std=list(config.std)),
            v2.ToPureTensor(),
        ]
    )


def _centre(config: PictureData, size: Size) -> list[Any]:
    return [_resize(config, round(max(size) / config.crop_ratio)), v2.CenterCrop(size)]


def _resize_crop(config: PictureData, size: Size) -> list[Any]:
    crop = v2.RandomResizedCrop(size, interpolation=InterpolationMode(config.interpolation), antialias=True)
    return [crop, v2.RandomHorizontalFlip()]


def _three_augment(config: PictureData, size: Size) -> list[Any]:
    """DeiT III (Touvron et al., 2022): simple random crop, mirroring, one of three changes, colour jitter."""
    blur_side = 2 * round(3 * _BLUR_SIGMA[1]) + 1  # three sigma on either side
    return [
        _resize(config, max(size)),
        v2.RandomCrop(size, padding=_CROP_MARGIN, padding_mode="reflect"),
        v2.RandomHorizontalFlip(),
        v2.RandomChoice(
            [
                v2.Grayscale(num_output_channels=3),
                v2.RandomSolarize(threshold=128, p=1.0),
                v2.GaussianBlur(blur_side, _BLUR_SIGMA),
            ]
        ),
        v2.ColorJitter(config.color_jitter, config.color_jitter, config.color_jitter),
    ]


def _resize(config: PictureData, shorter_side: int) -> Any:
    return v2.Resize(shorter_side, interpolation=InterpolationMode(config.interpolation), antialias=True)


class Mix:
    """Mixes each example of a batch with the one before it; labels [B] become shares [B, classes].

    With both kinds, each batch takes one of the two by chance. Random numbers come from torch's CPU generator.
    """

    def __init__(self, *, mixup: float, cutmix: float, classes: int) -> None:
        kinds = [
            kind(alpha=alpha, num_classes=classes)
            for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix))
            if alpha > 0
        ]
        self._mix = v2.RandomChoice(kinds)

    def __call__(self, batch: Batch) -> Batch:
        image, label = self._mix(batch["image"], batch["label"])
        return {**batch, "image": image, "label": label}
