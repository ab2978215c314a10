"""The commands of `benchmarks.first_gpu_run`: dry runs, parts that hang or break, and when no time counts."""

import json
import re
import sys
from itertools import product

import pytest
import torch

from acm_compiler.acm.arguments import GateArguments
from acm_compiler.codegen.gpu.ahead.build import build
from acm_compiler.codegen.gpu.stages import machine_of_arch
from acm_compiler.codegen.gpu.tiles import tile_of
from benchmarks.first_gpu_run import d2dmoe, runner, wheels
from benchmarks.first_gpu_run.__main__ import main
from benchmarks.first_gpu_run.contenders import MLPS, Site
from benchmarks.first_gpu_run.device import Device, race
from benchmarks.first_gpu_run.parts import PARTS, Part, rows_of, write_row
from benchmarks.first_gpu_run.runner import Run, faults_of, why_no_time_counts
from benchmarks.first_gpu_run.sanitizer import outcome_of, verdict_of
from benchmarks.first_gpu_run.speed import straight_line
from tests.helpers.kernel_cases import Case, to, weights_of

WRITES_A_ROW = "import sys, json; open(sys.argv[1], 'a').write(json.dumps({'part': sys.argv[2], 'us': 1.5}) + '\\n'); "
SCRIPTS = {"hangs": "import time; time.sleep(60)", "breaks": "sys.exit(3)", "ends": "print('said')", "late": "1"}


class Scripted(Run):
    """A run whose parts are small scripts."""

    def _command_of(self, part, seconds):
        return [sys.executable, "-c", WRITES_A_ROW + SCRIPTS[part.name], str(self.rows), part.name]


def parts_of(*names, seconds=1):
    return [Part(name=name, run="", seconds=seconds) for name in names]


def test_a_part_that_hangs_or_breaks_takes_no_row_and_no_other_part_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "GRACE_S", 0)
    monkeypatch.setattr(runner, "LEAST_S", 0)
    run = Scripted(command="speed", out=tmp_path, dry=False, minutes=1)
    assert run.all_of(parts_of("hangs", "breaks", "ends")) == 1
    rows = rows_of(run.rows)
    assert [row["part"] for row in rows if row.get("us") == 1.5] == ["hangs", "breaks", "ends"]
    ended = {row["part"]: row["ended"] for row in rows if "ended" in row}
    hung, broke = "killed at its limit of 1 s", "broke: exit status 3, see the log"
    assert ended == {"hangs": hung, "breaks": broke, "ends": "finished"}
    verdict = f"breaks {broke}; hangs {hung}"
    assert rows[-1]["verdict"] == verdict and verdict in capsys.readouterr().out
    assert "said" in (tmp_path / "speed.log").read_text() and "1.5" in (tmp_path / "speed.txt").read_text()


def test_one_process_of_several_that_dies_of_a_signal_is_told(tmp_path, monkeypatch):
    script = "import os, sys; os.kill(os.getpid(), 11) if sys.argv[-2:] == ['1', '3'] else None"
    monkeypatch.setitem(SCRIPTS, "three", script)
    run = Scripted(command="speed", out=tmp_path, dry=False, minutes=1)
    assert run.all_of([Part(name="three", run="", seconds=20, processes=3)]) == 1
    rows = rows_of(run.rows)
    assert sum(row.get("us") == 1.5 for row in rows) == 3
    assert rows[-2]["ended"] == "broke: exit status -11, see the log"


def test_parts_without_time_left_are_named(tmp_path, capsys):
    run = Scripted(command="speed", out=tmp_path, dry=True, minutes=0)
    assert run.all_of(parts_of("ends", "late")) == 0
    assert [row["ended"] for row in rows_of(run.rows)[:-1]] == ["not run: out of time"] * 2
    assert "late not run: out of time" in capsys.readouterr().out


def passed(out, **changes):
    """Rows of a correctness run that passed on this machine, in a dry run, but for `changes` of its facts."""
    for part in PARTS["correctness"]:
        write_row(out / "correctness.jsonl", {"part": part.name, **Device("cpu").facts(), **changes})
        write_row(out / "correctness.jsonl", {"part": part.name, "token": 1e-3, "fine": True})
        write_row(out / "correctness.jsonl", {"part": part.name, "ended": "finished"})
    write_row(out / "correctness.jsonl", {"verdict": "nothing wrong"})


def test_times_count_only_after_correctness_of_the_same_card_versions_and_code(tmp_path, monkeypatch, capsys):
    assert "run correctness first" in why_no_time_counts(tmp_path, dry=True)
    passed(tmp_path)
    assert why_no_time_counts(tmp_path, dry=True) is None
    write_row(tmp_path / "correctness.jsonl", {"part": "nan", "fine": False})
    assert "1 of 2 outputs wrong in nan" in why_no_time_counts(tmp_path, dry=True)
    monkeypatch.setattr(sys, "argv", ["first_gpu_run", "speed", "--dry", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "--anyway measures all the same" in capsys.readouterr().err
    (tmp_path / "correctness.jsonl").unlink()
    passed(tmp_path, code="another")
    assert "passed with other things: code another" in why_no_time_counts(tmp_path, dry=True)
    lines = (tmp_path / "correctness.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line).get("part") != "answers"]
    (tmp_path / "correctness.jsonl").write_text("\n".join(kept))
    assert why_no_time_counts(tmp_path, dry=True) == "correctness has not finished: answers"


def test_a_line_that_a_killed_process_left_unfinished_is_left_out(tmp_path):
    (tmp_path / "rows").write_text('{"us": 1}\n{"us": ')
    assert rows_of(tmp_path / "rows") == [{"us": 1}]


def test_lines_of_pytest_are_read_from_one_process_or_several():
    line = "tests/codegen/test_gpu.py::test_a[top 7-bf16] "
    name = "test_a[top 7-bf16]"
    assert outcome_of(line + "PASSED [ 12%]\n") == {"test": name, "outcome": "PASSED", "fine": True}
    assert outcome_of(f"[gw3] [ 99%] FAILED {line}\n") == {"test": name, "outcome": "FAILED", "fine": False}
    assert outcome_of(line + "SKIPPED (no CUDA device) [  1%]\n")["fine"]
    assert outcome_of("collected 7 items") is None


SANITIZED = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at {}+0x1230 in launch.py:12
=========     by thread (3,0,0) in block (1,0,0)
========= ERROR SUMMARY: 1 error
"""


def test_errors_in_our_kernels_are_told_from_others():
    assert verdict_of(SANITIZED.format("layer2_kernel")) == {"errors": 1, "kernels": ["layer2_kernel"], "fine": False}
    other = verdict_of(SANITIZED.format("void at::native::vectorized_elementwise"))
    assert other == {"errors": 1, "kernels": ["at::native::vectorized_elementwise"], "fine": True}
    assert "refused" in verdict_of("Device not supported")


def test_a_straight_line_is_found():
    x = torch.linspace(0, 1, 9, dtype=torch.float64)
    fit = straight_line(x, 0.25 + 2 * x)
    assert fit == pytest.approx({"slope": 2, "intercept": 0.25, "r2": 1, "worst": 0})
    assert straight_line(x, x**2)["r2"] < 0.95


def test_a_contender_that_is_refused_leaves_the_others_their_ratios():
    def refuse():
        raise NotImplementedError("no such product here\nat all")

    device = Device("cpu")
    rows = race({"dense": lambda: torch.ones(3), "none": refuse, "ours": lambda: torch.ones(3)}, 2, device)
    assert [row["contender"] for row in rows] == ["dense", "ours", "none"]
    assert rows[0]["ratio"] == 1 and rows[1]["ratio"] > 0 and rows[2]["refused"] == "no such product here"


def test_wheels_are_fetched_of_what_a_machine_with_torch_lacks(tmp_path):
    wanted = wheels.requirements()
    assert any(text.startswith("pydantic") for text in wanted) and not any(text.startswith("torch") for text in wanted)
    command = wheels.download(tmp_path, "3.12", wanted)
    assert "--only-binary=:all:" in command and "3.12" in command


def run(monkeypatch, *arguments):
    """A command's exit status."""
    monkeypatch.setattr(sys, "argv", ["first_gpu_run", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_a_dry_run_of_small_calls_is_correct(tmp_path, monkeypatch, capfd):
    """Its times need a GPU; that everybody computes the same does not."""
    assert run(monkeypatch, "correctness", "--dry", "--parts", "gates", "one_k", "answers", "--out", tmp_path) == 0
    rows = rows_of(tmp_path / "correctness.jsonl")
    of_gates = [row for row in rows if row.get("part") == "gates" and "lost" in row]
    assert {(row["width"], row["tokens"]) for row in of_gates} == set(product((270, 20), (1, 70)))
    of_one_k = {(row["form"], row["tokens"], row["k"]) for row in rows if "graphs" in row}
    assert of_one_k == set(product(("mlp", "gated"), (20, 1), range(5)))
    assert {row.get("contender") for row in rows} >= {"ours", "ours, no gate", "grouped_mm"}
    assert not faults_of(rows[:-1]) and "nothing wrong" in capfd.readouterr().out
    assert "not finished: forms, nan" in why_no_time_counts(tmp_path, dry=True)


def test_what_is_vital_has_time_within_nine_minutes():
    assert sum(part.seconds for part in PARTS["correctness"] if part.vital) <= 9 * 60


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [*zip(d2dmoe.FIRST, d2dmoe.SECOND, strict=True)])
@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "merged"])
def test_experts_of_d2dmoe_are_built_without_spills_and_read_ahead(first, second, atomic):
    shape = MLPS["ViT-B"]
    weights = to(weights_of(Case(width=768, d_in=768, d_out=768, learners=4)), torch.bfloat16)
    x = torch.empty(shape.tokens, shape.d_in, dtype=torch.bfloat16, device="meta")
    gate = GateArguments(x, *[x] * 7)
    site = Site(shape=shape, x=x, weights=weights, gate=gate, machine=machine_of_arch(90))
    for width in (768, d2dmoe.PUBLISHED):
        tiles = {"first": tile_of(first), "second": tile_of(second)}
        experts = d2dmoe.Experts(site=site, width=width, atomic=atomic, **tiles)
        for kernel in experts.built():
            built = build(kernel, "bf16", 90)
            assert built.spills == 0, built
            if kernel.tile is None:
                continue
            assert built.resident >= kernel.tile.resident, built
            assert built.instructions["HGMMA"] and built.instructions["UTMALDG"], built
            assert built.instructions["WARPGROUP"] <= built.instructions["HGMMA"], built
            adds = re.findall(r"atom\.global[\w.]*\.v8\.bf16", built.ptx)
            assert bool(adds) == (atomic and kernel.name == "expert2")


@pytest.mark.slow
def test_all_parts_run_dry(tmp_path, monkeypatch, capfd):
    for command, parts in PARTS.items():
        assert run(monkeypatch, command, "--dry", "--out", tmp_path, "--minutes", 30) == 0, capfd.readouterr().out
        rows = rows_of(tmp_path / f"{command}.jsonl")
        assert {row["part"] for row in rows if row.get("ended") == "finished"} == {part.name for part in parts}
        assert all(sum(row.get("part") == part.name for row in rows) > 2 for part in parts)
