"""Expected times: arithmetic of the roofline, and what its table says; measured rows in their place, where they fit."""

import json

import pytest

from acm_compiler.errors import UsageError
from acm_compiler.planning.site_times import (
    DENSE_RATE,
    DEVICES,
    LAUNCH_S,
    MEMORY_RATE,
    acm_s,
    device_of,
    expected_times,
    read_measured,
    time_table,
)
from tests.helpers.build import planned_site, sliced_site

H200 = DEVICES["h200"]
VIT = {"d_in": 768, "d_out": 768, "dense_width": 3072, "width": 768, "gate_width": 64}
LLAMA = {"d_in": 4096, "d_out": 4096, "dense_width": 14336, "width": 3584, "gate_width": 432}
SHARES = (0.0, 0.25, 0.5, 1.0)


def test_large_dense_products_take_their_flops_and_small_ones_their_weights():
    large = planned_site(**VIT, tokens=132 * 128 * 8)
    (found,) = expected_times([large], H200, SHARES)
    flops, hidden = 2 * 2 * large.tokens * 768 * 3072, large.tokens * 3072
    memory = MEMORY_RATE * 4.8e12
    expected = 3 * LAUNCH_S + flops / (DENSE_RATE * 989e12) + 2 * 2 * hidden / memory  # whole waves; the activation
    assert found.dense_s == pytest.approx(expected, rel=1e-6)
    one = planned_site(**VIT, tokens=1)
    (found,) = expected_times([one], H200, SHARES)
    moved = 2 * (2 * 768 * 3072 + 2 * (768 + 3072) + 2 * 3072)
    assert found.dense_s == pytest.approx(3 * LAUNCH_S + moved / memory, rel=1e-6)


# microseconds (docs/results/h100.md, h200.md): dense, and ACMs at .25, .5 and 1 of the learners
MEASURED = (
    ("h200", "mlp", VIT, 25216, (428, 149, 235, 409)),
    ("h200", "mlp", VIT, 4096, (80, 54, 63, 90)),
    ("h200", "gated_mlp", LLAMA, 8192, (4450, 1216, 2282, 4421)),
    ("h100", "mlp", VIT, 1576, (41, 50, 55, 64)),
    ("h100", "gated_mlp", LLAMA, 1, (142, 57, 88, 145)),
)


@pytest.mark.parametrize(("card", "kind", "shape", "tokens", "times"), MEASURED)
def test_expected_times_are_near_those_measured(card, kind, shape, tokens, times):
    site = planned_site(kind=kind, tokens=tokens, **shape)
    (found,) = expected_times([site], DEVICES[card], (0.25, 0.5, 1.0))
    for expected, spent in zip((found.dense_s, *found.acm_s), times, strict=True):
        assert 0.8 < 1e6 * expected / spent < 1.25


@pytest.mark.parametrize("tokens", [1, 64, 197, 25216])
@pytest.mark.parametrize("kind", ["mlp", "gated_mlp", "linear"])
def test_time_rises_with_the_share_and_calls_add_up(kind, tokens):
    shape = VIT if kind != "linear" else VIT | {"dense_width": None, "last": None, "width": 96}
    sites = [planned_site(kind=kind, tokens=tokens, calls=calls, **shape) for calls in (1, 3)]
    once, thrice = expected_times(sites, H200, SHARES)
    assert list(once.acm_s) == sorted(once.acm_s) and once.acm_s[0] < once.acm_s[-1]
    assert thrice.acm_s == pytest.approx([3 * spent for spent in once.acm_s])
    assert thrice.dense_s == pytest.approx(3 * once.dense_s) and once.ratios[-1] > 0.7


@pytest.mark.parametrize(("kind", "shape", "most"), [("mlp", VIT, 16), ("gated_mlp", LLAMA, 32)])
def test_parts_of_a_split_second_layer_are_added_up(kind, shape, most):
    """A ViT-B's from 17 tokens on, a Llama-8B's from 33: one launch more beside what a token more costs."""
    spent = [acm_s(planned_site(kind=kind, tokens=most + more, **shape), H200, 1.0) for more in (0, 1, 2)]
    assert spent[1] - spent[0] > 2e-6 > 5 * (spent[2] - spent[1])


def test_k_min_bounds_the_share_and_sites_that_do_not_run_are_left_out():
    free, bound = planned_site(**VIT, tokens=4096), planned_site(**VIT, tokens=4096, k_min=2)
    assert acm_s(bound, H200, 0.0) == acm_s(bound, H200, 0.5) > acm_s(free, H200, 0.25)
    assert expected_times([planned_site(tokens=0)], H200, SHARES) == []


def test_slices_have_one_product_and_no_hidden_layer():
    sliced = sliced_site(d_in=768, d_out=768, width=192, tokens=25216)
    narrow = planned_site(kind="linear", d_in=768, d_out=768, dense_width=None, last=None, width=192, tokens=25216)
    assert acm_s(sliced, H200, 1.0) < acm_s(narrow, H200, 1.0)


def test_the_table_says_that_nothing_is_measured_and_what_is_slower():
    few = planned_site("few", **VIT, tokens=197)
    sites = [planned_site(**VIT, tokens=25216), few, few]
    text = time_table(expected_times(sites, H200, (0.25, 1.0)), H200, (0.25, 1.0))
    assert "not measured" in text and "H200" in text
    assert "at 1.00 of the learners: 2 mlp" in text and "at 0.25" in text.splitlines()[1]
    rows = [line.split() for line in text.splitlines() if line.startswith("mlp")]
    assert [row[1] for row in rows] == ["2", "1"]
    ratio = expected_times([planned_site(**VIT, tokens=25216)], H200, (0.25,))[0].ratios[0]
    assert rows[1][-2] == f"{ratio:.2f}" and {row[6] for row in rows} == {"expected"} and 0.25 < ratio < 0.6


def test_an_unknown_device_is_refused_with_those_that_are_known():
    assert device_of("H200") is H200
    with pytest.raises(UsageError, match="h200"):
        device_of("h300")


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
