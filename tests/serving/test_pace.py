"""The time of batches: lines that were measured, their correction, and batches of like size."""

import pytest

from acm_compiler.serving.pace import Line, Pace, like_oldest, measure_pace

LINE = Line(0.01, 0.001)


def test_between_two_budgets_times_are_linear_and_beyond_them_constant():
    pace = Pace({0.5: Line(0.01, 0.001), 1.0: Line(0.02, 0.003)})
    assert pace.seconds(0.75, 10) == pytest.approx(0.015 + 10 * 0.002)
    assert pace.line(0.1) == LINE and pace.seconds(1.0, 0) == 0.02


def test_a_batch_within_a_time_takes_that_time():
    pace = Pace({0.5: LINE})
    assert pace.seconds(0.5, pace.cells_within(0.5, 0.05)) == pytest.approx(0.05)
    assert pace.cells_within(0.5, 0.001) == 0


def test_measuring_finds_the_line_that_times_follow():
    pace = measure_pace(lambda budget, cells: 0.01 + budget * cells, [0.2, 1.0], few=8, many=64)
    assert pace.seconds(0.2, 100) == pytest.approx(0.01 + 20) and pace.seconds(0.6, 30) == pytest.approx(0.01 + 18)


@pytest.mark.parametrize("few_s, many_s", [(0.5, 0.4), (0.01, 0.4), (0.3, 0.3)])
def test_noise_makes_no_time_negative(few_s, many_s):
    pace = measure_pace(lambda budget, cells: few_s if cells == 8 else many_s, [1.0], few=8, many=64)
    assert pace.seconds(1.0, 64) == pytest.approx(many_s)
    assert pace.line(1.0).call_s >= 0 and pace.line(1.0).cell_s > 0


def test_one_size_alone_can_be_measured():
    pace = measure_pace(lambda budget, cells: 0.4, [1.0], few=8, many=8)
    assert pace.seconds(1.0, 8) == pytest.approx(0.4)


def test_all_budgets_follow_batches_that_take_longer():
    pace = Pace({0.5: LINE, 1.0: Line(0.02, 0.003)})
    for _ in range(60):
        pace.add(1.0, 10, 3 * 0.05)
    assert pace.seconds(1.0, 10) == pytest.approx(3 * 0.05, rel=0.01)
    assert pace.seconds(0.5, 10) == pytest.approx(3 * 0.02, rel=0.01)


def test_one_odd_batch_says_little():
    pace = Pace({1.0: LINE})
    pace.add(1.0, 10, 1e6)
    assert pace.seconds(1.0, 10) < 3.5 * 0.02
    pace.add(1.0, 10, 0.0)
    assert pace.seconds(1.0, 10) > 0


def cost(groups, line):
    return sum(line.call_s + line.cell_s * len(group) * max(group) for group in groups)


def test_the_oldest_and_those_like_it_are_next():
    assert like_oldest([50, 2, 50, 3, 51, 2], LINE, most_cells=1e9) == [0, 2, 4]
    assert like_oldest([2, 50, 3, 50], LINE, most_cells=1e9) == [0, 2]
    assert like_oldest([5, 6, 5], LINE, most_cells=1e9) == [0, 1, 2]
    assert like_oldest([7], LINE, most_cells=1) == [0]


def test_no_more_than_there_is_time_for():
    assert like_oldest([10, 10, 10, 10], LINE, most_cells=25) == [0, 1]
    assert like_oldest([10, 30, 10], LINE, most_cells=59) == [0, 2]
    assert like_oldest([30, 10, 10], LINE, most_cells=20) == [0]


def test_a_long_text_leaves_the_batch_of_short_ones_full():
    assert like_oldest([5, 200, 5, 5], LINE, most_cells=15) == [0, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_batches_one_after_the_other_take_no_more_than_one_for_all(seed):
    import random

    draw = random.Random(seed)
    left = [draw.randint(1, 120) for _ in range(12)]
    together, groups = cost([left], LINE), []
    while left:
        numbers = like_oldest(left, LINE, most_cells=1e9)
        assert numbers[0] == 0
        groups.append([left[number] for number in numbers])
        left = [size for number, size in enumerate(left) if number not in numbers]
    assert cost(groups, LINE) <= together
