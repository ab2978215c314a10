"""Which k a token's gate should choose, from the token's error at every k: the rules a recipe can name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from acm_compiler.recipe.phases import LabelRule

# errors d [C, T] by rising k, the rule's tau -> column [T]
Rule = Callable[[Tensor, float], Tensor]


def relative_improvement(error_CT: Tensor, tau: float) -> Tensor:
    """The column [T] of the smallest k for which one more learner improves the error by less than the factor tau.

    error_CT holds d(k) = ||y_k - o||_2 for k from k_min to N. That is d(k) / d(k + 1) < tau; where there is no such k
    the label is N, the last column. An error of zero cannot be improved: the token stops there.
    """
    now, next_ = error_CT[:-1], error_CT[1:]
    stops = (now < tau * next_) | (now == 0)
    # argmax finds the first True; without any, the count of columns passed is all of them
    passed = (~stops).cumprod(0)
    return passed.sum(0)


RULES: dict[str, Rule] = {"relative_improvement": relative_improvement}


def label_columns(error_CT: Tensor, rule: LabelRule) -> Tensor:
    """Gate column [T] that each token should choose, by the rule that the recipe names."""
    return RULES[rule.rule](error_CT, rule.tau)
