"""Decisions of a plan: what becomes of one site, and the facts about the model that they were made for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from acm_compiler.site import Count, Learners, Site, Whole

SCHEMA = 1
SecondLayer = Literal["shared", "shared_top", "per_k", "original"]
LinearForm = Literal["auto", "svd", "slices"]
Init = Literal["auto", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSite(Site):
    """A site and what was decided for it.

    `learners` is N, `width` one learner's hidden width, `gate_width` the gate's. `learner_act` is the learners'
    activation. `form` "slices" needs `pair`; there `width` is what one learner has of the output (q, k, v) or reads of
    the input (o). `init` "random" is the paper's start. `state` "dense": no phase has fitted the learners yet.
    """

    learners: Learners
    width: Count
    k_min: Whole
    gate_width: Count
    learner_act: str
    second_layer: SecondLayer = "shared"
    form: LinearForm = "auto"
    lossless: bool = False
    init: Init = "auto"
    state: Literal["dense", "learners"] = "learners"

    @property
    def runs(self) -> int:
        """Tokens of all calls in one forward of the example inputs."""
        return self.tokens * self.calls

    @property
    def columns(self) -> int:
        """C = N - k_min + 1, the gate's outputs."""
        return self.learners - self.k_min + 1

    @property
    def is_sliced(self) -> bool:
        """True if the learners are slices of the projection itself, its heads in a basis of their own."""
        return self.kind == "linear" and self.form == "slices"

    @property
    def learner_form(self) -> str:
        """The form of `acm::learners`: mlp, gated, linear, rows or cols."""
        if self.is_sliced:
            return "cols" if self.role == "o" else "rows"
        return "gated" if self.kind == "gated_mlp" else self.kind

    @property
    def has_bias_in(self) -> bool:
        """True if the learners' first layer has a bias."""
        if self.kind == "linear":
            return self.learner_act != "identity"
        return self.init == "random" or any(ref.bias is not None for ref in self.first)

    @property
    def has_top(self) -> bool:
        """True if k = N runs dense weights of its own."""
        return self.second_layer == "shared_top" or (self.kind == "linear" and self.lossless and not self.is_sliced)

    @property
    def keeps_answers(self) -> bool:
        """True if k = N is still exact once learners have been calibrated."""
        return self.is_sliced or self.lossless if self.kind == "linear" else self.second_layer != "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about the model that a plan was made for; MACs are for exactly the example inputs.

    `source` says how the base model is built again, None for a live model. `inputs` describes the example.
    `not_counted` names operations without MACs and how often they run.
    """

    fingerprint: str
    cls: str
    source: dict[str, Any] | None = None
    inputs: str = ""
    batch: Count = 1
    dense_macs: Whole
    dense_params: Whole
    not_counted: dict[str, Whole] = field(default_factory=dict)

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the example, where it is one tensor [B, C, H, W]."""
        found = re.fullmatch(r"\d+ x \d+ x (\d+) x (\d+)", self.inputs)
        return (int(found[1]), int(found[2])) if found else None
