"""Times of sites on a GPU, dense and as ACMs: expected ones, or those of rows that `benchmarks/first_gpu_run` left.

Expected ones are a roofline whose rates were measured on an H100 (docs/gpu.md). A launch takes a time of its own and
the longer of two more: of its products at the device's rate, in whole waves of tiles, and of its operands through
memory. Products are bfloat16; launches follow each other as in a CUDA graph, and find nothing in the cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from acm_compiler.errors import UsageError, did_you_mean
from acm_compiler.files import parse_json

if TYPE_CHECKING:
    from acm_compiler.planning.decisions import PlannedSite


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU by its data sheet: bfloat16 FLOPs and bytes of memory per second, multiprocessors.

    takes_turns: large calls run the kernels of `codegen.gpu.turns`.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    processors: int
    takes_turns: bool = True


DEVICES = {
    "a100": Device(name="A100", flops_per_s=312e12, bytes_per_s=2.04e12, processors=108, takes_turns=False),
    "h100": Device(name="H100", flops_per_s=989e12, bytes_per_s=3.35e12, processors=132),
    "h200": Device(name="H200", flops_per_s=989e12, bytes_per_s=4.8e12, processors=132),
}
LAUNCH_S, OUR_LAUNCH_S, ONE_LAUNCH_S = 4e-6, 7e-6, 5e-6
"""Expected times of a launch by itself, of torch's kernels, of these, and of those for one token."""
DENSE_RATE, OUR_RATE, TURNS_RATE, MEMORY_RATE = 0.75, 0.65, 0.75, 0.75
"""Shares of the data sheet's rates that dense products, these kernels (also where groups of warps take turns) and
memory are expected to reach.
"""
MEASURED = Path("runs") / "first_gpu_run" / "speed.jsonl"
"""Rows of `python -m benchmarks.first_gpu_run speed`, in the folder where a command is started."""
_DENSE = ("dense, eager", "dense, Inductor max-autotune")  # the whole site; others are told less or do less
Key = tuple[str, int, int, int, int, int]
_BYTES = 2  # of a bfloat16
_TILES, _FEWEST = (128, 64), 16  # sides of tiles; rows of the narrowest
_SORTED = 64  # tokens beyond which a launch sorts them and copies their rows in that order
_SUM_S = 2e-6  # seconds that adding up parts takes where few tokens have a second layer that is split
_SHORT_BYTES = 256 << 10  # of a program, up to which it is not
_SPLIT = 1 << 18  # elements of a gate's first weight from which on a second launch adds up its parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTime:
    """One site's seconds per forward of the example inputs: dense, and as an ACM at each share of its learners.

    is_measured: they were measured, on that device and for that shape.
    """

    site: PlannedSite
    dense_s: float
    acm_s: tuple[float, ...]
    is_measured: bool = False

    def as_json(self) -> dict[str, object]:
        """The site's name and its times."""
        spent = {"dense_s": self.dense_s, "acm_s": list(self.acm_s), "measured": self.is_measured}
        return {"name": self.site.name} | spent

    @property
    def ratios(self) -> tuple[float, ...]:
        """Shares of the dense time."""
        return tuple(spent / self.dense_s for spent in self.acm_s)


def device_of(name: str) -> Device:
    """The device with that name; UsageError for an unknown one."""
    if name.lower() not in DEVICES:
        expected = " | ".join(DEVICES)
        raise UsageError(f"unknown device{did_you_mean(name, list(DEVICES))}", found=repr(name), expected=expected)
    return DEVICES[name.lower()]


def expected_times(
    sites: Sequence[PlannedSite],
    device: Device,
    shares: Sequence[float],
    measured: dict[Key, MeasuredTime] | None = None,
) -> list[ExpectedTime]:
    """Expected times of all sites that run in the example inputs; shares: of the learners that tokens run.

    measured: times that take their place.
    """
    return [_expected(site, device, shares, measured or {}) for site in sites if site.tokens]


def _expected(
    site: PlannedSite, device: Device, shares: Sequence[float], measured: dict[Key, MeasuredTime]
) -> ExpectedTime:
    found = measured_times(site, measured, shares)
    dense_s, spent = found or (_dense_s(site, device), tuple(acm_s(site, device, share) for share in shares))
    each = tuple(site.calls * one for one in spent)
    return ExpectedTime(site=site, dense_s=site.calls * dense_s, acm_s=each, is_measured=found is not None)


def _dense_s(site: PlannedSite, device: Device) -> float:
    def product_s(columns: int, depth: int) -> float:
        return LAUNCH_S + _product_s(device, DENSE_RATE, site.tokens, columns, depth)

    if site.dense_width is None:
        return product_s(site.d_out, site.d_in)
    gated = site.kind == "gated_mlp"
    passes = [2, 3] if gated else [2]  # over the hidden values, of which a gated activation's second reads two
    between = sum(LAUNCH_S + _copy_s(device, count * site.tokens * site.dense_width) for count in passes)
    return product_s(site.dense_width * (1 + gated), site.d_in) + between + product_s(site.d_out, site.dense_width)


def acm_s(site: PlannedSite, device: Device, share: float) -> float:
    """Expected seconds of one call as an ACM whose tokens run that share of the learners in the mean, at least k_min.

    Of few tokens each is taken to choose by itself: a learner's weights are read unless no token runs it.
    """
    share = max(share, site.k_min / site.learners)
    tokens, hidden = site.tokens, site.learners * site.width
    rate = _our_rate(site, device)
    launches = 2 + (not site.is_sliced) + (site.gate_width * site.d_in >= _SPLIT)
    spent = _product_s(device, OUR_RATE, tokens, site.gate_width, site.d_in)
    if tokens > _SORTED:
        launches += 1
        spent += _copy_s(device, 2 * tokens * site.d_in)
    alone = tokens == 1 and _has_one_second_layer(site)
    spent += launches * (ONE_LAUNCH_S if alone else OUR_LAUNCH_S)
    if site.is_sliced:
        return spent + _product_s(device, OUR_RATE, tokens, site.d_out, site.d_in, share=share)
    if not alone and _is_split(site, hidden, device):
        spent += _SUM_S
    first = hidden * (2 if site.kind == "gated_mlp" else 1)
    spent += _product_s(device, rate, tokens, first, site.d_in, share=share)
    return spent + _product_s(device, rate, tokens, site.d_out, hidden, share=share)


def _our_rate(site: PlannedSite, device: Device) -> float:
    """Share of the device's rate that both layers' products reach: more where tiles enough take turns."""
    tile, narrowest = max(_TILES), min(site.learners * site.width, site.d_out)
    fills = ceil(site.tokens / tile) * ceil(narrowest / tile) >= device.processors
    return TURNS_RATE if device.takes_turns and fills and _has_one_second_layer(site) else OUR_RATE


def _has_one_second_layer(site: PlannedSite) -> bool:
    return site.second_layer in ("shared", "original") and not site.is_sliced


def _is_split(site: PlannedSite, hidden: int, device: Device) -> bool:
    """True if several programs share an inner product of the second layer: of few tokens, few outputs, long sums."""
    rows = next((most for most in (16, 32, 64) if site.tokens <= most), 0)
    columns = max(16, rows // 2)
    fills = 8 * ceil(site.d_out / max(rows, 1)) >= 7 * device.processors
    return rows > 0 and not fills and (rows + columns) * hidden * _BYTES > _SHORT_BYTES


def _product_s(device: Device, rate: float, rows: int, columns: int, depth: int, *, share: float = 1.0) -> float:
    """One product [rows, depth] x [depth, columns], of which so large a share is done; nothing for its launch."""
    if rows <= _SORTED:  # the processors share the depth
        done: float = ceil(rows / _FEWEST) * _FEWEST * columns
    else:
        done = rows * share * columns * min(_waves(rows * share, columns, tile, device) for tile in _TILES)
    touched = 1 - (1 - share) ** rows
    moved = rows * min(depth, columns) + share * rows * max(depth, columns) + columns * depth * touched
    return max(2 * done * depth / (rate * device.flops_per_s), _copy_s(device, moved))


def _copy_s(device: Device, elements: float) -> float:
    """So many elements through memory."""
    return _BYTES * elements / (MEMORY_RATE * device.bytes_per_s)


def _waves(rows: float, columns: int, tile: int, device: Device) -> float:
    """Time of whole waves of tiles over that of the product alone."""
    tiles = ceil(rows / tile) * ceil(columns / tile)
    if not tiles:
        return 1.0
    return ceil(tiles / device.processors) * device.processors * tile * tile / (rows * columns)


def time_table(times: Sequence[ExpectedTime], device: Device, shares: Sequence[float]) -> str:
    """Times by kind and shape, each marked as expected or measured, and the sites that are slower than dense."""
    found, rows = sorted(times, key=_shape), []
    for shape, group in groupby(found, key=_shape):
        same = list(group)
        kind, d_in, d_out, tokens, known = shape
        facts = [kind, len(same), f"{d_in} -> {d_out}", tokens, "measured" if known else "expected"]
        rows.append([*facts, f"{1e6 * same[0].dense_s:.1f}", *(f"{ratio:.2f}" for ratio in same[0].ratios)])
    headers = ["kind", "sites", "shape", "tokens", "times are", "dense us", *(f"at {share:.2f}" for share in shares)]
    title = f"time of each site's ACM over dense on {device.name}, bfloat16; expected: by roofline, not measured there"
    return "\n".join([title, tabulate(rows, headers=headers, disable_numparse=True), *_slower(found, shares)])


def _slower(found: Sequence[ExpectedTime], shares: Sequence[float]) -> list[str]:
    lines = []
    for place, share in enumerate(shares):
        slower = [entry.site.kind for entry in found if entry.ratios[place] >= 1]
        if slower:
            counts = ", ".join(f"{slower.count(kind)} {kind}" for kind in dict.fromkeys(slower))
            lines.append(f"slower than dense at {share:.2f} of the learners: {counts}")
    return lines


def _shape(entry: ExpectedTime) -> tuple[str, int, int, int, bool]:
    site = entry.site
    return site.kind, site.d_in, site.d_out, site.tokens, entry.is_measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """One shape of site: seconds of the best dense one, and seconds as an ACM by the share of its learners, rising."""

    dense_s: float
    acm_s: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float | None:
        """Seconds at a share, by a straight line between its neighbours; None beyond what was measured."""
        shares = [known for known, _ in self.acm_s]
        above = bisect_left(shares, share)
        if above == len(shares) or (above == 0 and shares[0] != share):
            return None
        if shares[above] == share:
            return self.acm_s[above][1]
        (low, before), (high, after) = self.acm_s[above - 1 : above + 1]
        return before + (after - before) * (share - low) / (high - low)


def read_measured(path: Path, card: str) -> dict[Key, MeasuredTime]:
    """Measurements on a device whose name holds `card`; none where there is no such file, or another device."""
    rows = list(_rows(path))
    cards = {row["card"] for row in rows if "card" in row}
    if not cards or not all(card in str(found) for found in cards):
        return {}
    times: dict[Key, dict[float, dict[str, float]]] = {}
    for row in rows:
        if "shape" in row and "us" in row and "k/N" in row:
            of_shape = times.setdefault((*row["shape"], row["tokens"]), {})
            of_shape.setdefault(row["k/N"], {})[row["contender"]] = 1e-6 * row["us"]
    found = {key: _measured(of_shape) for key, of_shape in times.items()}
    return {key: value for key, value in found.items() if value is not None}


def _measured(by_share: dict[float, dict[str, float]]) -> MeasuredTime | None:
    dense = [spent[name] for spent in by_share.values() for name in _DENSE if name in spent]
    acm = tuple((share, spent["ours"]) for share, spent in sorted(by_share.items()) if "ours" in spent)
    return MeasuredTime(dense_s=min(dense), acm_s=acm) if dense and acm else None


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    """The file's rows; one that a killed process left unfinished is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def measured_times(
    site: PlannedSite, measured: dict[Key, MeasuredTime], shares: Sequence[float]
) -> tuple[float, tuple[float, ...]] | None:
    """Dense seconds of one call, and seconds at each share; None unless that very site was measured at all of them."""
    key = (site.learner_form, site.d_in, site.width, site.d_out, site.learners, site.tokens)
    if key not in measured:
        return None
    lowest = site.k_min / site.learners
    spent = [measured[key].at(max(share, lowest)) for share in shares]
    known = tuple(value for value in spent if value is not None)
    return (measured[key].dense_s, known) if len(known) == len(spent) else None
