"""Corruptions: each changes images more the more severe it is, and is the same every time."""

import pytest
import torch

from acm_compiler.data.corruptions import KINDS, SEVERITIES, corrupted


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(8, 3, 6, 6, generator=generator), size=36, mode="bilinear")
    return 4 * smooth - 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_corruption_grows_with_severity_and_stays_within_the_image(images, kind):
    found = [corrupted(images, kind, severity, range(8)) for severity in SEVERITIES]
    changes = [(image - images).square().mean().item() for image in found]
    assert changes == sorted(changes) and changes[0] > 0 and changes[-1] > 1.5 * changes[0]
    low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    assert all(bool(((image >= low - 1e-5) & (image <= high + 1e-5)).all()) for image in found)
    assert all(image.shape == images.shape and image.isfinite().all() for image in found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_corrupted_alike_in_any_batch(images, kind):
    whole, part = corrupted(images, kind, 3, range(8)), corrupted(images[5:], kind, 3, range(5, 8))
    torch.testing.assert_close(whole[5:], part)
