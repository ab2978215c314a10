"""The setting that a number of MACs pays for."""

import pytest

from acm_compiler.baselines.method import setting_within


@pytest.mark.parametrize(("cheap", "dear"), [(0.0, 1.0), (1.0, 0.0), (-3.0, 5.0)])
def test_the_setting_nearest_to_the_dear_end_is_found_that_costs_no_more(cheap, dear):
    def cost(setting):
        return 100 * (setting - cheap) / (dear - cheap)

    for most in (0.0, 30.0, 99.0):
        found = setting_within(cost, most, cheap=cheap, dear=dear, halvings=20)
        assert cost(found) <= most and cost(found) == pytest.approx(most, abs=1e-3)


def test_steps_of_cost_are_kept_below_and_what_nothing_pays_for_is_the_cheap_end():
    assert setting_within(lambda rate: 10 * (rate > 0.25), 9, cheap=0.0, dear=1.0, halvings=10) == 0.25
    assert setting_within(lambda rate: 7, 5, cheap=0.0, dear=1.0, halvings=10) == 0.0
    asked = []
    setting_within(lambda rate: asked.append(rate) or 0, 5, cheap=0.0, dear=1.0, halvings=3)
    assert asked == [0.5, 0.75, 0.875]
