"""The demo's canvases and its model."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import save_file

from acm_compiler.data.digits import as_input, canvases, digit_bank
from acm_compiler.data.draws import derive, normal, seeded, uniform, words
from acm_compiler.errors import DataError, StorageError
from acm_compiler.evaluation.places import patch_foreground
from acm_compiler.shipped import DIGITS_VIT
from scripts.train_shipped import digits as train_digits_model


def test_a_canvas_is_the_same_whatever_it_is_drawn_with() -> None:
    together = canvases("train", range(40), seed=3)
    for index in (0, 17, 39):
        alone = canvases("train", [index], seed=3)
        assert torch.equal(alone.image[0], together.image[index])
        assert torch.equal(alone.foreground[0], together.foreground[index])
        assert alone.source[0] == together.source[index]


def test_seed_index_and_split_each_change_the_canvas() -> None:
    first = canvases("train", [5], seed=0).image
    others = [
        canvases("train", [5], seed=1),
        canvases("train", [5 + len(digit_bank("train").label)]),
        canvases("eval", [5]),
    ]
    assert not any(torch.equal(first, other.image) for other in others)


def test_no_source_digit_is_in_both_splits_and_all_are_in_one() -> None:
    train, held_out = digit_bank("train"), digit_bank("eval")
    assert sorted(torch.cat([train.source, held_out.source]).tolist()) == list(range(1797))
    assert len(held_out.source) == 450


def test_every_class_has_a_quarter_of_its_digits_held_out() -> None:
    counts = [torch.bincount(digit_bank(split).label, minlength=10) for split in ("train", "eval")]
    share = counts[1] / (counts[0] + counts[1])
    assert (share - 0.25).abs().max() < 0.005


def test_every_source_digit_is_shown_equally_often() -> None:
    sources = len(digit_bank("eval").source)
    shown = canvases("eval", range(2 * sources)).source
    assert set(torch.bincount(shown)[digit_bank("eval").source].tolist()) == {2}


def test_without_clutter_all_light_is_the_digit_and_lies_inside() -> None:
    drawn = canvases("train", range(200), clutter=0.0)
    assert drawn.foreground.any((1, 2)).all()
    # the background is a constant 0.05; ink starts at 0.3 of 0.9
    assert drawn.image[~drawn.foreground].max() <= 255 * (0.05 + 0.3 * 0.9) + 1
    assert drawn.image[drawn.foreground].min() >= 255 * (0.05 + 0.3 * 0.9) - 1
    whole = canvases("train", range(200)).foreground
    assert torch.equal(whole, drawn.foreground)


def test_most_patches_are_background() -> None:
    share = patch_foreground(canvases("train", range(500)).foreground, 6).float().mean()
    assert 0.1 < share < 0.3


def test_patch_foreground_marks_exactly_the_patches_with_a_pixel() -> None:
    mask = torch.zeros(2, 4, 6, dtype=torch.bool)
    mask[0, 1, 4] = True  # first row of patches, last column
    mask[1, 2, 0] = True  # second row, first column
    expected = [[False, False, True, False, False, False], [False, False, False, True, False, False]]
    assert patch_foreground(mask, 3).flatten(1).tolist() == expected


def test_missing_scikit_learn_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    digit_bank.cache_clear()
    with pytest.raises(DataError, match=r"acm_compiler\[demo\]"):
        digit_bank("train")


def test_the_shipped_model_reads_held_out_canvases() -> None:
    accuracy, _ = train_digits_model.measure(DIGITS_VIT.trained(), per_digit=5, seed=7)
    assert accuracy >= 0.94


def test_the_shipped_weights_are_small() -> None:
    assert DIGITS_VIT.weights.stat().st_size <= 1_500_000


def test_an_answer_does_not_depend_on_the_rest_of_the_batch() -> None:
    model = DIGITS_VIT.trained().train()
    images = as_input(canvases("eval", range(4)).image)
    assert torch.allclose(model(images)[:1], model(images[:1]), atol=1e-5)


def test_missing_and_foreign_weights_are_told_by_their_path(tmp_path) -> None:
    with pytest.raises(StorageError, match=r"gone\.safetensors"):
        DIGITS_VIT.load_weights(DIGITS_VIT.build_model(), tmp_path / "gone.safetensors")
    save_file(torch.nn.Linear(2, 2).state_dict(), tmp_path / "linear.safetensors")
    with pytest.raises(StorageError, match=r"linear\.safetensors"):
        DIGITS_VIT.load_weights(DIGITS_VIT.build_model(), tmp_path / "linear.safetensors")


def test_training_again_gives_the_same_weights() -> None:
    first, second = (train_digits_model.train(steps=3, batch=8, lr=1e-3, seed=1) for _ in range(2))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_the_training_command_writes_a_file_that_loads(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_digits_model, "measure", lambda model: (0.5, 0.01))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    path = tmp_path / "new" / "weights.safetensors"
    train_digits_model.main(["--steps", "2", "--batch", "4", "--out", str(path)])
    DIGITS_VIT.load_weights(DIGITS_VIT.build_model(), path)


def test_draws_are_the_ones_the_shipped_weights_were_trained_with() -> None:
    assert derive(1, 2, 3) != derive(1, 3, 2)
    assert derive(1, 2, 3) == 7510213797696614745
    assert words(1, [0, 5], 2).tolist() == [
        [17358131805246465861, 4722961484153984203],
        [6901967193255414014, 4118221330439769230],
    ]


def test_draws_have_the_moments_they_promise() -> None:
    flat, bell = uniform(1, range(400), 50), normal(1, range(400), 50)
    assert flat.min() >= 0 and flat.max() < 1
    assert abs(flat.mean() - 0.5) < 0.01 and abs(flat.var() - 1 / 12) < 0.003
    assert abs(bell.mean()) < 0.03 and abs(bell.var() - 1) < 0.03


def test_seeded_restores_the_generators_also_after_an_exception() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError), seeded(1, 2):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.rand(2), expected)
