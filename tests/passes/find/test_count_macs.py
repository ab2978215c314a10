"""MACs per operation: equal to FlopCounterMode to the last one, and what it does not count is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.passes.capture.capture import capture
from acm_compiler.passes.capture.export import capture_exported
from acm_compiler.passes.capture.normalize import normalize
from acm_compiler.passes.find.count_macs import count_macs, grouped_macs, not_counted
from acm_compiler.sources.inputs import call_model
from tests.helpers import models


def torchs_macs(model, inputs) -> float:
    # the counter does not know attention's fused kernel for CPUs
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call_model(model, inputs)
    return counter.get_total_flops() / 2


PUBLISHED = ["torchvision_vit", "hf_vit", "hf_bert", "hf_wav2vec2", "hf_gpt2", "hf_llama"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_counts_as_torch_counts_it(name):
    model, inputs = getattr(models, name)()
    normalize(model.eval())
    assert sum(count_macs(capture(model, inputs)).values()) == torchs_macs(model, inputs)


class Calls(nn.Module):
    """A function of random tensors of the given shapes."""

    def __init__(self, function, shapes) -> None:
        super().__init__()
        self.function, self.shapes = function, shapes

    def forward(self, *tensors):
        return self.function(*tensors)


OPERATIONS = {
    "linear": (F.linear, (2, 3, 4), (6, 4), (6,)),
    "linear of a vector": (F.linear, (4,), (6, 4), (6,)),
    "matmul": (torch.matmul, (2, 3, 4), (4, 5)),
    "batched matmul": (torch.matmul, (2, 3, 6, 4), (2, 3, 4, 5)),
    "broadcast matmul": (torch.matmul, (2, 1, 6, 4), (3, 4, 5)),
    "matrix with vector": (torch.matmul, (6, 4), (4,)),
    "vector with matrices": (torch.matmul, (6,), (2, 6, 4)),
    "two vectors": (torch.matmul, (4,), (4,)),
    "addmm": (torch.addmm, (5,), (3, 4), (4, 5)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "baddbmm": (torch.baddbmm, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (2, 3, 4), (4, 5)),
    "inner": (torch.inner, (2, 3), (4, 3)),
    "attention": (F.scaled_dot_product_attention, (2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 8)),
    "attention, wider values": (F.scaled_dot_product_attention, (2, 3, 4, 8), (2, 3, 6, 8), (2, 3, 6, 10)),
    "attention without heads": (F.scaled_dot_product_attention, (3, 4, 8), (3, 6, 8), (3, 6, 8)),
    "causal attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *((2, 3, 4, 8),) * 3,
    ),
    "grouped attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 4, 4, 8),
        (2, 2, 6, 8),
        (2, 2, 6, 8),
    ),
    "conv1d": (F.conv1d, (2, 4, 9), (6, 4, 3)),
    "conv1d without batch": (F.conv1d, (4, 9), (6, 4, 3)),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2, stride=2, padding=1), (2, 4, 8, 8), (6, 2, 3, 3)),
    "conv3d": (F.conv3d, (1, 2, 5, 5, 5), (3, 2, 2, 2, 2)),
    "transposed conv": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (2, 4, 8, 8), (4, 3, 3, 3)),
    "einsum as attention": (lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), (2, 4, 3, 5), (2, 6, 3, 5)),
    "einsum as linear": (lambda a, b: torch.einsum("...d,de->...e", a, b), (2, 3, 4), (4, 5)),
    "einsum of heads": (lambda a, b: torch.einsum("bsd,dhk->bshk", a, b), (2, 4, 8), (8, 2, 3)),
    "einsum with a lonely label": (lambda a, b: torch.einsum("ijk,jl->l", a, b), (2, 3, 4), (3, 5)),
    "einsum without contraction": (lambda a, b: torch.einsum("i,j->ij", a, b), (2,), (3,)),
    "einsum of three": (lambda a, b, c: torch.einsum("ij,jk,kl->il", a, b, c), (2, 3), (3, 4), (4, 5)),
    "einsum with an implicit result": (lambda a, b: torch.einsum("ij,jk", a, b), (2, 3), (3, 4)),
    "einsum of a list": (lambda a, b: torch.einsum("bi,bij->bj", [a, b]), (2, 3), (2, 3, 4)),
    "einsum broadcast": (lambda a, b: torch.einsum("...ij,...jk->...ik", a, b), (2, 1, 3, 4), (5, 4, 6)),
    "elementwise": (lambda a: F.gelu(a) * a + a.softmax(-1), (2, 3)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_counts_as_torch_counts_it(name):
    function, *shapes = OPERATIONS[name]
    tensors = tuple(torch.randn(shape) for shape in shapes)
    model = Calls(function, shapes).eval()
    expected = torchs_macs(model, tensors)
    assert sum(count_macs(capture(model, tensors)).values()) == expected
    if name != "linear of a vector":
        assert sum(count_macs(capture_exported(model, tensors)).values()) == expected


@pytest.mark.parametrize(
    ("left", "right", "out", "macs"),
    [
        ((6, 8), (3, 8, 16), (6, 16), 6 * 8 * 16),  # experts' tokens, sorted
        ((3, 8, 16), (16, 6), (8, 6), 8 * 16 * 6),
        ((3, 4, 8), (3, 8, 16), (3, 4, 16), 3 * 4 * 8 * 16),
        ((8, 6), (6, 16), (3, 8, 16), 8 * 6 * 16),  # gradients of experts' weights
    ],
)
def test_grouped_products_count_every_row_once(left, right, out, macs):
    assert grouped_macs(left, right, out) == macs


def test_experts_count_as_their_loop_does():
    """A mixture whose experts are grouped products, beside the same as a loop that torch can count."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.MixtralConfig(vocab_size=20, num_key_value_heads=2, num_local_experts=4, **sizes)
    model, inputs = transformers.MixtralForCausalLM(config).eval(), {"input_ids": torch.arange(12)[None]}
    model.set_experts_implementation("grouped_mm")
    plan = acm.plan(model, inputs)
    assert "grouped_mm" not in plan.model.not_counted
    rewritten = acm.rewrite(model, plan)
    with torch.no_grad(), acm.record(rewritten) as usage:
        rewritten(**inputs)
    acm.revert(rewritten)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        assert plan.model.dense_macs == float(usage.dense_macs.sum()) == torchs_macs(model, inputs)


def test_what_is_not_counted_is_named_with_how_often_it_runs():
    model, inputs = models.torchvision_vit()
    normalize(model.eval())
    assert not_counted(capture(model, inputs)) == {"add": 5, "layer_norm": 5, "softmax": 2, "gelu": 2}


def test_operations_on_values_that_never_change_are_not_listed():
    def with_positions(x):
        angles = torch.arange(3.0).cos() * 2
        return x + angles

    graph = capture(Calls(with_positions, ()).eval(), torch.randn(2, 3))
    assert not_counted(graph) == {"add": 1}
