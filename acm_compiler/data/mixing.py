"""Mixup and cutmix of whole batches."""

from __future__ import annotations

from acm_compiler.data.batch import Batch


class Mix:
    """Mixes each example of a batch with the one before it; labels [B] become shares [B, classes].

    With both kinds, each batch takes one of the two by chance. Random numbers come from torch's CPU generator.
    """

    def __init__(self, *, mixup: float, cutmix: float, classes: int) -> None:
        from torchvision.transforms import v2

        kinds = [
            kind(alpha=alpha, num_classes=classes)
            for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix))
            if alpha > 0
        ]
        self._mix = v2.RandomChoice(kinds)

    def __call__(self, batch: Batch) -> Batch:
        image, label = self._mix(batch["image"], batch["label"])
        return {**batch, "image": image, "label": label}
