"""The activation sparsity that benchmarks measure beside ACMs."""

import pytest
import torch

import acm_compiler as acm
from acm_compiler.tasks.language import CausalLM
from benchmarks.sparse_activations import SparseActivations, rivals
from tests.helpers.gguf_files import WORDS, small_llama

pytest.importorskip("transformers")
TASK = CausalLM()


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        ids = torch.randint(len(WORDS), (4, 30), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 12:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "source": 4 * number + torch.arange(4)}


@pytest.fixture
def dense():
    return small_llama()


@pytest.fixture
def plan(dense):
    return acm.plan(dense, {"input_ids": torch.ones(1, 30, dtype=torch.int64)}, sites="mlp", learners=2)


def fitted(dense, plan, method, shares):
    sparse = SparseActivations(dense, plan, method)
    sparse.fit(((TASK.inputs(batch), TASK.mask(batch)) for batch in batches()), shares)
    return sparse


@pytest.mark.parametrize("method", ["teal", "wina"])
def test_each_layer_reads_its_largest_inputs_alone(dense, plan, method):
    sparse = fitted(dense, plan, method, [0.5])
    linear, layer = dense.model.layers[1].mlp.up_proj, sparse.layers[4]
    assert layer.linear is linear and len(sparse.layers) == 6
    x = torch.randn(3, 7, 32)
    norms = linear.weight.detach().norm(dim=0) if method == "wina" else torch.ones(32)
    kept = torch.where(x.abs() * norms >= layer.thresholds[0.5], x, 0)
    with sparse.at(0.5):
        sparse.real = None
        torch.testing.assert_close(linear(x), kept @ linear.weight.T)
    torch.testing.assert_close(linear(x), x @ linear.weight.T)


@pytest.mark.parametrize("method", ["teal", "wina"])
def test_the_share_asked_for_is_the_share_of_macs_at_real_tokens(dense, plan, method):
    rows = rivals(dense, plan, [method], shares=[1.0, 0.5], task=TASK, fit=batches, judge=lambda: batches(9))
    whole, half = rows
    assert whole.reached == pytest.approx(1, abs=1e-3) and whole.model_share == pytest.approx(1, abs=1e-3)
    assert whole.difference.mean == pytest.approx(0, abs=1e-3)
    assert half.reached == pytest.approx(0.5, abs=0.03)
    assert half.difference.mean != 0
    mlps = 2 * 3 * 32 * 64 * 30 / plan.model.dense_macs
    assert half.model_share == pytest.approx(1 - mlps * (1 - half.reached))


def test_padding_counts_neither_in_thresholds_nor_in_what_was_executed(dense, plan):
    sparse = fitted(dense, plan, "teal", [0.5])
    with sparse.at(0.5):
        for batch in sparse.watched(batches(1), TASK):
            dense(**TASK.inputs(batch))
    assert sparse.all_macs == (12 + 3 * 30) * 2 * 3 * 32 * 64
