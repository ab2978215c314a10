"""Measuring: turns and ratios, the check of answers, break-even, and the verb."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import warn_once_cache

from acm_compiler.errors import UsageError, VerificationFailed
from acm_compiler.evaluation import bench as turns
from acm_compiler.evaluation.bench import BASE, Contest, Row, break_even, check_answers, measure_model
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable
from acm_compiler.planning.plan import Plan
from acm_compiler.runs.opened import open_saved_run
from acm_compiler.runtime.budgets import parse_budget
from acm_compiler.runtime.control import set_budget
from tests.backend.test_backend import Cached
from tests.helpers.build import planned_site, stack_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ticking(monkeypatch):
    """A clock that only moves when a call says so."""
    now = [0.0]
    monkeypatch.setattr(turns, "clock", lambda device: ("test", lambda: now[0]))

    def takes(seconds):
        def call():
            now[0] += seconds

        return call

    return takes


def test_ratios_are_to_the_base_in_the_same_round(ticking):
    calls = {"base": ticking(0.02), "half": ticking(0.01), "double": ticking(0.04)}
    found = turns.interleave(calls, base="base", rounds=3)
    assert found["half"].ratio == pytest.approx(0.5) and found["double"].ratio == pytest.approx(2)
    assert found["base"].ratio == 1 and found["half"].time_ms == pytest.approx(10)


def test_a_time_on_an_accelerator_ends_when_the_device_is_done(monkeypatch):
    now, given = [0.0], []
    monkeypatch.setattr(turns, "clock", lambda device: ("test", lambda: now[0]))

    def finish(device):
        assert device == torch.device("cuda:1")
        now[0] += len(given)
        given.clear()

    monkeypatch.setattr(torch.accelerator, "synchronize", finish)
    calls = {"base": lambda: given.append(1), "twice": lambda: given.extend((1, 1))}
    found = turns.interleave(calls, base="base", rounds=3, device="cuda:1")
    assert found["twice"].ratio == 2 and found["base"].time_ms == 1000


def test_the_wall_clock_is_read_for_an_accelerator_whatever_the_threads():
    assert turns.clock("cuda:0")[0] == "wall time"


def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(UsageError, match=r"no such device here .*found 'cuda:99', expected cpu"):
        open_saved_run(tmp_path, device="cuda:99")


def test_a_machine_that_slows_down_does_not_change_ratios(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(turns, "clock", lambda device: ("test", lambda: now[0]))

    def call():
        now[0] += 0.01 * (1 + now[0])

    found = turns.interleave({"base": call, "same": call}, base="base", rounds=41)
    assert now[0] > 1
    assert found["same"].ratio == pytest.approx(1, abs=1e-3)


def row(
    batch: int, ratio: float, budget: float = 0.25, contender: str = "acm compiled", q3: float | None = None
) -> Row:
    return Row(
        batch=batch,
        budget=budget,
        contender=contender,
        time_ms=1.0,
        ratio=ratio,
        ratio_q1=ratio,
        ratio_q3=ratio if q3 is None else q3,
        mac_ratio=0.4,
        error=None,
    )


def test_break_even_is_the_batch_from_which_on_it_is_faster():
    rows = [row(1, 1.4), row(2, 0.9), row(8, 1.1), row(16, 0.8), row(64, 0.5), row(1, 0.1, 0.5), row(1, 0.2, 0.25, "x")]
    assert break_even(rows, 0.25) == 16
    assert break_even(rows, 0.5) == 1
    assert break_even([row(1, 1.4), row(64, 1.2)], 0.25) is None
    assert break_even([row(8, 0.98, q3=1.02), row(64, 0.9)], 0.25) == 64


@pytest.fixture
def contest():
    torch._dynamo.reset()
    converted, dense = stack_of(planned_site("a"), planned_site("b", k_min=1)), torch.nn.Linear(8, 8)
    points = (BudgetPoint(share=0.2, knob=3.0, k_lo=0), BudgetPoint(share=1.0, knob=-3.0, k_lo=0))
    converted.acms[0].conversion.table = BudgetTable(rule="logits", points=points, examples=1)
    return Contest.of(dense, converted, lambda output: output)


def test_rows_hold_every_contender_at_every_budget(contest):
    x = torch.randn(3, 5, 8)
    assert check_answers(contest, x) < 1e-6
    rows = measure_model(contest, [(3, x)], budgets=(0.5, 1.0), rounds=2)
    names = [(row.contender, row.budget) for row in rows]
    assert names[:2] == [(BASE, None), ("dense eager", None)]
    assert [name for name in names if name[1] == 1.0] == [("acm eager", 1.0), ("acm compiled", 1.0)]
    assert all(row.time_ms > 0 and row.ratio_q1 <= row.ratio <= row.ratio_q3 for row in rows)
    whole = next(row for row in rows if row.budget == 1.0)
    set_budget(contest.converted, 1.0)
    assert whole.mac_ratio > next(row for row in rows if row.budget == 0.5).mac_ratio


@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, float("-inf")])
def test_a_wrong_output_shows_beside_what_a_model_never_predicts(contest, masked):
    never = torch.tensor([0])
    contest = replace(contest, compiled=contest.converted, answer=lambda y: y.index_fill(-1, never, masked))
    x = torch.randn(3, 5, 8)
    assert check_answers(contest, x) == 0
    with pytest.raises(VerificationFailed, match=r"k = 0.*relative error 1\.0e-02"):
        check_answers(replace(contest, compiled=lambda x: 1.01 * contest.converted(x)), x)


def test_a_model_in_float64_is_compared(contest):
    contest.converted.double()
    assert check_answers(replace(contest, compiled=contest.converted), torch.randn(3, 5, 8).double()) == 0


@pytest.mark.parametrize(
    "measure",
    [check_answers, lambda contest, x: measure_model(contest, [(3, x)], budgets=(1.0,), rounds=2)],
    ids=["answers", "times"],
)
def test_measuring_keeps_to_itself_what_dynamo_says_of_a_librarys_cache(contest, measure):
    warn_once_cache.clear()  # Dynamo says it once in a process
    model = Cached(contest.converted).eval()
    cached = replace(contest, converted=model, compiled=torch.compile(model, backend="acm", dynamic=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measure(cached, torch.randn(3, 5, 8))
    said = [str(warning.message) for warning in caught]
    assert "of the model itself" in said and not [text for text in said if "lru_cache" in text]


class ReadsWeights(torch.nn.Module):
    """Looks at the weight and bias of a linear that it also calls, as models do to find a type or a device."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.to(self.inner.weight)) + self.inner.bias


ENCODER_LAYER = dict(d_model=8, nhead=2, dim_feedforward=16, batch_first=True, dropout=0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.TransformerEncoderLayer(**ENCODER_LAYER),
        lambda: torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(**ENCODER_LAYER), 1),
        ReadsWeights,
    ],
    ids=["encoder layer", "encoder", "reader"],
)
def test_the_int8_model_runs_in_int8_where_weights_are_read_and_not_only_called(make):
    torch.manual_seed(0)
    dense, x = make().eval(), torch.randn(3, 5, 8)
    inputs = (x, None, torch.arange(5) >= torch.tensor([[5], [4], [3]])) if hasattr(dense, "layers") else (x,)
    quantized = turns.int8(dense)
    with torch.no_grad(), torch.profiler.profile() as profile:
        seen = quantized(*inputs)
    with torch.no_grad():
        expected = dense(*inputs)
    held = inputs[2].logical_not() if len(inputs) > 1 else slice(None)
    assert torch.allclose(seen[held], expected[held], atol=0.1) and not torch.equal(seen[held], expected[held])
    assert any("linear_dynamic" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_there_is_no_int8_model_of_one_that_is_not_in_float32(dtype):
    assert turns.int8(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8).to(dtype))) is None


def test_wrong_answers_are_no_contest(contest):
    wrong = torch.nn.Module()
    wrong.forward = lambda x: contest.converted(x) * 1.001
    with pytest.raises(VerificationFailed, match="k = 0"):
        check_answers(replace(contest, compiled=wrong), torch.randn(3, 5, 8))
    assert VerificationFailed.exit_code == 5


def test_int8_learners_may_be_rounded_otherwise_and_no_more(contest):
    contest.converted.acms[0].conversion.quantized = "int8"
    x, other = torch.randn(3, 5, 8), torch.nn.Module()
    other.forward = lambda x: contest.converted(x) * 1.001
    assert 9e-4 < check_answers(replace(contest, compiled=other), x) < 2e-3
    other.forward = lambda x: contest.converted(x) * 1.02
    with pytest.raises(VerificationFailed, match="at most 1e-02"):
        check_answers(replace(contest, compiled=other), x)


def acmc(*arguments: str) -> str:
    command = [sys.executable, "-m", "acm_compiler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_saved_run_is_explained_and_measured(tmp_path):
    sizes = ["data.train.count=200", "data.eval.count=450", "schedule[0].tokens=2000"]
    settings = [word for size in sizes for word in ("--set", size)]
    acmc("rewrite", "--recipe", "digits_vit", "--out", str(tmp_path / "run"), *settings)
    said = json.loads(acmc("explain", str(tmp_path / "run"), "--json"))
    assert said["graphs"] == 1 and len(said["sites"]) == 20
    assert {site["implementation"] for site in said["sites"]} == {"cpu"}
    assert {"x.size(1) == 3", "x.size(0) < 16"} <= {condition["expression"] for condition in said["conditions"]}
    options = ["--budgets", ".5,80%,1", "--batches", "2,4", "--rounds", "2", "--json"]
    measured = json.loads(acmc("bench", str(tmp_path / "run"), *options))
    assert {"versions", "device", "rows", "break_even_batch"} <= measured.keys()
    keys = {"batch", "budget", "contender", "time_ms", "ratio", "ratio_q1", "ratio_q3", "mac_ratio", "error"}
    assert all(set(row) == keys for row in measured["rows"])
    assert {row["batch"] for row in measured["rows"]} == {2, 4}
    plan = Plan.from_json((tmp_path / "run/plan.json").read_text())
    assert {row["budget"] for row in measured["rows"]} == {None, 0.5, 1.0, parse_budget("80%", plan)}
