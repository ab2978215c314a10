"""The methods that benchmarks measure beside ACMs."""

import pytest
import torch
from benchmarks.low_rank import LowRank, whitened
from benchmarks.pruned_neurons import balanced_groups
from benchmarks.rivals import METHODS, rivals
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.tasks.language import CausalLM
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


class Mlp(nn.Module):
    """A plain MLP with GELU and its bypass; nothing else costs MACs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return self.norm(x + self.mlp(x))


@pytest.fixture
def mlp():
    """A plain MLP, its plan, and tokens whose inputs differ in size."""
    model, x = Mlp().eval(), torch.randn(4, 30, 32, generator=torch.Generator().manual_seed(1))
    plan = acm.plan(model, x[:1], sites="mlp", learners=2)
    assert len(plan.sites) == 1
    return model, plan, x * torch.linspace(0.1, 3, 32)


@pytest.mark.parametrize("name", ["teal", "wina", "svd"])
def test_macs_are_those_executed_and_rise_with_the_share(mlp, name):
    model, plan, x = mlp
    method = METHODS[name](model, plan)
    method.fit([(x, None)], [0.25, 0.5, 0.75])
    reached, errors = [], []
    for share in (0.25, 0.5, 0.75):
        with method.at(share), torch.no_grad():
            out, ran = counted(model, x)
        assert ran == method.kept_macs and method.all_macs == 120 * 2 * 32 * 128
        assert method.reached == pytest.approx(share, abs=0.05)
        reached.append(method.reached)
        errors.append((out - model(x)).norm().item())
    assert reached == sorted(reached) and errors == sorted(errors, reverse=True)


def counted(model, x):
    """The output, and MACs of the products that ran, without inputs that are zero."""
    zeros = []
    hooks = [
        part.register_forward_hook(lambda part, args, _: zeros.append(int((args[0] == 0).sum()) * part.out_features))
        for part in model.modules()
        if isinstance(part, nn.Linear)
    ]
    with FlopCounterMode(display=False) as flops:
        out = model(x)
    for hook in hooks:
        hook.remove()
    return out, flops.get_total_flops() // 2 - sum(zeros)


def test_the_factors_of_full_rank_are_the_weight_and_cut_ones_beat_a_plain_cut():
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(24, 32, generator=generator), torch.randn(500, 32, generator=generator)
    x = x * torch.linspace(0.05, 4, 32)
    left, right = whitened(weight, (x.T @ x).double())
    torch.testing.assert_close(left @ right, weight, rtol=1e-4, atol=1e-4)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    plain = (u[:, :8] * s[:8]) @ v[:8]
    lost = (x @ (left[:, :8] @ right[:8] - weight).T).norm()
    values = torch.linalg.svdvals(x @ weight.T)
    assert lost == pytest.approx(values[8:].norm().item(), rel=1e-3)  # the least possible
    assert lost < 0.9 * (x @ (plain - weight).T).norm()


def test_low_rank_puts_the_dense_layers_back(dense, plan):
    names = [name for name, _ in dense.named_modules()]
    before = {name: part for name, part in dense.named_modules() if isinstance(part, nn.Linear)}
    method = LowRank(dense, plan)
    method.fit(((TASK.inputs(batch), TASK.mask(batch)) for batch in batches(2)), [0.5])
    with pytest.raises(KeyboardInterrupt), method.at(0.5):
        assert dense.model.layers[1].mlp.up_proj is not before["model.layers.1.mlp.up_proj"]
        raise KeyboardInterrupt
    assert names == [name for name, _ in dense.named_modules()]
    assert all(dense.get_submodule(name) is part for name, part in before.items())
    assert not any(part._forward_pre_hooks for part in before.values())


def test_padding_counts_neither_in_moments_nor_in_macs_of_low_rank(dense, plan):
    method = LowRank(dense, plan)
    method.fit(((TASK.inputs(batch), TASK.mask(batch)) for batch in batches()), [0.5])
    with method.at(0.5):
        for batch in method.watched(batches(1), TASK):
            dense(**TASK.inputs(batch))
    assert method.all_macs == (12 + 3 * 30) * 2 * 3 * 32 * 64
    assert 0.45 < method.reached <= 0.5


def test_flap_drops_the_same_neurons_for_all_tokens_and_keeps_their_mean(dense, plan):
    rival = fitted(dense, plan, "flap", [0.5])
    second, keep_F = dense.model.layers[1].mlp.down_proj, rival.kept[0.5][1]
    assert rival.changed[1] is second
    assert [int(keep.sum()) for keep in rival.kept[0.5]] == [32, 32]
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
