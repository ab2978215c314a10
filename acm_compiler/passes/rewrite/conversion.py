"""State of a rewritten model as a whole: its plan and its budget table, shared by all its ACMs."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch
from torch import fx, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import is_in_parts
from acm_compiler.acm.quantized.integers import To
from acm_compiler.acm.sparse import ValueSizes
from acm_compiler.errors import AcmError, CompiledModelError, FixedBudget, NotRewritten, UsageError
from acm_compiler.planning.call_times import CallTimes
from acm_compiler.planning.plan import Plan
from acm_compiler.site import Share, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPoint:
    """One row of a budget table: with this knob and lowest k the gates reach this share of learner MACs.

    measured: false for rows in between, whose share is expected from scores that were recorded at measured ones.
    """

    share: Share
    knob: float
    k_lo: Whole
    measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedBudget:
    """Result at one budget on held-out data: the share reached, and the task's metric."""

    asked: float
    knob: float
    reached: float
    metric: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """Budget -> knob, in order of rising share (docs/semantics.md, Budgets). `rule` is the gates' rule.

    `evaluated`: the budgets at which a run has evaluated the model with this table. `jumps`: the shares of those points
    from which no knob leads to any share before the next point's, as where all tokens are alike.
    """

    rule: str
    points: tuple[BudgetPoint, ...]
    examples: int
    evaluated: tuple[EvaluatedBudget, ...] = ()
    jumps: tuple[float, ...] = ()


@dataclass(slots=True, kw_only=True)
class Conversion:
    """The state of a rewritten model that is not tensors.

    `teacher` is the digest of the dense weights that were replaced, `start_gates` that of the gates before anything
    trained them, where it is known; `default_budget` is the recipe's own, what `set_budget(model, None)` means;
    `budget` is the budget set last, one per phase where it was set so, None when the gates were not asked to keep one;
    `cap` bounds every token's k with it, as a share of N.
    `quantized` is what the learners' weights were made by `acm.quantize`, None while they are floats; `rest` names the
    linears outside of ACMs that became that, too. `times` are those that `acmc bench` has measured.
    `damage` is what the last calibration expects of every k at every site; `value_sizes`, how large the values were
    that a site multiplies, `sparsity` the share skipped, in which calls. `padding` follows masks of relaxed gates.
    """

    plan: Plan
    teacher: str | None = None
    start_gates: str | None = None
    table: BudgetTable | None = None
    default_budget: float | None = None
    budget: float | dict[str, float] | None = None
    cap: float | None = None
    quantized: To | None = None
    rest: tuple[str, ...] = ()
    times: CallTimes | None = None
    damage: dict[str, tuple[float, ...]] = field(default_factory=dict)
    value_sizes: dict[str, ValueSizes] = field(default_factory=dict)
    sparsity: tuple[float, str] | None = None
    padding: Any = None
    undo: Any = None  # what `rewrite` changed around the ACMs, for `revert`

    @property
    def budgets_set(self) -> tuple[float, ...]:
        """The budget set last, or both phases' budgets; none where none was set."""
        if self.budget is None:
            return ()
        return tuple(self.budget.values()) if isinstance(self.budget, dict) else (self.budget,)

    @property
    def table_min(self) -> float:
        """The smallest budget that can be set: the table's lowest share, or the plan's where none was measured."""
        return self.table.points[0].share if self.table else self.plan.cost.budget_min


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """A rewritten model, or a part of one, with what one search of it finds: its ACMs by site name, its conversion."""

    model: nn.Module
    acms: dict[str, ACM]
    owner: Conversion

    @property
    def plan(self) -> Plan:
        """The decisions for all sites, as they are now: calibration resolves them."""
        return self.owner.plan

    @property
    def reached(self) -> Plan:
        """The plan with the states that the ACMs have reached."""
        sites = tuple(replace(site, state=self.acms[site.name].state) for site in self.plan.sites)
        return replace(self.plan, sites=sites)


def sites(model: nn.Module) -> dict[str, ACM]:
    """The ACMs of `model` by site name, in the plan's order; errors as of `rewritten`."""
    return rewritten(model).acms


def conversion(model: nn.Module) -> Conversion:
    """The conversion of a rewritten model, or of a part of one; errors as of `rewritten`."""
    return rewritten(model).owner


def rewritten(model: nn.Module) -> Rewritten:
    """The ACMs of `model`, in the plan's order, and their conversion; also for wrapped (DDP, compiled) models.

    NotRewritten when there are none, FixedBudget for graphs made of a rewritten model (exported, or frozen for good),
    UsageError where several rewritten models are parts of one.
    """
    refuse_no_module(model)
    acms = [module for module in model.modules() if isinstance(module, ACM)]
    if not acms:
        raise _no_acms(model)
    for acm in acms:
        _refuse_discarded(acm)
    owners = {id(acm.conversion) for acm in acms}
    if len(owners) > 1:
        raise UsageError(
            f"this {type(model).__name__} holds {len(owners)} models that were rewritten one by one",
            expected="one plan and one budget for the whole model",
            fix="name the part, as in acm.set_budget(model.encoder, 0.4); or rewrite the whole model at once",
        )
    owner = conversion_of(acms[0])
    order = {site.name: i for i, site in enumerate(owner.plan.sites)}
    return Rewritten(
        model=model, acms={acm.name: acm for acm in sorted(acms, key=lambda acm: order[acm.name])}, owner=owner
    )


def refuse_no_module(model: object, *, where: str | None = None) -> None:
    """UsageError, or FixedBudget for exported programs, unless `model` is a module; `where`: the argument's name."""
    if isinstance(model, nn.Module):
        return
    name = type(model).__name__
    if _holds_operators(getattr(model, "graph_module", None)):
        raise _exported(name)
    fix = "what is made of a model (a package of AOTInductor, an ONNX program) keeps its budget: name the model"
    if isinstance(model, type):
        name, fix = f"the class {model.__name__}", f"make one of it: {model.__name__}(…)"
    elif isinstance(model, Mapping):
        fix = "load its tensors into a model: model.load_state_dict(…)"
    raise UsageError("a model must be a torch.nn.Module", where=where, found=name, fix=fix)


def _no_acms(model: nn.Module) -> AcmError:
    name = type(model).__name__
    if _holds_operators(model):
        return _exported(name)
    fix = "convert it first: acm.rewrite(model, acm.plan(model, inputs)); or give a part of the model that has ACMs"
    return NotRewritten(f"this {name} holds no ACMs", fix=fix)


def _exported(name: str) -> FixedBudget:
    return FixedBudget(
        "an exported graph keeps the budget or k at which it was exported, or takes the budget as an input",
        found=f"a {name} with operators of ACMs",
        fix="export by acm.export, then program(x, budget=torch.tensor(0.4)); or set it on the rewritten model, "
        "acm.set_budget(model, 0.4), and export that again",
    )


def _holds_operators(model: object) -> bool:
    """True if a module is made of graphs that call operators of ACMs."""
    if not isinstance(model, nn.Module):
        return False
    graphs = [getattr(part, "graph", None) for part in model.modules()]
    nodes = [node for graph in graphs if isinstance(graph, fx.Graph) for node in graph.nodes]
    return any(node.op == "call_function" and str(node.target).startswith("acm.") for node in nodes)


def _refuse_discarded(acm: ACM) -> None:
    if type(acm.knob).__name__ == "ErasedTensor":  # what Inductor's freezing_discard_parameters leaves of a model
        raise FixedBudget(
            "Inductor froze this model and discarded its parameters: it keeps the budget or k that it had then",
            where=acm.name,
            fix="load the model anew, acm.set_budget, then compile; or freeze without freezing_discard_parameters",
        )


def plain_facts(found: Rewritten) -> dict[str, Any]:
    """Facts that training and measuring gave a model beside tensors and plan, as JSON holds them.

    Saved folders, state dicts and the state of a run keep these, with what is theirs alone.
    """
    owner = found.owner
    return {
        "sites": {name: {"state": acm.state, "rule": acm.gate.rule} for name, acm in found.acms.items()},
        "table": None if owner.table is None else asdict(owner.table),
        "damage": owner.damage,
        "default_budget": owner.default_budget,
        "value_sizes": {name: sizes._asdict() for name, sizes in owner.value_sizes.items()},
    }


def restore_facts(owner: Conversion, acms: Mapping[str, ACM], facts: Mapping[str, Any]) -> None:
    """Write what `plain_facts` gave into a model's conversion and ACMs."""
    for name, acm in acms.items():
        acm.state, acm.gate.rule = facts["sites"][name]["state"], facts["sites"][name]["rule"]
    owner.table = None if facts["table"] is None else _table(facts["table"])
    owner.damage = {name: tuple(values) for name, values in facts["damage"].items()}
    owner.default_budget = facts["default_budget"]
    owner.value_sizes = {name: ValueSizes(**sizes) for name, sizes in facts.get("value_sizes", {}).items()}


def _table(facts: Mapping[str, Any]) -> BudgetTable:
    points = tuple(BudgetPoint(**point) for point in facts["points"])
    evaluated = tuple(EvaluatedBudget(**budget) for budget in facts.get("evaluated", ()))
    jumps = tuple(facts.get("jumps", ()))  # not known to tables that were written before there were any
    return BudgetTable(rule=facts["rule"], points=points, examples=facts["examples"], evaluated=evaluated, jumps=jumps)


@torch.no_grad()
def gates_digest(acms: Iterable[ACM]) -> str:
    """A digest of the last layers of gates, all of which any training of gates changes; of fp32 values."""
    digest = hashlib.sha256()
    for acm in acms:
        for tensor in (acm.gate.outer.weight, acm.gate.outer.bias):
            if is_in_parts(tensor):
                tensor = cast(Any, tensor).full_tensor()
            digest.update(tensor.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy().data)
    return digest.hexdigest()


def conversion_of(acm: ACM) -> Conversion:
    """The conversion that `acm` belongs to."""
    assert isinstance(acm.conversion, Conversion)
    return acm.conversion


def wholly_rewritten(model: nn.Module, request: str) -> Rewritten:
    """The `rewritten` model, for what holds for all sites of the plan together; UsageError for a part of the model."""
    found = rewritten(model)
    elsewhere = [site.name for site in found.plan.sites if site.name not in found.acms]
    if elsewhere:
        raise UsageError(
            f"{request} is for the whole rewritten model, whose plan and budget table belong together",
            found=f"{type(model).__name__} with {len(found.acms)} of its {len(found.plan.sites)} sites, "
            f"without {elsewhere[0]}",
            fix="name the model that acm.rewrite or acm.load gave; acm.set_k(part, k) fixes the sites of a part",
        )
    return found


def refuse_inference_tensors(model: nn.Module) -> None:
    """UsageError for a model with tensors that no gradient can flow to, ever."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise UsageError(
                "the model was made or moved inside torch.inference_mode: it can be neither calibrated nor trained",
                where=name,
                found="an inference tensor",
                fix="outside of inference_mode, copy.deepcopy(model) has ordinary tensors",
            )


def refuse_compiled(
    model: nn.Module, done: str, *, fix: str = "give the eager model, the one that torch.compile was given"
) -> None:
    """CompiledModelError for a compiled model, whose graphs do not show what runs; `done` is what it cannot be."""
    refuse_no_module(model)
    # a compiled model exists only where dynamo has been imported
    dynamo, found = sys.modules.get("torch._dynamo"), None
    # beside modules compiled in place there is no eager model to give
    if dynamo is None or not isinstance(model, dynamo.eval_frame.OptimizedModule):
        compiled = (name for name, module in model.named_modules() if module._compiled_call_impl is not None)
        if (name := next(compiled, None)) is None:
            return
        found, fix = f"a call of {name or 'its own'}.compile()", "give copy.deepcopy(model), which is not compiled"
    raise CompiledModelError(f"a compiled model cannot be {done}", found=found, fix=fix)
