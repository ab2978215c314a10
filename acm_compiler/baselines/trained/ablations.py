"""Ablations of the paper's phases: a loss term or a phase left out, other numbers of learners, starts and budgets."""

from __future__ import annotations

from acm_compiler.baselines.trained.acms import Paper, Way

_WAYS = {
    "budget": ("no budget term", Way(without="budget")),
    "entropy": ("no entropy term", Way(without="entropy")),
    "diversity": ("no diversity term", Way(without="diversity")),
    "distill": ("no distill phase", Way(without="distill")),
    "gate": ("no gate phase", Way(without="gate")),
    "finetune": ("no finetune phase", Way(without="finetune")),
    "n2": ("2 learners", Way(learners=2)),
    "n4": ("4 learners", Way(learners=4)),
    "n8": ("8 learners", Way(learners=8)),
    "n16": ("16 learners", Way(learners=16)),
    "start": ("learners from a random start", Way(start="random")),
    "drawn": ("trained at the recipe's budget alone", Way(budgets="one")),
    "shared": ("a training for each budget", Way(budgets="each")),
}


def _ablation(key: str) -> type[Paper]:
    """The method that differs from the paper's phases in one thing."""

    class Ablation(Paper):
        name = f"{Paper.name}-{key}"
        title = f"{Paper.title}: {_WAYS[key][0]}"
        way = _WAYS[key][1]

    return Ablation


ABLATIONS = {key: _ablation(key) for key in _WAYS}
