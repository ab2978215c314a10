"""One run of a site in the captured graph, and look-alikes with the reason why they are none."""

from __future__ import annotations

from dataclasses import dataclass

from acm_compiler.site import LinearRef, Role, SiteKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The values between a site's input and its output during one run.

    `x` is what its first linears read and `output` what its last linear gives; `nodes` are the captured nodes that
    compute the output from x, without x itself. `linears`: the value names of its linears, in the order of
    `first` + (`last`,). `own_bias`: a bias that the model computes is added to the output, and stays the model's.
    """

    kind: SiteKind
    role: Role | None = None
    x: str
    output: str
    linears: tuple[str, ...]
    first: tuple[LinearRef, ...]
    last: LinearRef | None
    act: str
    nodes: frozenset[str]
    d_in: int
    d_out: int
    dense_width: int | None
    tokens: int
    own_bias: bool = False

    @property
    def refs(self) -> tuple[LinearRef, ...]:
        """All of its matrices."""
        return self.first if self.last is None else (*self.first, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookAlike:
    """Linears that look like a site and are none, the last of them naming the skip."""

    linears: tuple[str, ...]
    reason: str
