"""Facts about a model: the places that can become ACMs, and the look-alikes that cannot.

Everything here is frozen, holds no tensors and survives a JSON round trip.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

SiteKind = Literal["mlp", "gated_mlp", "linear"]
Role = Literal["q", "k", "v", "o", "qkv", "kv", "qk"]
GraftKind = Literal["W", "P", "T", "S", "R"]
# what is read from a file must be so; the largest is what sizes of tensors are counted with
Whole = Annotated[int, Ge(0), Le(2**63 - 1)]
Count = Annotated[int, Ge(1), Le(2**31 - 1)]
Learners = Annotated[int, Ge(1), Le(64)]
Share = Annotated[float, Ge(0), Le(1)]
# an `act` is one of these names, or an expression; what follows a name is what it stands for, torch's own where nothing
ACTIVATIONS: dict[str, str | None] = {
    "identity": "x",
    "relu": None,
    "relu6": None,
    "relu2": "square(relu(x))",
    "gelu": None,
    "gelu_tanh": None,
    "quick_gelu": "mul(x, sigmoid(mul(x, 1.702)))",
    "silu": None,
    "tanh": None,
    "sigmoid": None,
    "elu": None,
    "leaky_relu": None,
    "hardswish": None,
    "mish": None,
    "softplus": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRef:
    """A weight matrix used as `x @ weight.T + bias`, named by the parameters that hold it.

    `transposed` says that the parameter is stored [in, out] (GPT-2's Conv1D). `rows` = (start, stop) picks
    output rows of a packed parameter (after undoing `transposed`); None means all of them.
    """

    weight: str
    bias: str | None = None
    transposed: bool = False
    rows: tuple[Whole, Whole] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Batch axis of a site's input.

    The site's input is [..., features]. Axis `batch_axis` has batch * `folds` entries, the folds of one
    example lying next to each other (windows, beams). All other axes but the last are token axes. 0 folds: the tokens
    of all examples are packed along that axis, any number of each (patches of images). Where no axis can be told and
    the plan was made for one example, `batch_axis` is None: all tokens of a call are one example's.
    """

    batch_axis: Whole | None = 0
    folds: Whole = 1

    @property
    def is_packed(self) -> bool:
        """True if one axis holds the tokens of all examples, any number of each."""
        return self.folds == 0

    @property
    def is_pooled(self) -> bool:
        """True if the tokens of a call cannot be told apart by example."""
        return self.batch_axis is None or self.is_packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Graft:
    """Way of an ACM into the live model.

    W: `modules` = (the module that equals the region). P: the linears that read the same tokens, in the order of
    execution; the first becomes the ACM, whose output is divided among them by `widths`. T: the modules that tile the
    region in the order of execution, the last becomes the ACM. S: the modules of the first linears and then of the last
    linear, with functional ops between them. R: no module equals or tiles the region; the enclosing module's graph is
    rewritten.
    `dropout` is the probability of a trailing dropout that the graft swallows and the ACM must apply again.
    `stash_width` is, for S, the hidden width that the ops in between need to see (0: any width does).
    """

    kind: GraftKind
    modules: tuple[str, ...]
    widths: tuple[Count, ...] = ()
    dropout: Share = 0.0
    stash_width: Whole = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two projections of one attention whose heads can change their basis together: q with k, v with o, qkv with o.

    `partner` is the other site's name. `heads` is G, how many heads this site has of its own: of its output (q, k,
    v) or of its input (o). Where several heads of one side read one head of the other, they lie next to each other.
    A packed projection counts the heads of all its roles; `roles` has the numbers of those that give queries, of those
    that give keys and of those that give values, each in the order of those that they meet.
    """

    partner: str
    heads: Count
    roles: tuple[tuple[Whole, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One place of the user's model that can become an ACM.

    `name` is the path where the ACM will live. `first` holds the linears that read the input: one, or two for a
    gated MLP in the order (activated branch, multiplied branch); a packed gated MLP has two refs into one
    parameter. A linear site has one, or one for each of the projections whose outputs it gives side by side. `last` is
    an MLP's second layer, None for a linear site. `act` is the activation: a name or an expression of `activations`,
    "identity" for linear sites. `dense_width` is H, one branch's for gated MLPs.
    `residual`: the output is added to a value that bypasses the site; `residual_norm`: with a norm on the way.
    `calls`: how often one forward runs the site, `tokens`: tokens per call, both for the example inputs.
    `layout` is None where it could not be told. `pair` says with which site a projection can be sliced; where it is
    None, `unpaired` may say why. `functions` are those that the model may run between an MLP's linears, by their paths:
    a rewrite tells another model from the planned one by them. `source` is the user's `file:line` of the last linear's
    call.
    """

    name: str
    kind: SiteKind
    role: Role | None = None
    d_in: Count
    d_out: Count
    dense_width: Count | None = None
    act: str = "identity"
    first: tuple[LinearRef, ...]
    last: LinearRef | None = None
    residual: bool = False
    residual_norm: bool = False
    calls: Count = 1
    tokens: Whole
    layout: Layout | None = None
    graft: Graft
    pair: Pair | None = None
    unpaired: str = ""
    functions: dict[str, str] = field(default_factory=dict, hash=False)
    source: str | None = None

    @property
    def refs(self) -> tuple[LinearRef, ...]:
        """All its linears: those that read its input, then an MLP's second layer."""
        return self.first if self.last is None else (*self.first, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A look-alike that stays dense, with a reason (and remedy) a user can act on, and its MACs per forward."""

    name: str
    reason: str
    macs: Whole
    source: str | None = None
