"""Folders of images, one folder per class; transforms that recipes name; mixup and cutmix of batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from acm_compiler.data.batch import Batch
from acm_compiler.errors import DataError

if TYPE_CHECKING:
    from acm_compiler.recipe.datasets import ImageFolderData


Size = tuple[int, int]
_BLUR_SIGMA = (0.1, 2.0)
_CROP_MARGIN = 4


class PictureFolder(Dataset[dict[str, Any]]):
    """`image` float [3, H, W], standardised, and `label`, for every image below the root's class folders.

    DataError, with the path: a missing root, no class folder, a class without images, an unreadable image.
    """

    def __init__(self, config: ImageFolderData, size: Size) -> None:
        root = Path(config.root)
        if not root.is_dir():
            raise DataError("the folder of images is missing", where=str(root), fix="check the recipe's root")
        try:
            self._folder = ImageFolder(str(root), loader=load_picture)
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
        self.classes: list[str] = self._folder.classes
        mixes = config.mixup > 0 or config.cutmix > 0
        self.mix = Mix(mixup=config.mixup, cutmix=config.cutmix, classes=len(self.classes)) if mixes else None
        self._transform = picture_transform(config, size)

    def __len__(self) -> int:
        return len(self._folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture, label = self._folder[index]
        return {"image": self._transform(picture), "label": label}


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


def picture_transform(config: ImageFolderData, size: Size) -> Callable[[Any], Tensor]:
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


def _centre(config: ImageFolderData, size: Size) -> list[Any]:
    return [_resize(config, round(max(size) / config.crop_ratio)), v2.CenterCrop(size)]


def _resize_crop(config: ImageFolderData, size: Size) -> list[Any]:
    crop = v2.RandomResizedCrop(size, interpolation=InterpolationMode(config.interpolation), antialias=True)
    return [crop, v2.RandomHorizontalFlip()]


def _three_augment(config: ImageFolderData, size: Size) -> list[Any]:
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


def _resize(config: ImageFolderData, shorter_side: int) -> Any:
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
