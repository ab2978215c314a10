"""The phases of a recipe's schedule: what is trained, for how long, and how."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from acm_compiler.recipe.fields import Budget, Count, NotNegative, Positive, Section, Two, refusal


class PhaseSection(Section):
    """The policy of a phase, for all who ask: each phase overrides what is different about it."""

    closed_form: ClassVar[bool] = False
    """It solves for learners, gates and budget table, without steps; it may come first."""
    imitates: ClassVar[bool] = False
    """It fits learners to the unmodified network; it may come first, and no gate chooses meanwhile."""
    teaches_gates: ClassVar[bool] = False
    """Gates learn logits from the unmodified network, which has no labels for slices; a later phase may free them."""
    spends_budget: ClassVar[bool] = False
    """It is led to `budgets.train`."""
    remedy: ClassVar[str] = ""
    """Advice for gates that run the same k for every token at its end."""

    @property
    def needs_budgets(self) -> bool:
        """True if it reads the gates' budget table."""
        return False

    @property
    def frees_gates(self) -> bool:
        """True if it starts by forgetting the budgets of gates that learned logits, which then go where they will."""
        return False

    @property
    def aims_at_one_budget(self) -> bool:
        """True if all its steps aim at `budgets.train`."""
        return False


def half_cosine(step: int, steps: int) -> float:
    """The part of a learning rate at `step` of `steps`: from 1 to 0, along half a cosine."""
    return (1 + math.cos(math.pi * step / steps)) / 2


class TrainedPhase(PhaseSection):
    """Keys of all phases that take optimizer steps. Exactly one of `epochs` and `steps` gives the length."""

    epochs: Count | None = None
    """Passes over the training data."""
    steps: Count | None = None
    """Optimizer steps, instead of epochs."""
    batch: Count = 64
    """Examples per optimizer step: all processes and all accumulated parts together."""
    accumulate: Count = 1
    """Parts that a batch is cut into, one after the other, to save memory."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """AdamW takes `weight_decay` from the weights themselves, Adam adds it to the gradient."""
    lr: Positive
    """Learning rate at the start of the phase."""
    weight_decay: NotNegative = 0.0
    """Strength of the pull of weights towards zero."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Schedule of the learning rate: a half cosine from `lr` to `lr_min`, or constant."""
    lr_min: NotNegative = 1e-6
    """Learning rate at the end of a cosine schedule."""
    clip_norm: Positive | None = 1.0
    """Largest norm of the gradient; null switches clipping off."""

    @model_validator(mode="after")
    def _one_length(self) -> TrainedPhase:
        if self.epochs is None and self.steps is None:
            raise refusal("epochs or steps must give the length of the phase")
        if self.epochs is not None and self.steps is not None:
            raise refusal("epochs and steps are both given (keep one)", "steps")
        if self.batch % self.accumulate:
            raise refusal(f"accumulate must divide batch, {self.batch}, got {self.accumulate}", "accumulate")
        if self.schedule == "cosine" and self.lr_min > self.lr:
            raise refusal(f"lr_min must be at most lr, {self.lr:g}, got {self.lr_min:g}", "lr_min")
        return self

    @property
    def loaded_batch(self) -> int:
        """Examples loaded at once: one of the parts that a batch is cut into."""
        return self.batch // self.accumulate


class DistillPhase(TrainedPhase):
    """Every ACM imitates the part of the network it replaces, alone and in parallel, at every k."""

    imitates: ClassVar[bool] = True

    phase: Literal["distill"]
    lr: Positive = 1e-3
    """Learning rate at the start of the phase."""
    detach: bool = False
    """Each prefix's error trains only its last learner."""


class LabelRule(Section):
    """Rule for a token's label, the k its gate should choose, from its error at every k."""

    rule: Literal["relative_improvement"] = "relative_improvement"
    """The smallest k after which one more learner hardly helps, by `tau`; N where every one helps."""
    tau: Annotated[float, Field(ge=1)] = 1.2
    """One more learner helps where it lowers the error by at least this factor."""


class GatePhase(TrainedPhase):
    """The gates learn labels made from the learners' errors; the learners stay as they are."""

    teaches_gates: ClassVar[bool] = True
    remedy: ClassVar[str] = "change labels.tau of the gate phase (larger: fewer learners), or distill for longer"

    phase: Literal["gate"]
    lr: Positive = 1e-2
    """Learning rate at the start of the phase."""
    labels: LabelRule = LabelRule()
    """Rule for a token's label from its error at every k."""
    temperature: Positive = 0.8
    """Temperature of the Gumbel-softmax."""


class FinetunePhase(TrainedPhase):
    """The whole network learns its task under a budget: the task's loss plus three weighted terms."""

    spends_budget: ClassVar[bool] = True
    remedy: ClassVar[str] = "raise entropy and diversity of the finetune phase, lower its lr, or raise its temperature"

    phase: Literal["finetune"]
    lr: Positive = 1e-4
    """Learning rate at the start of the phase."""
    objective: Literal["task", "distillation"] = "task"
    """task: the task's own loss. distillation: the distance of the outputs from the original model's; no labels."""
    cache_answers: bool | None = None
    """True: run the original model over the examples once, before the first step, and keep its answers in the run's
    folder: for distillation on data that stay the same from epoch to epoch and are read more than once. Of language
    models the input of the head is kept."""
    update: Literal["all", "learners"] = "all"
    """all: the whole network and its gates, which are sampled. learners: the learners alone, in eval mode, at the k
    that the gates choose; the keys that lead gates are not for it."""
    gate_lr: Positive | None = None
    """Learning rate of the gates at the start of the phase; unset: `lr`, as in the paper. Short runs need more."""
    temperature: Positive = 0.8
    """Temperature of the Gumbel-softmax."""
    budget: NotNegative = 0.1
    """Weight of the distance to the budget."""
    budget_range: Two[Budget] | None = None
    """Each step draws its budget from this range, so that one model keeps serving all of them; unset: every step aims
    at `budgets.train`. Needs gates whose budgets were measured (calibrate or gate before)."""
    entropy: NotNegative = 0.05
    """Weight of the term that spreads each gate's choices."""
    diversity: NotNegative = 0.05
    """Weight of the term that lets examples differ in what they cost."""

    @model_validator(mode="after")
    def _consistent(self) -> FinetunePhase:
        # a run's own recipe has every default written out
        led = [key for key in _LEADING if getattr(self, key) != type(self).model_fields[key].default]
        if led and self.update == "learners":
            what = f"{', '.join(led)} leads gates, which update: learners leaves as they are"
            raise refusal(what, led[0])
        if self.cache_answers and self.objective != "distillation":
            raise refusal("cache_answers keeps the answers that objective: distillation learns from", "cache_answers")
        if self.budget_range is not None and self.budget_range[0] >= self.budget_range[1]:
            raise refusal("budget_range must rise: [low, high]", "budget_range")
        return self

    @property
    def needs_budgets(self) -> bool:
        """True where it draws budgets, or leaves gates as they are."""
        return self.budget_range is not None or self.update == "learners"

    @property
    def frees_gates(self) -> bool:
        """True where it needs no budgets."""
        return not self.needs_budgets

    @property
    def aims_at_one_budget(self) -> bool:
        """True unless each step draws its own."""
        return self.budget_range is None


# what leads gates to a budget while they are trained
_LEADING = ("gate_lr", "temperature", "budget", "entropy", "diversity")


class CalibratePhase(PhaseSection):
    """Learners, gates and budget table in closed form from a few thousand tokens; no labels."""

    closed_form: ClassVar[bool] = True

    phase: Literal["calibrate"]
    tokens: Count = 20_000
    """Real tokens that every site is fitted on."""
    gradient_tokens: Count | None = None
    """Tokens of these that are run with gradients; the rest is run forward alone, for the refit of learners; unset:
    all."""
    backward_passes: Count = 3
    """Backward passes of each batch with gradients, each along a random direction of the model's answer."""
    local_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learners of every MLP are trained on inputs of its own after the closed form, first layers
    too; only where all k share one second layer (not `lossless`)."""
    batch: Count = 64
    """Examples per forward."""

    @property
    def loaded_batch(self) -> int:
        """Examples loaded at once."""
        return self.batch


Phase = Annotated[
    DistillPhase | GatePhase | FinetunePhase | CalibratePhase,
    Field(discriminator="phase"),
]
