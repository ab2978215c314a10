"""Measured rows in place of expected times: for the same card, shape and number of tokens alone."""

import json

import pytest

from acm_compiler.planning.expected_time import DEVICES, expected_times, time_table
from acm_compiler.planning.measured_time import read_measured
from tests.helpers.build import planned_site

H200 = DEVICES["h200"]
VIT = {"d_in": 768, "d_out": 768, "dense_width": 3072, "width": 768, "gate_width": 64}


@pytest.fixture
def measured(tmp_path):
    """The rows of a file in which an ACM takes 10, 60 and 110 us, a dense site 100 us at best; and their reader."""
    path = tmp_path / "speed.jsonl"
    facts = {"site": "ViT-B MLP", "shape": ["mlp", 768, 768, 768, 4], "tokens": 25216}
    rows = [{"part": "vit", "card": "NVIDIA H200"}]
    for share, spent in ((1.0, 110), (0.0, 10), (0.5, 60)):
        others = {"dense, eager": 120, "dense, Inductor max-autotune": 100 + 5 * share, "dense, same MACs": 1}
        rows += [{**facts, "k/N": share, "contender": name, "us": us} for name, us in {"ours": spent, **others}.items()]
        rows.append({**facts, "k/N": share, "contender": "grouped_mm", "refused": "no kernel"})
    path.write_text("\n".join(map(json.dumps, rows)) + '\n{"site": "cut o')
    return lambda card="H200": read_measured(path, card)


def test_measured_rows_take_the_place_of_expected_ones(measured):
    site = planned_site(**VIT, tokens=25216, calls=2)
    (found,) = expected_times([site], H200, (0.0, 0.25, 1.0), measured())
    assert found.is_measured and found.dense_s == pytest.approx(2 * 100e-6)
    assert found.acm_s == pytest.approx([2 * 10e-6, 2 * 35e-6, 2 * 110e-6])
    text = time_table([found], H200, (0.0, 0.25, 1.0))
    assert "measured" in text.splitlines()[3].split() and "slower than dense at 1.00 of the learners: 1 mlp" in text


@pytest.mark.parametrize("changes", [{"tokens": 25217}, {"learners": 3}, {"d_out": 760}, {"kind": "gated_mlp"}])
def test_other_shapes_stay_expected(measured, changes):
    site = planned_site(**VIT | {"tokens": 25216} | changes)
    (found,) = expected_times([site], H200, (0.25, 1.0), measured())
    assert not found.is_measured and found == expected_times([site], H200, (0.25, 1.0))[0]


def test_another_card_and_a_missing_file_give_nothing(measured, tmp_path):
    assert measured("A100") == {} == read_measured(tmp_path / "none.jsonl", "H200")
    bound = planned_site(**VIT, tokens=25216, k_min=2)
    (found,) = expected_times([bound], H200, (0.25,), measured())
    assert found.acm_s == pytest.approx([60e-6])  # at least k_min of the learners
