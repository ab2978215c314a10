"""Measured times of sites: rows that `benchmarks/first_gpu_run` left, for one device, in place of expected times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acm_compiler.files import parse_json

if TYPE_CHECKING:
    from acm_compiler.planning.decisions import PlannedSite

MEASURED = Path("runs") / "first_gpu_run" / "speed.jsonl"
"""Rows of `python -m benchmarks.first_gpu_run speed`, in the folder where a command is started."""
_DENSE = ("dense, eager", "dense, Inductor max-autotune")  # the whole site; others are told less or do less
Key = tuple[str, int, int, int, int, int]


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
