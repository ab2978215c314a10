"""Batches, their first examples, and facts of data sets: what a user's own object says, and what holds else."""

from types import SimpleNamespace

import pytest
import torch

from acm_compiler.data.batch import Facts, assemble, first_examples
from acm_compiler.errors import DataError
from tests.helpers.pictures import picture_batch


def test_what_a_data_set_leaves_out_has_defaults():
    said = Facts.of(SimpleNamespace(classes=["a", "b"], rate=16_000, other=1))
    assert said == Facts(classes=["a", "b"], rate=16_000)
    assert Facts.of(None) == Facts.of(object()) == Facts() and Facts().marks == ()


def test_the_first_examples_cut_the_last_batch():
    batches = [picture_batch(4), picture_batch(4, first=4), picture_batch(4, first=8)]
    assert [len(batch["image"]) for batch in first_examples(batches, 6)] == [4, 2]
    assert [len(batch["image"]) for batch in first_examples(batches, 4)] == [4]
    assert [len(batch["image"]) for batch in first_examples(batches, 99)] == [4, 4, 4]


def test_examples_of_unequal_shape_are_refused_with_what_pads_them():
    ragged = [(torch.zeros(3, 4 + i), 0) for i in range(2)]
    with pytest.raises(DataError, match=r"cannot be stacked.*\[3, 5\][\s\S]*collate\(examples\)"):
        assemble(ragged, [0, 1], ragged)
