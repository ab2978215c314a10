"""Parts of a command in processes of their own, each within its time; what they found, and what was wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tabulate import tabulate

from acm_compiler.files import whole_file
from benchmarks.first_gpu_run.parts import PARTS, Part, Row, rows_of, write_row

GRACE_S, LEAST_S = 15, 10
SLOWER = 5  # limits of a dry run: a CPU compiles more and interprets
MOST_ROWS = 80  # of a part whose rows are only right or wrong
_SAME = ("card", "torch", "triton", "code")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One command's run."""

    command: str
    out: Path
    dry: bool
    minutes: float

    @property
    def rows(self) -> Path:
        """The file of rows; of the present run alone."""
        return self.out / f"{self.command}.jsonl"

    def all_of(self, parts: Sequence[Part]) -> int:
        """Run the parts; 0, or 1 where an output was wrong or a part broke."""
        end = time.monotonic() + 60 * self.minutes
        self.out.mkdir(parents=True, exist_ok=True)
        for path in (self.rows, self.out / f"{self.command}.log"):
            path.unlink(missing_ok=True)
        for _, group in groupby(enumerate(parts), lambda pair: -1 if pair[1].beside and not self.dry else pair[0]):
            together = [part for _, part in group]
            with ThreadPoolExecutor(len(together)) as pool:
                list(pool.map(lambda part: self._finish(part, end), together))
        rows = rows_of(self.rows)
        faults = faults_of(rows)
        unfinished = [f"{row['part']} {row['ended']}" for row in rows if row.get("ended", "finished") != "finished"]
        verdict = "; ".join(dict.fromkeys([*faults, *unfinished])) or "nothing wrong"
        write_row(self.rows, {"verdict": verdict, "dry": self.dry})
        text = f"{tables(rows)}\n\n{self.command}: {verdict}"
        with whole_file(self.out / f"{self.command}.txt") as path:
            path.write_text(text + "\n", encoding="utf-8")
        print(text)
        return 1 if faults else 0

    def _finish(self, part: Part, end: float) -> None:
        """Run one part, if there is time, and write how it ended."""
        left = end - time.monotonic()
        ended: Row = {"ended": "not run: out of time"} if left < LEAST_S else self._run(part, left)
        write_row(self.rows, {"part": part.name, **ended})
        print(f"{self.command} {part.name}: {ended['ended']}", flush=True)

    def _run(self, part: Part, left: float) -> Row:
        """Run one part in a process of its own; how it ended."""
        from benchmarks.first_gpu_run.device import clocks

        limit = min(part.seconds * (SLOWER if self.dry else 1), left)
        started, before = time.monotonic(), clocks()
        with (self.out / f"{self.command}.log").open("ab") as log:
            log.write(f"\n== {part.name}\n".encode())
            log.flush()
            count = min(part.processes, 2) if self.dry else part.processes
            commands = [[*self._command_of(part, limit), "--share", str(own), str(count)] for own in range(count)]
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            processes = [subprocess.Popen(command, start_new_session=True, **streams) for command in commands]
            try:
                end = started + min(limit + GRACE_S, left)
                statuses = [process.wait(max(0.01, end - time.monotonic())) for process in processes]
                bad = [str(status) for status in statuses if status]
                ended = f"broke: exit status {', '.join(bad)}, see the log" if bad else "finished"
            except subprocess.TimeoutExpired:
                ended = f"killed at its limit of {limit:.0f} s"
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        spent = round(time.monotonic() - started, 1)
        return {"ended": ended, "seconds": spent, "clocks before": before, "clocks after": clocks()}

    def _command_of(self, part: Part, seconds: float) -> list[str]:
        module = [sys.executable, "-m", "benchmarks.first_gpu_run", self.command, "--part", part.name]
        options = ["--rows", str(self.rows), "--seconds", f"{seconds:.0f}"]
        return [*module, *options, *(["--dry"] if self.dry else [])]


def faults_of(rows: Sequence[Row]) -> list[str]:
    """Reasons why something is wrong: outputs, parts that broke."""
    faults = []
    for name in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == name]
        if wrong := sum(row.get("fine") is False for row in mine):
            faults.append(f"{wrong} of {sum('fine' in row for row in mine)} outputs wrong in {name}")
        faults += [f"{name} {row['ended']}" for row in mine if row.get("ended", "").startswith("broke")]
    return faults


def why_no_time_counts(out: Path, *, dry: bool) -> str | None:
    """Reason why correctness has not passed in that folder with this card, these versions and this code, or None."""
    from benchmarks.first_gpu_run.device import Device

    rows = rows_of(out / "correctness.jsonl")
    if not rows:
        return f"run correctness first: there is no {out / 'correctness.jsonl'}"
    finished = {row["part"] for row in rows if row.get("ended") == "finished"}
    if lacking := [part.name for part in PARTS["correctness"] if part.vital and part.name not in finished]:
        return f"correctness has not finished: {', '.join(lacking)}"
    if faults := faults_of([row for row in rows if "part" in row]):
        return f"correctness has failed: {'; '.join(faults)}"
    was, now = next(row for row in rows if "card" in row), Device("cpu" if dry else "cuda").facts()
    other = [f"{name} {was[name]}, now {now[name]}" for name in _SAME if was[name] != now[name]]
    return f"correctness has passed with other things: {'; '.join(other)}" if other else None


def tables(rows: Sequence[Row]) -> str:
    """All rows as a table for each part, under its facts and how it ended."""
    pages = []
    for name in dict.fromkeys(row["part"] for row in rows):
        mine = [{key: value for key, value in row.items() if key != "part"} for row in rows if row["part"] == name]
        facts = [row for row in mine if "card" in row or "ended" in row or "stopped" in row]
        found = [row for row in mine if row not in facts]
        about = "\n".join(", ".join(f"{key} {value}" for key, value in row.items() if value) for row in facts)
        if len(found) > MOST_ROWS and all("fine" in row for row in found):
            about += f"\n{sum(row['fine'] for row in found)} of {len(found)} fine; the others:"
            found = [row for row in found if not row["fine"]]
        pages.append(f"{name}\n{about}\n{tabulate(found, headers='keys', floatfmt='.4g')}")
    return "\n\n".join(pages)
