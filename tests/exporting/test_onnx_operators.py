"""Learners in operators whose sizes follow k: the reference's outputs, in torch and in ONNX Runtime."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from acm_compiler.acm.arguments import LearnerWeights
from acm_compiler.acm.ops import LEARNERS
from acm_compiler.acm.reference import run_learners
from acm_compiler.exporting.onnx import OPERATORS, plain_program, prefixes_output
from tests.helpers.kernel_cases import FEW, FORMS, ODD, SHAPES, Case, k_of, to, weights_of


class Learners(nn.Module):
    """One call of the operator, with the weights of a case as buffers."""

    def __init__(self, weights):
        super().__init__()
        self.options = {"form": weights.form, "act": weights.act}
        for name, tensor in weights.tensors._asdict().items():
            if tensor is not None:
                self.register_buffer(name, tensor)

    def forward(self, x, k):
        return LEARNERS(x, k, *(getattr(self, name, None) for name in LearnerWeights._fields), **self.options)


def drawn(case, tokens):
    """Inputs and k of so many tokens."""
    k = k_of(replace(case, tokens=max(tokens, 1)))[:tokens]
    return torch.randn(tokens, case.d_in, dtype=torch.float64), k


@pytest.mark.parametrize("case", [*FORMS, *ODD, *FEW, *SHAPES], ids=str)
def test_outputs_are_the_references(case):
    torch.manual_seed(0)
    weights = weights_of(case)
    for tokens in (case.tokens, 0):
        x, k = drawn(case, tokens)
        torch.testing.assert_close(prefixes_output(x, k, weights), run_learners(x, k, weights))


@pytest.mark.parametrize("case", FORMS, ids=str)
def test_a_token_that_is_not_finite_changes_no_other(case):
    torch.manual_seed(0)
    weights, (x, k) = weights_of(case), drawn(case, 9)
    expected = prefixes_output(x, k, weights)
    x[4], k[4] = torch.nan, 2
    found = prefixes_output(x, k, weights)
    assert found[4].isnan().any()
    others = torch.arange(9) != 4
    torch.testing.assert_close(found[others], expected[others])


@pytest.mark.parametrize(
    "case", [*FORMS, Case(learners=1), Case(form="linear", act="identity", second="per_k")], ids=str
)
def test_one_graph_of_standard_operators_for_all_k_and_numbers_of_tokens(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    weights = to(weights_of(case), torch.float32)
    call = tuple(t.float() if t.is_floating_point() else t for t in drawn(case, 6))
    free = torch.export.Dim.AUTO
    program = torch.export.export(Learners(weights), call, dynamic_shapes=({0: free}, {0: free}), strict=False)
    made = torch.onnx.export(program.run_decompositions(OPERATORS), dynamo=True, optimize=False, verbose=False)
    made.save(tmp_path / "model.onnx")
    run = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for tokens in (0, 1, 2, 65):
        for k in ("mixed", "none", "all", "same"):
            x, k_T = drawn(replace(case, k=k), tokens)
            found = torch.from_numpy(run.run(None, {"x": x.float().numpy(), "k": k_T.numpy()})[0])
            expected = run_learners(x.float(), k_T, weights)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Checking(nn.Module):
    """A check of the kind that transformers' models of images and text make."""

    def forward(self, x):
        return x + torch._is_all_true(x > 0)


def test_a_check_of_all_values_becomes_an_operator_that_onnx_has():
    program = plain_program(torch.export.export(Checking(), (torch.ones(3),)))
    assert "_is_all_true" not in program.graph_module.code
    assert torch.equal(program.module()(torch.ones(3)), torch.full((3,), 2.0))
