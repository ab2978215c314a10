"""Programs of `acm::steps`: their text, and the operator against its steps one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.acm import flops as _counted  # noqa: F401
from acm_compiler.acm import ops
from acm_compiler.acm.arguments import GatedArguments
from acm_compiler.acm.gated_learners import GATED
from acm_compiler.acm.steps import ATTENTION, STEPS, Program, Step, gated_options, read_program
from tests.helpers.build import acm_for, planned_site

RESIDUAL = GatedArguments._fields.index("residual")


def site_call(acm, x):
    """The operands and options of an ACM's `acm::gated_learners` by name, without gradients."""
    w, g = acm.learners.weights(), acm.gate
    operands = [x, *g.weights(), acm.knob, acm.k_lo, acm.k_hi, *w.tensors]
    operands = [None if t is None else t.detach() for t in operands]
    operands += [None] * (len(GatedArguments._fields) - len(operands))
    choices = {"cost": acm.cost, "k_min": acm.k_min, "rule": g.rule, "form": w.form, "act": w.act}
    return operands, gated_options(choices)


def two_sites(tokens):
    """A norm, an attention of three ACMs, and an MLP with a bypass: tensors, the program, and what it must give."""
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 8), torch.rand(8)
    acms = [acm_for(planned_site(name, kind="linear", learner_act="identity", k_min=1)) for name in "qkv"]
    calls = [site_call(acm, x) for acm in (*acms, acm_for(planned_site("mlp")))]
    tensors = [x, weight, *(t for given, _ in calls for t in given[1:] if t is not None)]
    numbers = {id(t): number for number, t in enumerate(tensors)}
    norm = len(tensors)
    attention = Step("attention", (norm + 1, norm + 2, norm + 3), (2, 5, False, 0.4))
    steps = [Step("norm", (0, 1, None), (1e-5, True))]
    for read, (given, options) in zip((norm, norm, norm, norm + 4), calls, strict=True):
        places = [read, *(None if t is None else numbers[id(t)] for t in given[1:])]
        if read > norm:
            steps.append(attention)
            places[RESIDUAL] = 0
        steps.append(Step("gated", tuple(places), tuple(options.values())))
    program = Program(norm, tuple(steps), (norm + 5, norm + 1))

    z = F.layer_norm(x, (8,), weight, None, 1e-5)
    q, k, v = (GATED(z, *given[1:], **options) for given, options in calls[:3])
    heads = [t.view(-1, 5, 2, 4).transpose(1, 2) for t in (q, k, v)]
    y = F.scaled_dot_product_attention(*heads, scale=0.4).transpose(1, 2).reshape(-1, 8)
    given, options = calls[3]
    return tensors, program, [GATED(y, *given[1:RESIDUAL], x, *given[RESIDUAL + 1 :], **options), q]


@pytest.mark.parametrize("tokens", [5, 35])
def test_a_program_gives_what_its_operators_give_one_by_one(tokens):
    ops.load_kernels("cpu")
    tensors, program, expected = two_sites(tokens)
    with torch.no_grad():
        found = STEPS(tensors, program.text())
        by_reference = program.run(tensors, GATED)
    for some in (found, by_reference):
        torch.testing.assert_close(some, expected, atol=1e-5, rtol=1e-4)


def test_the_text_of_a_program_is_read_again_as_it_was():
    _, program, _ = two_sites(5)
    assert read_program(program.text()) == program


def test_the_text_of_a_program_is_a_cpp_literal_as_it_stands():
    _, program, _ = two_sites(5)
    text = program.text()
    assert text.isprintable() and not {'"', "\\"}.intersection(text)


def test_fake_tensors_get_the_shapes_of_the_results():
    tensors, program, expected = two_sites(5)
    with torch._subclasses.FakeTensorMode() as mode:
        shapes = [y.shape for y in STEPS([mode.from_tensor(t) for t in tensors], program.text())]
    assert shapes == [y.shape for y in expected]


def test_the_operator_refuses_programs_that_read_what_is_not_there():
    ops.load_kernels("cpu")
    tensors, program, _ = two_sites(5)
    with pytest.raises(RuntimeError, match=r"takes \d+ tensors, got 2"):
        STEPS(tensors[:2], program.text())
    later = Program(1, (Step("norm", (2, None, None), (1e-5, True)),), (1,))
    with pytest.raises(RuntimeError, match="reads value 2, which is not there by then"):
        STEPS([torch.randn(2, 8)], later.text())
    absent = Program(1, (Step("norm", (None, None, None), (1e-5, True)),), (1,))
    with pytest.raises(RuntimeError, match="reads value -, which is not there"):
        STEPS([torch.randn(2, 8)], absent.text())


def test_operators_give_no_alias_of_what_they_were_given():
    ops.load_kernels("cpu")
    tensors, program, _ = two_sites(5)
    given = {t.data_ptr() for t in tensors}
    assert not given & {y.data_ptr() for y in STEPS(tensors, program.text())}


def test_flops_are_those_of_the_acms_among_the_steps():
    ops.load_kernels("cpu")
    tensors, program, _ = two_sites(35)
    totals = []
    for run in (lambda: STEPS(tensors, program.text()), lambda: program.run(tensors, GATED)):
        with FlopCounterMode(display=False) as counter:
            run()
        totals.append(counter.get_flop_counts()["Global"])
    assert totals[0][STEPS] == totals[1][GATED] > 0


def test_flops_of_an_attention_are_those_of_both_its_products():
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind()
    with FlopCounterMode(display=False) as counter:
        ATTENTION(q, k, v, scale=0.3, causal=True)
    assert counter.get_total_flops() == 2 * 2 * (2 * 4 * 9 * 9 * 8)
