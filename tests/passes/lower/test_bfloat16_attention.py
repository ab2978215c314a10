"""Attention in bfloat16, in graphs after our passes."""

import torch
import torch.nn.functional as F
from torch import fx, nn

from acm_compiler.acm.steps import ATTENTION
from acm_compiler.backend import OPTIONS, lower
from tests.helpers.rewrite_cases import ALL, answer, rewritten


def lowered(model: nn.Module, **changed):
    """(the model, run by its graphs after our passes, and these graphs)."""
    graphs: list[fx.Graph] = []
    own = {name: values[0] for name, values in OPTIONS.items()} | changed

    def backend(graph_module, _):
        lower(graph_module, own)
        graphs.append(graph_module.graph)
        return graph_module.forward

    torch._dynamo.reset()
    return torch.compile(model, backend=backend), graphs


def types_of_attention(graphs: list[fx.Graph]) -> list[torch.dtype]:
    """The type in which each attention multiplies."""
    attentions = (F.scaled_dot_product_attention, ATTENTION)
    calls = [node for graph in graphs for node in graph.nodes if node.target in attentions]
    types = (node.args[0].meta["example_value"].dtype for node in calls)
    return [torch.bfloat16 if node.target is ATTENTION else dtype for node, dtype in zip(calls, types, strict=True)]


@torch.no_grad()
def test_attention_is_bfloat16_where_asked_for_and_outputs_stay_near():
    _, x, model = rewritten(ALL["hf_vit"], sites=("mlp",))
    expected = answer(model, x)
    fast, graphs = lowered(model, bfloat16_attention=True)
    found = answer(fast, x)
    assert set(types_of_attention(graphs)) == {torch.bfloat16} and found.dtype == torch.float32
    assert 0 < (found - expected).norm() / expected.norm() < 0.02
    plain, graphs = lowered(model)
    torch.testing.assert_close(answer(plain, x), expected)
    assert set(types_of_attention(graphs)) == {torch.float32}


def test_graphs_with_gradients_keep_their_types():
    _, x, model = rewritten(ALL["hf_vit"], sites=("mlp",))
    fast, graphs = lowered(model, bfloat16_attention=True)
    answer(fast, x).sum().backward()
    assert set(types_of_attention(graphs)) == {torch.float32}


class Masked(nn.Module):
    """Attention with a mask of floats or none, and every operand by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, q, k, mask):
        y = F.scaled_dot_product_attention(query=q, key=k, value=k, attn_mask=mask)
        return answer(self.model, x).sum() + y


@torch.no_grad()
def test_operands_by_name_and_a_mask_of_floats():
    _, x, model = rewritten(ALL["hf_vit"], sites=("mlp",))
    masked = Masked(model).eval()
    q, mask = torch.randn(2, 3, 5, 16), torch.zeros(5, 5).index_fill(1, torch.tensor([2]), -torch.inf)
    expected = masked(x, q, q, mask)
    fast, graphs = lowered(masked, bfloat16_attention=True)
    torch.testing.assert_close(fast(x, q, q, mask), expected, rtol=0.02, atol=0.02)
    assert torch.bfloat16 in types_of_attention(graphs)


@torch.no_grad()
def test_one_query_for_all_examples_has_an_output_for_each():
    _, x, model = rewritten(ALL["hf_vit"], sites=("mlp",))
    masked, q, k = Masked(model).eval(), torch.randn(1, 3, 5, 32), torch.randn(2, 3, 5, 32)
    expected = masked(x, q, k, None)
    fast, graphs = lowered(masked, bfloat16_attention=True)
    torch.testing.assert_close(fast(x, q, k, None), expected, rtol=0.02, atol=0.02)
    assert any(node.target is F.scaled_dot_product_attention for graph in graphs for node in graph.nodes)
