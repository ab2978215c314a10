"""Ablations of the paper's phases: a loss term or a phase left out, other numbers of learners, starts and budgets."""

from __future__ import annotations

from acm_compiler.baselines.trained.acms import Paper, Variant

_VARIANTS = {
    "budget": ("no budget term", Variant(without="budget")),
    "entropy": ("no entropy term", Variant(without="entropy")),
    "diversity": ("no diversity term", Variant(without="diversity")),
    "distill": ("no distill phase", Variant(without="distill")),
    "gate": ("no gate phase", Variant(without="gate")),
    "finetune": ("no finetune phase", Variant(without="finetune")),
    "n2": ("2 learners", Variant(learners=2)),
    "n4": ("4 learners", Variant(learners=4)),
    "n8": ("8 learners", Variant(learners=8)),
    "n16": ("16 learners", Variant(learners=16)),
    "start": ("learners from a random start", Variant(start="random")),
    "drawn": ("trained at the recipe's budget alone", Variant(budgets="one")),
    "shared": ("a training for each budget", Variant(budgets="each")),
}


def _ablation(key: str) -> type[Paper]:
    """The method that differs from the paper's phases in one thing."""

    class Ablation(Paper):
        name = f"{Paper.name}-{key}"
        title = f"{Paper.title}: {_VARIANTS[key][0]}"
        variant = _VARIANTS[key][1]

    return Ablation


ABLATIONS = {key: _ablation(key) for key in _VARIANTS}
