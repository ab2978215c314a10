"""Methods that benchmarks measure beside ACMs: activation sparsity, dropped neurons, experts."""

import pytest
import torch

import acm_compiler as acm
from acm_compiler.tasks.language import CausalLM
from benchmarks.pruned_neurons import balanced_groups
from benchmarks.rivals import METHODS, rivals
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
    rival = METHODS[method](dense, plan)
    rival.fit(((TASK.inputs(batch), TASK.mask(batch)) for batch in batches()), shares)
    return rival


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


@pytest.mark.parametrize("method", ["teal", "wina", "flap"])
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


def test_flap_drops_the_same_neurons_for_all_tokens_and_keeps_their_mean(dense, plan):
    rival = fitted(dense, plan, "flap", [0.5])
    second, keep_F = dense.model.layers[1].mlp.down_proj, rival.kept[0.5][1]
    assert rival.linears[1] is second
    # one threshold over both layers
    assert sum(int(keep.sum()) for keep in rival.kept[0.5]) == 64
    h = torch.randn(2, 30, 64)
    with rival.at(0.5):
        rival.real = None
        given = second(h)
    bias = (rival.means[1] * ~keep_F) @ second.weight.T
    torch.testing.assert_close(given, (h * keep_F) @ second.weight.T + bias)
    assert torch.equal(rival.means[1].isfinite(), torch.ones(64, dtype=torch.bool))


def test_a_token_runs_the_shared_experts_and_those_whose_middle_neuron_is_most_active(dense, plan):
    pytest.importorskip("scipy")
    rival = fitted(dense, plan, "cmoe", [0.5])
    experts = rival.experts[0.5][1]
    assert experts.expert_F.clamp_min(-1).add(1).bincount().tolist() == [16] + [4] * 12
    assert torch.equal(experts.expert_F[experts.middle_P], torch.arange(12))
    h = torch.randn(1, 30, 64)
    with rival.at(0.5):
        rival.real = None
        changed = rival.change(1, h, 0.5)
    runs = (changed != 0).sum(-1)
    assert torch.equal(runs, torch.full((1, 30), 32))
    best = h[..., experts.middle_P].abs().topk(4, -1).indices
    for number in range(30):
        ran = set(experts.expert_F[changed[0, number] != 0].tolist())
        assert ran == {-1, *best[0, number].tolist()}
    # 32 of 64 neurons, and two of the three layers for the middle neurons of eight experts
    assert rival.reached == pytest.approx((32 + 8 * 2 / 3) / 64)


def test_groups_are_of_equal_size_and_near_their_centres():
    pytest.importorskip("scipy")
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = (centres[:, None] + 0.1 * torch.randn(3, 5, 2)).transpose(0, 1).flatten(0, 1)
    group, middle = balanced_groups(points, 3, rounds=3)
    assert torch.equal(group, torch.arange(15) % 3)
    assert torch.equal(group[middle], torch.arange(3))
