"""Methods that act on a plan's sites: TEAL, WINA, SVD-LLM, FLAP, CMoE, and the count of what they execute."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.low_rank import whitened
from acm_compiler.baselines.measure import measure
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.pruned_neurons import balanced_groups
from acm_compiler.baselines.site_method import Dense
from acm_compiler.progress import Progress
from acm_compiler.tasks.classify import Classify
from acm_compiler.tasks.language import CausalLM
from tests.helpers.gguf_files import WORDS, small_llama

BUDGETS = (0.25, 0.5, 0.75)
REAL, NEURONS, MACS = 12 + 3 * 30, 64, 3 * 32  # of a batch: real tokens; of an MLP: neurons, MACs of one


def texts(count=6):
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        ids = torch.randint(len(WORDS), (4, 30), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 12:] = 0
        yield {"input_ids": ids, "attention_mask": mask, "source": 4 * number + torch.arange(4)}


@pytest.fixture
def llama():
    """A Llama of two layers, whose MLPs are the sites."""
    pytest.importorskip("transformers")
    dense = small_llama().eval()
    plan = acm.plan(dense, {"input_ids": torch.ones(1, 30, dtype=torch.int64)}, sites="mlp", learners=2)
    return Subject(dense=dense, plan=plan, task=CausalLM(), fit=texts, held_out=lambda: texts(1))


class Mlp(nn.Module):
    """An MLP with GELU and a projection, [B, 30, 32] -> logits [B, 5]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, image):
        return self.head(self.norm(image + self.mlp(image)).mean(1))


@pytest.fixture
def mlp():
    """A plain MLP on tokens whose inputs differ in size."""
    model, x = Mlp().eval(), torch.randn(4, 30, 32, generator=torch.Generator().manual_seed(1))
    plan = acm.plan(model, x[:1], sites="mlp", learners=2)
    batch = {"image": x * torch.linspace(0.1, 3, 32), "label": torch.tensor([0, 1, 2, 3])}
    return Subject(dense=model, plan=plan, task=Classify(), fit=lambda: [batch], held_out=lambda: [batch])


def fitted(subject, name, budgets=BUDGETS):
    method = METHODS[name](subject)
    method.convert(budgets, print)
    return method


def counted(method, batch, budget):
    """MACs of all products that ran, by torch's own counter, without inputs of linear layers that are zero."""
    zeros, linear = [], nn.functional.linear

    def watched(x, weight, bias=None):
        zeros.append(int((x == 0).sum()) * len(weight))
        return linear(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, FlopCounterMode(display=False) as flops:
        patch.setattr("acm_compiler.baselines.sparse_activations.F.linear", watched)
        method.run(batch, budget)
    return flops.get_total_flops() // 2 - sum(zeros)


@pytest.mark.parametrize("name", ["teal", "wina", "svd"])
def test_macs_are_those_executed_and_rise_with_the_budget(mlp, name):
    method, (batch,) = fitted(mlp, name), mlp.held_out()
    ran = [float(method.run(batch, budget).macs_B.sum()) for budget in BUDGETS]
    assert ran == [counted(method, batch, budget) for budget in BUDGETS]
    assert ran == sorted(ran)
    dense = 4 * mlp.plan.model.dense_macs
    assert [macs / dense for macs in ran] == pytest.approx(BUDGETS, abs=0.05)


@pytest.mark.parametrize("name", ["teal", "wina", "svd", "flap"])
def test_errors_fall_with_the_budget_and_the_dense_model_stays(mlp, name):
    (batch,) = mlp.held_out()
    wanted = mlp.dense(batch["image"])
    method = fitted(mlp, name)
    errors = []
    for budget in BUDGETS:
        method.run(batch, budget)
        errors.append((method.host(batch["image"]) - wanted).norm().item())
    assert errors == sorted(errors, reverse=True) and errors[0] > 0
    torch.testing.assert_close(mlp.dense(batch["image"]), wanted, rtol=0, atol=0)


def test_the_dense_model_is_counted_as_torch_counts_it(mlp):
    (batch,) = mlp.held_out()
    ran = Dense(mlp).run(batch, 1.0)
    with FlopCounterMode(display=False) as flops:
        mlp.dense(batch["image"])
    assert ran.macs_B.tolist() == [flops.get_total_flops() / 8] * 4


@pytest.mark.parametrize("name", ["teal", "wina"])
def test_each_layer_reads_its_largest_inputs_alone(llama, name):
    region = fitted(llama, name).regions["model.layers.1.mlp"]
    share, layer = 0.6, region.first[1]
    weight = llama.dense.model.layers[1].mlp.up_proj.weight
    assert torch.equal(layer.weight_OD, weight)
    x = torch.randn(7, 32)
    norms = weight.norm(dim=0) if name == "wina" else torch.ones(32)
    kept = torch.where(x.abs() * norms >= layer.threshold(share), x, 0)
    given, macs = layer.run(x, share)
    torch.testing.assert_close(given, kept @ weight.T)
    assert torch.equal(macs, (kept != 0).sum(1) * NEURONS)


@pytest.mark.parametrize("name", ["teal", "wina"])
def test_thresholds_are_found_with_which_the_model_executes_the_budget(mlp, name, monkeypatch):
    method, batches = fitted(mlp, name), list(mlp.fit())[:4]
    for budget in BUDGETS:
        share = method.share_of(budget, mlp.plan)
        assert method._executed(method.asked[share], batches) == pytest.approx(share, abs=0.005)
    for executed in (lambda asked, _: asked**2, lambda asked, _: asked**0.5):
        monkeypatch.setattr(method, "_executed", executed)
        known = {0.0: 0.0, 1.0: 1.0}
        assert executed(method._search(0.3, [], known), []) == pytest.approx(0.3, abs=0.005)
        tried = len(known)
        assert executed(method._search(0.31, [], known), []) == pytest.approx(0.31, abs=0.005)
        assert len(known) - tried < tried - 2  # what was tried before serves its neighbour


@pytest.mark.parametrize("name", ["teal", "svd", "flap", "cmoe"])
def test_padding_counts_nowhere(llama, name):
    if name == "cmoe":
        pytest.importorskip("scipy")
    dense, (batch,) = Dense(llama), texts(1)
    whole = dense.run(batch, 1.0).macs_B
    part = dense.run({key: value[:1, :12] for key, value in batch.items() if key != "source"}, 1.0).macs_B
    assert whole[0] == pytest.approx(part[0]) and whole[0] < whole[1]
    rest = float(whole.sum()) - REAL * 2 * NEURONS * MACS
    method = fitted(llama, name, (0.8,))
    share = method.share_of(0.8, llama.plan)
    run = (float(method.run(batch, 0.8).macs_B.sum()) - rest) / (REAL * 2 * NEURONS * MACS)
    assert run == pytest.approx(share, abs=0.2 if name == "cmoe" else 0.06)


def test_a_method_is_measured_at_all_budgets_in_one_pass(llama):
    with Progress("teal", shown=False) as progress:
        found = measure(fitted(llama, "teal", (0.8, 0.9)), (0.8, 0.9), progress)
    assert list(found.scores) == [0.8, 0.9] and all(len(part) == 4 for part in found.macs.values())
    assert found.units_E.tolist() == [11, 29, 29, 29] and found.groups_E.tolist() == [0, 1, 2, 3]


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


def test_flap_drops_the_same_neurons_for_all_tokens_and_keeps_their_mean(llama):
    method = fitted(llama, "flap", (0.8,))
    region, mlp = method.regions["model.layers.1.mlp"], llama.dense.model.layers[1].mlp
    region.share = method.share_of(0.8, llama.plan)
    kept, x = region.kept[region.share], torch.randn(30, 32)
    hidden = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
    torch.testing.assert_close(region(x), mlp.down_proj(torch.where(kept, hidden, region.mean_F)))
    assert int(kept.sum()) == int(region.share * NEURONS)
    assert torch.equal(region.macs_T, torch.full((30,), int(kept.sum()) * MACS))


def test_a_token_runs_the_shared_experts_and_those_whose_middle_neuron_is_most_active(llama):
    pytest.importorskip("scipy")
    method = fitted(llama, "cmoe", (0.8,))
    region = method.regions["model.layers.1.mlp"]
    region.experts[0.5] = region._cut(torch.randn(50, NEURONS).abs(), 0.5)
    region.share, experts = 0.5, region.experts[0.5]
    assert experts.expert_F.clamp_min(-1).add(1).bincount().tolist() == [16] + [4] * 12
    assert torch.equal(experts.expert_F[experts.middle_P], torch.arange(12))
    x = torch.randn(30, 32)
    hidden = region.dense.hidden(x)
    best = hidden[:, experts.middle_P].abs().topk(4, -1).indices
    runs = torch.stack([torch.isin(experts.expert_F, torch.tensor([-1, *row])) for row in best.tolist()])
    torch.testing.assert_close(region(x), (hidden * runs) @ region.last[0].T)
    # 32 of 64 neurons, and two of the three layers for the middle neurons of eight experts
    assert region.macs_T.tolist() == [32 * MACS + 8 * 64] * 30


def test_groups_are_of_equal_size_and_near_their_centres():
    pytest.importorskip("scipy")
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    points = (centres[:, None] + 0.1 * torch.randn(3, 5, 2)).transpose(0, 1).flatten(0, 1)
    group, middle = balanced_groups(points, 3, rounds=3)
    assert torch.equal(group, torch.arange(15) % 3)
    assert torch.equal(group[middle], torch.arange(3))
