"""A recipe: everything a user decides about one conversion. Every default is written here, once.

Its larger parts have files of their own: `models` (model, input), `phases` (schedule), `datasets` (data) and `tasks`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from acm_compiler.errors import did_you_mean
from acm_compiler.recipe.datasets import DataSection
from acm_compiler.recipe.document import Document
from acm_compiler.recipe.fields import (
    Argument,
    Auto,
    Budget,
    Count,
    Every,
    Interval,
    Many,
    Section,
    StepInterval,
    Texts,
    Whole,
    refusal,
)
from acm_compiler.recipe.models import InputConfig, ModelConfig
from acm_compiler.recipe.phases import Phase
from acm_compiler.recipe.tasks import ExpectConfig, TaskConfig, refuse_unfit
from acm_compiler.site import ACTIVATIONS, Learners

VERSION = 1


class SiteRule(Argument):
    """Rule that turns matching sites into ACMs. A site follows the last rule that matches it, else it stays dense."""

    called = "a rule for sites"
    sample = '{"match": "mlp", "learners": 8}'

    match: Texts
    """mlp, attn, attn.q (.k, .v, .o; packed: .qkv, .kv, .qk); a site's name; a glob; `re:` and a regular expression."""
    include: Texts = ()
    """Only sites whose name also matches one of these names, globs or re: patterns."""
    exclude: Texts = ()
    """No site whose name matches one of these."""
    learners: Learners = 4
    """N, the number of learners of each ACM."""
    width: Count | Auto = "auto"
    """Hidden width of one learner; auto: all learners together cost what the site cost."""
    k_min: Whole | Auto = "auto"
    """Fewest learners a token may run; auto: 0 at an MLP with a bypass, else 1."""
    zero: Literal["bypass", "mean"] = "bypass"
    """Sites at which a token may run no learner. bypass: only those whose output is added to a value that goes around
    them. mean: all, k = 0 gives the site's mean output; lower budgets come into reach, and k_min auto is 0."""
    activation: str = "auto"
    """auto: the site's own for an MLP, identity for a projection. Else a name or an expression of x."""
    init: Literal["auto", "random"] = "auto"
    """auto: the converted model's outputs are the original's. random: learners start untrained, as in the paper."""
    lossless: bool = False
    """Keep what k = N needs to be exact; the added parameters are reported."""
    second_layer: Literal["auto", "shared", "shared_top", "per_k", "original"] = "auto"
    """An MLP's second layer; auto: shared, or shared_top when lossless."""
    form: Literal["auto", "svd", "slices"] = "auto"
    """Form of a projection's learners: a low-rank product, or slices of its own rows or columns. auto: the one with
    the lower expected damage."""
    pack: bool | None = None
    """One ACM for q, k and v of an attention that reads the same tokens with all three: one gate, and one k for each
    token. Projections that are not so stay apart. null: no."""

    @field_validator("activation")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "auto" and value not in ACTIVATIONS and "(" not in value:
            known = f"auto, {', '.join(ACTIVATIONS)}, or an expression such as mul(x, sigmoid(x))"
            raise refusal(f"unknown activation '{value}'{did_you_mean(value, ACTIVATIONS)}; known: {known}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SiteRule:
        if isinstance(self.k_min, int) and self.k_min > self.learners:
            raise refusal(f"k_min must be at most learners, {self.learners}, got {self.k_min}", "k_min")
        if self.lossless and self.second_layer == "shared":
            raise refusal("second_layer shared is not exact, but lossless asks for it (keep one)", "second_layer")
        if self.lossless and self.init == "random":
            raise refusal("a random start is not lossless (keep one)", "lossless")
        for key, idle, what in (
            ("form", r"mlp", "projections"),
            ("pack", r"mlp", "projections"),
            ("second_layer", r"attn(\..*)?", "MLPs"),
        ):
            asked = getattr(self, key) not in ("auto", False, None)
            if asked and all(re.fullmatch(idle, match) for match in self.match):
                raise refusal(f"{key} is for {what}, and match {', '.join(self.match)} means none", key)
        return self


class GateConfig(Argument):
    """The size of the gates."""

    called = "gate"
    sample = '{"hidden": 4} or {"share": 0.02}'

    hidden: Count | Auto = "auto"
    """Hidden width; auto: follows from `share`."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """A gate's MACs over its site's MACs."""


class BudgetsConfig(Section):
    """Budgets are shares of the learners' MACs, in (0, 1]."""

    train: Budget = 0.6
    """The budget that finetune aims at."""
    report: Annotated[Many[Budget], Field(min_length=1)] = (0.25, 0.4, 0.6, 0.75, 1.0)
    """The budgets at which the finished model is measured."""


class TargetConfig(Section):
    """A GPU whose times of sites decide what is converted: those measured there, else expected ones."""

    device: Literal["a100", "h100", "h200"]
    """Its name."""
    batch: Count | None = None
    """Examples per call; null: as many as the plan's example inputs hold."""


class QuantizeConfig(Section):
    """Parts of a model that get weights of 8 or 4 bits once the schedule is done."""

    weights: Literal["int8", "int4"] = "int8"
    """Their type."""
    rest: bool = False
    """Linears outside of ACMs, too: all but output heads, routers, linears with tied weights and those with hooks."""
    include: Texts = ()
    """Heads, routers and tied linears that are quantised all the same: names, globs or re: patterns."""
    exclude: Texts = ()
    """Linears of the rest that stay floats."""

    @model_validator(mode="after")
    def _about_the_rest(self) -> QuantizeConfig:
        if not self.rest and (self.include or self.exclude):
            raise refusal("include and exclude are about the rest (rest: true, or neither)", "rest")
        return self


class RunConfig(Section):
    """Settings of a run; apart from seed, precision and quantize they do not change what is learned."""

    seed: Whole = 0
    """Seed for everything that is drawn: order of examples, augmentation, noise of gates, random starts."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of products while training; parameters stay fp32. While calibrating, bf16 is that of linear layers, on CPUs
    with instructions for it."""
    quantize: Literal["int8", "int4"] | QuantizeConfig | None = None
    """int8, int4: once the schedule is done, learners get such weights, and budgets are measured on these. `{rest:
    true}`: linears outside of ACMs get them, too. int4 weights are rounded by the training data."""
    save_every: Interval = Every(amount=600, unit="second")
    """Interval between saves of the state for --resume."""
    eval_every: StepInterval = Every(amount=1, unit="epoch")
    """Interval between evaluations while the model is finetuned."""
    eval_batch: Count = 128
    """Examples per forward of evaluations and of what measures budgets after training."""
    workers: Whole = 0
    """Processes that load data; 0: the training process itself."""
    threads: Count | None = None
    """CPU threads of torch; unset: torch decides."""
    device: str = "auto"
    """auto: the first GPU, else the CPU. Or cpu, cuda, cuda:1, mps."""
    sharded: bool = False
    """Each of several processes holds a part of weights, gradients and optimizer state while a phase trains them."""
    offload: str | None = None
    """A folder, or disk for the system's own for temporary files: what conversion and calibration make lies in files
    there, for models that memory does not hold. On the CPU alone. Or cpu: weights and statistics of a calibration on a
    GPU lie in the CPU's memory."""

    @property
    def quantized(self) -> QuantizeConfig | None:
        """`quantize` as its section."""
        return QuantizeConfig(weights=self.quantize) if isinstance(self.quantize, str) else self.quantize

    @field_validator("device")
    @classmethod
    def _known(cls, value: str) -> str:
        if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", value):
            hint = did_you_mean(value, ("auto", "cpu", "cuda", "mps"))
            raise refusal(f"unknown device '{value}'{hint}; known: auto, cpu, cuda, cuda:1, mps")
        return value


class Resolved(Section):
    """Origin of a resolved recipe; written by a run, of no effect when read."""

    recipe: str
    """The file or shipped recipe that the run was given."""
    overrides: Many[str] = ()
    """The `--set` values."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that were installed."""
    hash: str
    """Equal for recipes that lead to the same model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Source of a recipe: the document with its places, and the `--set` values."""

    document: Document
    overrides: tuple[str, ...] = ()


class Recipe(Section):
    """One conversion, from a trained model to a model with budgets: what a recipe file says, complete."""

    acm: Literal[1]
    """Version of the recipe format."""
    name: Annotated[str, Field(min_length=1)]
    """Name of the run; its folder is `runs/NAME` unless `--out` says otherwise."""
    description: str = ""
    """One line for `acmc recipes`."""
    model: ModelConfig
    """The model to convert."""
    input: InputConfig | None = None
    """Shape of one example; unset: that of the model's source."""
    task: TaskConfig | None = None
    """Task of the model: loss and metric. Needed by a schedule."""
    data: DataSection | None = None
    """Data sets. Needed by a schedule."""
    expect: ExpectConfig | None = None
    """Metric that the model must reach before conversion; else no run starts."""
    sites: Annotated[Many[SiteRule], Field(min_length=1)] = (SiteRule(match=("mlp",)), SiteRule(match=("attn",)))
    """Rules for what is converted and how, in order: the last rule that matches a site decides."""
    gate: GateConfig = GateConfig()
    """Size of gates."""
    budgets: BudgetsConfig = BudgetsConfig()
    """Budgets that gates are trained for and measured at."""
    target: TargetConfig | None = None
    """GPU that the plan is for: sites that would be slower there as ACMs, at budgets.train, stay dense."""
    schedule: Many[Phase] = ()
    """Phases in the order they run."""
    run: RunConfig = RunConfig()
    """Seed, precision, device, saving."""
    resolved: Resolved | None = None
    """Origin of the recipe; written by a run, of no effect when read."""
    _origin: Origin | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _named(self) -> Recipe:
        # what an earlier run has saved was carried out
        if self.resolved is None and (self.name in (".", "..") or re.search(r"[/\\\0]", self.name)):
            raise refusal(f"name must be the name of a folder, got {self.name!r}; leave out / and \\", "name")
        for i, rule in enumerate(self.sites if self.resolved is None else ()):
            if not rule.match:
                raise refusal(f"sites[{i}].match must name what to convert, such as mlp, got nothing", "sites")
        return self

    @model_validator(mode="after")
    def _complete(self) -> Recipe:
        missing = [key for key in ("task", "data") if getattr(self, key) is None]
        for key, what, section in (("schedule", "a schedule", self.schedule), ("expect", "expect", self.expect)):
            if section and missing:
                raise refusal(f"{what} needs {' and '.join(missing)}", key)
        return self

    @model_validator(mode="after")
    def _fitting(self) -> Recipe:
        if self.task is not None and self.data is not None:
            rate = self.input.sample_rate if self.input and self.input.audio_seconds else None
            refuse_unfit(self.task, self.data, auto_class=self.model.auto_class, input_rate=rate)
        return self

    @property
    def origin(self) -> Origin:
        """The recipe's source; an empty document for one that was built in Python."""
        return self._origin or Origin(document=Document(source=self.name, data={}))

    def place(self, *path: str | int) -> str:
        """File, line and column of the value at a path of keys, such as "budgets", "train"."""
        return str(self.origin.document.place_of_value(path))

    def named_budgets(self) -> list[tuple[str | None, float | str]]:
        """The budgets that this recipe asks for, with their places, but for defaults that are only reported."""
        named = self.budgets.model_fields_set
        found: list[tuple[str | None, float | str]] = []
        if "train" in named or any(phase.spends_budget for phase in self.schedule):
            found.append((self.place("budgets", "train"), self.budgets.train))
        if "report" in named:
            found += [(self.place("budgets", "report", i), budget) for i, budget in enumerate(self.budgets.report)]
        return found

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the images that `input` names; None where it names none."""
        return self.input.image[1:] if self.input is not None and self.input.image is not None else None
