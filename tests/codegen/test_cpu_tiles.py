"""The native CPU kernel's products of bfloat16 by tile registers (AMX), where the processor has them, and without."""

from dataclasses import replace

import pytest
import torch

from acm_compiler.acm import Gate, ops
from acm_compiler.acm.reference import run_learners
from acm_compiler.codegen import cpu
from acm_compiler.codegen.compare import TOLERANCE, relative_error
from tests.helpers.kernel_cases import (
    FORMS,
    ODD,
    Case,
    inputs_of,
    require_answer,
    require_same_bits_by_threads,
    to,
    weights_of,
)

HALF = torch.bfloat16
EDGES = (
    Case(tokens=300, d_in=130, d_out=90, width=76, learners=4),  # depths and columns that fill no tile
    Case(form="gated", act="silu", tokens=61, d_in=258, d_out=33, width=34),
    Case(tokens=47, d_in=2, width=2, d_out=1, learners=1),
    Case(tokens=330, d_in=64, width=640, d_out=64, second="per_k"),  # panels wider than a strip
    Case(tokens=33, d_in=4200, width=32, d_out=300),  # a depth of several blocks
    Case(tokens=70, d_in=96, width=1100, d_out=48, second="top"),
    Case(form="cols", heads=2, width=130, d_in=390, d_out=70, tokens=70),
)


pytestmark = pytest.mark.usefixtures("library")


def native(x, k, w, residual=None):
    return torch.ops.acm.learners_cpu(x, k, *w.tensors, residual, form=w.form, act=w.act)


def drawn(case):
    torch.manual_seed(0)
    return inputs_of(replace(case, dtype=HALF))


@pytest.mark.parametrize("case", FORMS + ODD + EDGES, ids=str)
def test_it_equals_the_reference_in_float64(case, tiles):
    one = drawn(case)
    require_answer(native(one.x, one.k, one.weights, one.residual), one)


def test_tiles_are_what_multiplies(with_tiles, library):
    """Sums of another order: a few of so many outputs differ in their last bit."""
    one = drawn(Case(tokens=200, d_in=768, width=64, d_out=256, exact=False))
    y = native(one.x, one.k, one.weights)
    library.acm_want_tiles(False)
    assert not torch.equal(native(one.x, one.k, one.weights), y)


def test_whole_numbers_are_summed_without_loss(tiles):
    """Every product and sum is exact, so that any lost, doubled or misplaced word shows."""
    torch.manual_seed(0)
    for d_in, width in ((66, 34), (512, 70), (1030, 16)):
        weights = to(
            weights_of(Case(form="linear", act="identity", bias=False, d_in=d_in, width=width, d_out=50)), HALF
        )
        whole = {
            n: torch.randint(-1, 2, t.shape).to(HALF) for n, t in weights.tensors._asdict().items() if t is not None
        }
        weights = type(weights)(**weights.tensors._asdict() | whole, act="identity", form="linear")
        x, k = torch.zeros(77, d_in), torch.randint(1, 4, (77,), dtype=torch.int32)
        x[torch.arange(77), torch.randint(0, d_in, (77,))] = 1  # picks one column of w_in each
        expected = run_learners(x.double(), k, to(weights, torch.float64))
        assert expected.abs().max() <= 256  # numbers that bfloat16 holds
        assert torch.equal(native(x.to(HALF), k, weights).double(), expected)


@pytest.mark.parametrize("case", FORMS + EDGES, ids=str)
def test_a_token_keeps_its_bits_whatever_its_neighbours(case, with_tiles):
    one = drawn(case)
    y = native(one.x, one.k, one.weights)
    shifts = [(one.k + n) % (case.learners + 1) for n in range(5)]
    many = native(one.x.repeat(6, 1), torch.cat([*shifts, one.k]), one.weights)
    assert torch.equal(many[-case.tokens :], y)


def test_threads_do_not_change_a_bit(with_tiles):
    def call_of(case):
        one = drawn(case)
        return one.x, one.k, one.weights, one.residual

    require_same_bits_by_threads(native, call_of, tokens=(70, 600, 2500))


def test_what_is_not_finite_stays_with_its_token_and_its_learner(tiles):
    one = drawn(Case(tokens=90, d_in=130, width=34, learners=4, residual=False))
    clean = native(one.x, one.k, one.weights)
    lost = one.x.clone()
    lost[7] = torch.nan
    others = torch.arange(90) != 7
    assert torch.equal(native(lost, one.k, one.weights)[others], clean[others])
    one.weights.w_out[:, 3] = torch.nan  # read by tokens alone that run all learners
    y = native(one.x, one.k, one.weights)
    assert torch.equal(y[one.k < 4], clean[one.k < 4]) and y[one.k == 4].isnan().all()


def test_tokens_far_apart_and_sorted_by_k(tiles):
    one = drawn(Case(tokens=400, d_in=256, width=64, d_out=96))
    apart = torch.zeros(400, 300, dtype=HALF)[:, :256].copy_(one.x)
    y = native(apart, one.k, one.weights, one.residual)
    assert relative_error(y, one.expected) <= TOLERANCE[HALF]
    assert torch.equal(y, native(one.x, one.k, one.weights, one.residual))


@pytest.mark.parametrize(("tokens", "d_in", "width"), [(13, 64, 8), (33, 98, 5), (200, 768, 64), (65, 34, 70)])
def test_gates_choose_as_without(tokens, d_in, width, with_tiles, library):
    torch.manual_seed(0)
    gate, x = Gate(d_in, width, 5, dtype=HALF), torch.randn(tokens, d_in + 1).to(HALF)[:, :d_in]
    scalars = [torch.tensor(value, dtype=torch.int32) for value in (0, 0, 4)]
    answers = []
    for wanted in (True, False):
        library.acm_want_tiles(wanted)
        with torch.no_grad():
            answers.append(ops.run_gate(x, *gate.weights(), *scalars, cost=1.0, k_min=0, rule="logits"))
    assert (answers[0] == answers[1]).float().mean() >= 0.97  # ties to rounding apart
    x[5] = torch.nan
    library.acm_want_tiles(True)
    with torch.no_grad():
        lost = ops.run_gate(x, *gate.weights(), *scalars, cost=1.0, k_min=0, rule="logits")
    assert lost[5] == 4 and torch.equal(lost[torch.arange(tokens) != 5], answers[0][torch.arange(tokens) != 5])


def test_tiles_that_multiply_wrongly_are_given_up_with_a_line_in_the_log(with_tiles, library, monkeypatch, caplog):
    assert cpu.verify_tiles(library) and library.acm_want_tiles(True)
    sample, calls = cpu._sample, []
    monkeypatch.setattr(cpu, "_sample", lambda: calls.append(None) or sample() * len(calls))
    one = drawn(Case(tokens=200, d_in=768, width=64, d_out=256))
    with caplog.at_level("WARNING", logger="acm_compiler.backend"):
        assert not cpu.verify_tiles(library)
    assert "goes on without AMX" in caplog.text
    by_vectors = native(one.x, one.k, one.weights)
    library.acm_want_tiles(True)
    assert not torch.equal(native(one.x, one.k, one.weights), by_vectors)
