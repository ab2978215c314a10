"""Things in the places around an ACM: modules that pass on (T), ends of stashes (S, P), rows of parameters (R)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

from torch import Tensor, nn
from torch.fx import Proxy

from acm_compiler.acm import ACM
from acm_compiler.acm.context import fx_node
from acm_compiler.errors import AcmError
from acm_compiler.site import Site


class Stash:
    """One value on its way between a site's linears and its ACM, for each thread by itself.

    It holds one value at a time: a site's region runs to its end before it starts again. What an exception left
    behind is overwritten by the next call.
    """

    def __init__(self) -> None:
        # no class of its own: where a graph breaks within the region, Dynamo writes such a one's values past the thread
        self._held = threading.local()

    def __reduce__(self) -> tuple[type[Stash], tuple[()]]:
        # copies and pickles start empty; those of one site still share one
        return Stash, ()

    def put(self, value: Any) -> None:
        """Keep the value for who takes it."""
        self._held.value = value

    def take(self, site: str) -> Any:
        """The value, which is handed over once."""
        value = getattr(self._held, "value", None)
        self._held.value = None
        if value is None:
            raise AcmError(
                "a linear of the site ran without the first one just before",
                where=site,
                expected="each run of the first linear to be followed by one of every other, in the same thread",
                fix="exclude this site from the plan",
            )
        return value


Forward = Callable[[Any, Tensor], Tensor]


def _leaf(forward: Forward) -> Forward:
    """`forward` of a module that symbolic traces by `torch.fx` do not enter, as they do not enter ACMs."""

    @wraps(forward)
    def run(self: nn.Module, input: Tensor) -> Tensor:
        return fx_node(self, input) if isinstance(input, Proxy) else forward(self, input)

    return run


def dummy(x: Tensor, width: int) -> Tensor:
    """A hidden value nobody reads: zeros [..., width], fresh, so that operations in place may write to it."""
    return x.new_zeros(*x.shape[:-1], width)


class PassThrough(nn.Module):
    """Stand-in for a module that tiles a site's region: hands its input on to the ACM."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def forward(self, input: Tensor) -> Tensor:
        return input

    def extra_repr(self) -> str:
        return f"to {self.site}"


class StashInput(nn.Module):
    """Stand-in for a site's first linear: keeps x for the ACM and hands on a dummy of the hidden width."""

    def __init__(self, site: str, *, stash: Stash | None, width: int) -> None:
        super().__init__()
        self.site, self.stash, self.width = site, stash, width

    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        if self.stash is not None:
            self.stash.put(input)
        return dummy(input, self.width)

    def extra_repr(self) -> str:
        return f"to {self.site}"


class StashedACM(ACM):
    """An ACM in the place of a site's last linear: runs on the stashed x, and only looks at the shape it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stash = Stash()

    @_leaf
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.stash.take(self.name))
        return y if y.shape[:-1] == x.shape[:-1] else y.reshape(*x.shape[:-1], y.shape[-1])


class PackedACM(ACM):
    """An ACM in the place of the first of several projections: gives its part of the output, and keeps the others'."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stashes: list[Stash] = []
        self.widths: list[int] = []

    @_leaf
    def forward(self, x: Tensor) -> Tensor:
        own, *others = super().forward(x).split(self.widths, -1)
        for stash, part in zip(self.stashes, others, strict=True):
            stash.put((x, part))
        return own


class PackedPart(nn.Module):
    """Stand-in for another of these projections: hands on its part of what the ACM gave for the same tokens."""

    def __init__(self, site: str, *, stash: Stash) -> None:
        super().__init__()
        self.site, self.stash = site, stash

    @_leaf
    def forward(self, input: Tensor) -> Tensor:
        x, part = self.stash.take(self.site)
        if input is not x:
            raise AcmError(
                "projections that one ACM computes were given different tokens",
                where=self.site,
                expected="the very tensor that the first of them was given",
                fix="plan this site without pack",
            )
        return part

    def extra_repr(self) -> str:
        return f"of {self.site}"


def acm_class(site: Site) -> type[ACM]:
    """The class of the ACM that `site.graft` puts into a live model."""
    if site.graft.kind == "P":
        return PackedACM
    return StashedACM if site.graft.kind in ("S", "R") and site.last is not None else ACM


Rows = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Use:
    """Use of `rows` of a parameter by a site: `part` of its first linears or of its last one.

    A linear site's only matrix is its last: the ACM runs at once.
    """

    acm: ACM
    stash: Stash | None
    part: Literal["first", "last"]
    rows: Rows


@dataclass(slots=True, kw_only=True)
class Replaced:
    """A parameter whose place is taken: its name, the axis of its outputs, and what its rows are used for.

    `owner` holds the parameter itself, as `leaf`, where some of its rows stay dense; else it is None.
    """

    name: str
    out_axis: int
    uses: list[Use] = field(default_factory=list)
    owner: nn.Module | None = None
    leaf: str = ""

    def use_of(self, rows: Rows) -> Use | None:
        """The use that `rows` belong to; None for rows that stay dense."""
        return next((use for use in self.uses if rows[0] < use.rows[1] and use.rows[0] < rows[1]), None)

    def misused(self, how: str) -> AcmError:
        """The error for a call that no ACM can run."""
        return AcmError(
            f"{self.name} was replaced by an ACM, but the model uses it in a way that its plan does not show",
            where=self.uses[0].acm.name,
            found=how,
            fix="exclude this site from the plan",
        )

    def tensor(self) -> Tensor:
        """The parameter itself."""
        if self.owner is None:
            raise self.misused("rows outside its sites")
        held = self.owner._parameters.get(self.leaf)
        return self.owner._buffers[self.leaf] if held is None else held  # type: ignore[return-value]
