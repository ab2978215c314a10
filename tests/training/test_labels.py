"""The label rule, row by row: which k a token's error curve asks for."""

import pytest
import torch

from acm_compiler.training.site_phases import relative_improvement

# error at rising k, tau, expected k with k_min 0 (so the column is k)
TABLE = [
    # steady improvement by more than tau: all learners
    ([16, 8, 4, 2, 1], 1.2, 4),
    # the second learner improves 8/7 < 1.2: one is enough
    ([16, 8, 7, 3, 1], 1.2, 1),
    # already the first improves too little: none
    ([10, 9, 4, 2, 1], 1.2, 0),
    # only the last one improves too little
    ([16, 8, 4, 2, 1.9], 1.2, 3),
    # exactly tau is not less than tau
    ([12, 10, 5, 2, 1], 1.2, 4),
    # one more learner makes it worse
    ([8, 4, 5, 1, 0.5], 1.2, 1),
    # the first k counts, not a later one
    ([8, 7.9, 7.8, 1, 0.99], 1.2, 0),
    # tau 1: any improvement is worth a learner, none is not
    ([5, 4.99, 4.98, 4.98, 3], 1.0, 4),
    ([5, 4.99, 4.98, 4.99, 3], 1.0, 2),
    # nothing left to improve
    ([8, 4, 0, 0, 0], 1.2, 2),
    ([0, 0, 0, 0, 0], 1.2, 0),
    # an improvement to zero is larger than any factor
    ([8, 4, 2, 1, 0], 1.2, 4),
    # a zero that is lost again is still the place to stop
    ([8, 4, 0, 1, 0.5], 1.2, 2),
]


@pytest.mark.parametrize(("errors", "tau", "k"), TABLE)
def test_the_label_is_the_smallest_k_for_which_one_more_learner_helps_too_little(errors, tau, k):
    assert relative_improvement(torch.tensor(errors, dtype=torch.float64)[:, None], tau).tolist() == [k]


def test_columns_start_at_k_min():
    errors = torch.tensor([[8.0, 4.0], [4.0, 3.9], [1.0, 1.0]])
    assert relative_improvement(errors, 1.2).tolist() == [2, 0]


def test_a_site_with_one_choice_has_one_label():
    assert relative_improvement(torch.tensor([[3.0, 0.0]]), 1.2).tolist() == [0, 0]
