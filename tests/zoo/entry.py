"""One model of the zoo and the truth about it.

A truth is a text, one line per site or group of sites:

    in encoder.layer.#                                       a prefix for the lines that follow; `in ~` ends it
    q,k,v attention.self.{query,key,value}    : 32 32        a line per brace, the roles go along with the last one
    o     attention.output.dense              : 32 32        output projections and MLPs have a bypass
    mlp   intermediate.dense > output.dense   : 32 64 32     first linear > last linear : input, hidden, output
    gated mlp.gate*mlp.up > mlp.down          : 32 64 32     activated branch * multiplied branch
    gated mlp.up[64:128]*mlp.up[0:64] > mlp.down : 32 64 32  both branches in one matrix
    o     attn.proj                           : 32 32 normed a norm lies between the site and its bypass
    mlp   fc1 > fc2                           : 32 64 32 none x3     no bypass; called three times

`#` stands for the block number. A linear is named by its module, or by its parameter where it has none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from acm_compiler.site import LinearRef, Site

Inputs = Tensor | tuple[Any, ...] | dict[str, Any]
Build = Callable[[], tuple[nn.Module, Inputs]]
_BYPASSED = ("mlp", "gated", "o")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueSite:
    """One site as the model's source has it; `what` is mlp, gated, or the role of a projection."""

    what: str
    first: tuple[str, ...]
    last: str | None
    widths: tuple[int, ...]
    bypass: str
    calls: int = 1

    def __str__(self) -> str:
        matrices = " * ".join(self.first) + (f" > {self.last}" if self.last else "")
        calls = f" x{self.calls}" if self.calls > 1 else ""
        return f"{self.what} {matrices} : {' '.join(map(str, self.widths))} {self.bypass}{calls}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model of the zoo.

    `skips`: the beginning of the reason why what matches a glob stays dense, where that is worth stating.
    `uncounted`: why FlopCounterMode does not count this model, or counts it otherwise.
    """

    name: str
    build: Build
    truth: str
    blocks: int = 2
    skips: Mapping[str, str] = field(default_factory=dict)
    uncounted: str | None = None

    @property
    def sites(self) -> tuple[TrueSite, ...]:
        """The truth, line by line and block by block."""
        return tuple(_read(self.truth, self.blocks))


def found_site(site: Site) -> TrueSite:
    """A site that was found, in the words of the truth."""
    bypass = ("normed" if site.residual_norm else "bypass") if site.residual else "none"
    widths = (site.d_in, site.d_out) if site.dense_width is None else (site.d_in, site.dense_width, site.d_out)
    return TrueSite(
        what={"mlp": "mlp", "gated_mlp": "gated"}.get(site.kind, site.role or "?"),
        first=tuple(_told(ref) for ref in site.first),
        last=None if site.last is None else _told(site.last),
        widths=widths,
        bypass=bypass,
        calls=site.calls,
    )


def _told(ref: LinearRef) -> str:
    rows = "" if ref.rows is None else f"[{ref.rows[0]}:{ref.rows[1]}]"
    return ref.weight.removesuffix(".weight") + rows


def _read(text: str, blocks: int) -> Iterator[TrueSite]:
    prefix = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("in "):
            prefix = line.removeprefix("in ").strip()
            prefix = "" if prefix == "~" else f"{prefix}."
            continue
        kinds, _, rest = line.partition(" ")
        matrices, _, facts = rest.partition(":") if "[" not in rest else _split_facts(rest)
        names = [part.strip() for part in re.split(r"[*>]", matrices)]
        paths = [f"{prefix}{name}" for name in names]
        numbers = range(blocks) if any("#" in path for path in paths) else range(1)
        for number in numbers:
            yield from _sites(kinds.split(","), [p.replace("#", str(number)) for p in paths], facts, ">" in matrices)


def _split_facts(rest: str) -> tuple[str, str, str]:
    """Matrices may have rows, `name[0:8]`; the facts begin after the last colon."""
    return rest.rpartition(":")


def _sites(kinds: list[str], paths: list[str], facts: str, has_last: bool) -> Iterator[TrueSite]:
    words = facts.split()
    widths = tuple(int(word) for word in words if word.isdigit())
    calls = next((int(word[1:]) for word in words if re.fullmatch(r"x\d+", word)), 1)
    given = next((word for word in words if word in ("bypass", "normed", "none")), None)
    for number, expanded in enumerate(_expanded(paths)):
        what = kinds[number % len(kinds)]
        yield TrueSite(
            what=what,
            first=tuple(expanded[:-1] if has_last else expanded),
            last=expanded[-1] if has_last else None,
            widths=widths,
            bypass=given or ("bypass" if what in _BYPASSED else "none"),
            calls=calls,
        )


def _expanded(paths: list[str]) -> Iterator[list[str]]:
    """All paths with one choice from each of their braces; equal braces choose alike."""
    groups = list(dict.fromkeys(group for path in paths for group in re.findall(r"\{[^}]*\}", path)))
    for choice in itertools.product(*(group[1:-1].split(",") for group in groups)):
        chosen = list(paths)
        for group, text in zip(groups, choice, strict=True):
            chosen = [path.replace(group, text) for path in chosen]
        yield chosen
