"""The three auxiliary losses against numbers worked out by hand, and `acm.losses` on a relaxed model."""

import copy
import functools
import math
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import acm_compiler
from acm_compiler.acm import ACM
from acm_compiler.acm.module import Choices
from acm_compiler.errors import NothingRecorded, UsageError
from acm_compiler.passes.rewrite.conversion import Conversion, sites
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.runtime.batch_context import batch
from acm_compiler.runtime.control import relax
from acm_compiler.training.loss_terms import budget_loss, diversity_loss, entropy_loss, losses, take_choices
from tests.helpers.build import acm_for, plan_of
from tests.helpers.models import Mlp
from tests.helpers.rewrite_cases import ALL
from tests.helpers.training_tiny import TOKENS, make_model, tiny_site


def one_hot(k, k_min, n=4):
    """Hard choices [B, S, C] for k [B, S]."""
    return torch.nn.functional.one_hot(torch.tensor(k) - k_min, n - k_min + 1).float()


class Pair(torch.nn.Module):
    """Two sites beside each other, an MLP (k_min 0) and a projection (k_min 1), to be filled with choices."""

    def __init__(self):
        super().__init__()
        planned = [tiny_site("mlp", "mlp"), tiny_site("proj", "linear")]
        plan = plan_of(*planned)
        self.mlp, self.proj = (acm_for(site) for site in planned)
        self.mlp.conversion = self.proj.conversion = Conversion(plan=plan)


def test_the_budget_loss_is_the_distance_of_the_mean_share():
    assert budget_loss(torch.tensor([0.25, 0.75, 1.0]), 0.6).item() == pytest.approx(2 / 3 - 0.6)
    assert budget_loss(torch.tensor([0.25, 0.25]), 0.6).item() == pytest.approx(0.35)


def test_the_diversity_loss_averages_over_all_pairs_and_encourages_differences():
    # differences .5, .75, .25, each twice, and three zeros: 3 / 9
    assert diversity_loss(torch.tensor([0.25, 0.75, 1.0])).item() == pytest.approx(-1 / 3)
    assert diversity_loss(torch.tensor([0.4])).item() == 0


def test_the_entropy_loss_is_lowest_for_choices_used_alike():
    tokens = torch.tensor([4.0, 4.0])
    alike_and_alone = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0]])
    # uniform use gives -1; all on one choice gives 1 log 1 = 0
    assert entropy_loss([alike_and_alone], [tokens]).item() == pytest.approx(-0.5)


def test_the_entropy_loss_normalises_by_each_site_and_counts_one_choice_as_zero():
    two = torch.tensor([[0.5, 0.5]])
    four = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    one = torch.tensor([[1.0]])
    tokens = [torch.tensor([8.0])] * 3
    # log .5 / log 2 = -1, log .5 / log 4 = -1/2, and 0
    assert entropy_loss([two, four, one], tokens).item() == pytest.approx(-0.5)


def test_a_choice_nobody_takes_is_pulled_by_the_log_of_one_token():
    a = torch.tensor([[1.0, 0.0]], requires_grad=True)
    entropy_loss([a], [torch.tensor([8.0])]).backward()
    # d/da of a log max(a, 1/8) / log 2: (log 1 + 1) / log 2 and log(1/8) / log 2
    assert a.grad[0].tolist() == pytest.approx([1 / math.log(2), -3.0])


def test_examples_without_real_tokens_count_in_no_entropy():
    a = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    assert entropy_loss([a], [torch.tensor([2.0, 0.0])]).item() == pytest.approx(-1.0)


def test_shares_weigh_sites_by_their_macs_per_example_and_leave_padding_out():
    model = Pair()
    mask = torch.tensor([[True, True], [True, False]])
    model.mlp.choices.append(Choices(nu=one_hot([[0, 4], [2, 4]], 0), mask=mask))
    model.proj.choices.append(Choices(nu=one_hot([[1, 1], [3, 1]], 1), mask=mask))
    plan = model.mlp.conversion.plan
    p_mlp, p_proj = (macs_per_learner(site) for site in plan.sites)
    assert (p_mlp, p_proj) == (64, 32)
    taken = take_choices(model)
    expected = [(4 * 64 + 2 * 32) / (8 * 64 + 8 * 32), (2 * 64 + 3 * 32) / (4 * 64 + 4 * 32)]
    assert taken.shares.tolist() == pytest.approx(expected)
    run, full = taken.macs
    assert (run.sum() / full.sum()).item() == pytest.approx((4 * 64 + 2 * 32 + 2 * 64 + 3 * 32) / (12 * 96))
    assert taken.counts["mlp"].tolist() == [1, 0, 1, 0, 1]
    assert taken.counts["proj"].tolist() == [2, 0, 1, 0]


def test_losses_of_a_model_are_those_of_its_shares():
    model = Pair()
    model.mlp.choices.append(Choices(nu=one_hot([[0, 0], [4, 4]], 0), mask=None))
    model.proj.choices.append(Choices(nu=one_hot([[1, 1], [4, 4]], 1), mask=None))
    found = losses(model, budget=0.5)
    share = [2 * 32 / (8 * 64 + 8 * 32), 1.0]
    assert found["budget"].item() == pytest.approx(abs(sum(share) / 2 - 0.5))
    assert found["diversity"].item() == pytest.approx(-(share[1] - share[0]) / 2)
    assert found["entropy"].item() == 0


def test_several_forwards_are_one_larger_batch():
    together, apart = Pair(), Pair()
    mlp, proj = one_hot([[0, 3], [2, 4]], 0), one_hot([[1, 2], [4, 1]], 1)
    together.mlp.choices.append(Choices(nu=mlp, mask=None))
    together.proj.choices.append(Choices(nu=proj, mask=None))
    for row in (slice(0, 1), slice(1, 2)):
        apart.mlp.choices.append(Choices(nu=mlp[row], mask=None))
        apart.proj.choices.append(Choices(nu=proj[row], mask=None))
    found, expected = losses(apart, 0.5), losses(together, 0.5)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {name: value.item() for name, value in expected.items()}
    )


class Shared(torch.nn.Module):
    """An MLP that runs on three tokens and then on all five, and one that runs once."""

    def __init__(self):
        super().__init__()
        self.shared, self.own = (Mlp(torch.nn.functional.gelu) for _ in range(2))

    def forward(self, x):
        x = torch.cat([x[:, :2], x[:, 2:] + self.shared(x[:, 2:])], 1)
        x = x + self.shared(x)
        return x + self.own(x)


def test_a_site_called_on_other_numbers_of_tokens_in_each_forward_belongs_to_it():
    model, x = Shared(), torch.randn(2, 5, 16)
    model = acm_compiler.rewrite(model, acm_compiler.plan(model, x, learners=2)).train()
    for acm in sites(model).values():
        acm.state = "learners"
    relax(model, 1.0)
    model(x)
    model(x)
    taken = take_choices(model)
    assert [[choices.nu.shape[1] for choices in forward] for forward in taken.forwards] == [[8, 5]] * 2


def test_forwards_that_cannot_be_told_apart_are_refused():
    model = Pair()
    for _ in range(2):
        model.mlp.choices.append(Choices(nu=one_hot([[0, 0]], 0), mask=None))
    model.proj.choices.append(Choices(nu=one_hot([[1, 1]], 1), mask=None))
    with pytest.raises(UsageError, match="after every forward"):
        losses(model, 0.5)


def test_a_shared_site_counts_the_tokens_of_all_its_calls():
    model = relaxed(make_model(depth=1, calls=2))
    model(torch.randn(3, TOKENS, 6))
    taken = take_choices(model)
    assert len(taken.forwards) == 1
    assert taken.shares.shape == (3,)
    assert {site.nu.shape[1] for site in taken.forwards[0]} == {2 * TOKENS}


def relaxed(model):
    """`model` with gates that sample in training."""
    for acm in sites(model).values():
        acm.state = "learners"
    relax(model, 0.8)
    return model.train()


def test_losses_read_and_forget_the_forwards_and_refuse_without_any():
    model = relaxed(make_model())
    model(torch.randn(2, TOKENS, 6))
    losses(model, budget=0.6)
    with pytest.raises(NothingRecorded, match=r"relax.*use_reentrant=False"):
        losses(model, budget=0.6)


def test_a_copy_begins_without_the_forwards_that_no_losses_have_taken():
    model = relaxed(make_model())
    model(torch.randn(2, TOKENS, 6))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(NothingRecorded):
            losses(copied, 0.5)
    assert losses(model, 0.5)["budget"].requires_grad


def test_a_forward_of_padding_alone_has_losses_and_gradients_of_zero():
    model = relaxed(make_model())
    with batch(model, mask=torch.zeros(2, TOKENS, dtype=torch.bool)):
        model(torch.randn(2, TOKENS, 6))
    found = losses(model, budget=0.6)
    assert {name: value.item() for name, value in found.items()} == {"budget": 0, "entropy": 0, "diversity": 0}
    sum(found.values()).backward()
    gradients = [p.grad for acm in sites(model).values() for p in acm.gate.parameters() if p.grad is not None]
    assert gradients and not any(gradient.any() for gradient in gradients)


def test_evaluation_adds_nothing_to_the_losses():
    model = relaxed(make_model())
    with torch.no_grad():
        model(torch.randn(2, TOKENS, 6))
    model.eval()(torch.randn(2, TOKENS, 6))
    with pytest.raises(NothingRecorded):
        losses(model, budget=0.6)


@pytest.mark.parametrize("budget", [0, 1.5, "60%", None])
def test_a_budget_that_is_no_share_is_refused(budget):
    with pytest.raises(UsageError, match="budget must be a share"):
        losses(make_model(), budget)


@pytest.mark.parametrize("term", ["budget", "entropy", "diversity"])
def test_every_term_reaches_every_gate_and_no_learner(term):
    model = relaxed(make_model())
    model(torch.randn(4, TOKENS, 6))
    losses(model, budget=0.05)[term].backward()
    for acm in sites(model).values():
        assert acm.gate.outer.weight.grad.abs().sum() > 0
    last = list(sites(model).values())[-1]
    assert last.learners.w_out.grad is None


def test_padding_counts_in_no_term():
    real = torch.arange(TOKENS) < 3
    x = torch.randn(2, TOKENS, 6)
    found = {}
    for padding in (0.0, 7.0):
        model = Pair()
        for name, k_min in (("mlp", 0), ("proj", 1)):
            k = [[k_min + 1, 4, 2, *([4 if padding else k_min] * 2)], [2, 2, 3, *([1] * 2)]]
            nu = one_hot(k, k_min)
            model.get_submodule(name).choices.append(Choices(nu=nu, mask=real.expand(2, -1)))
        found[padding] = {name: value.item() for name, value in losses(model, 0.6).items()}
    assert found[0.0] == found[7.0]
    whole = relaxed(make_model())
    with batch(whole, mask=real.expand(2, -1)):
        whole(x)
    assert take_choices(whole).forwards[0][0].tokens.tolist() == [3, 3]


def test_gradients_of_the_budget_term_are_those_of_soft_choices():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    soft = logits.softmax(-1)
    hard = torch.nn.functional.one_hot(soft.argmax(-1), 5).float()
    model = Pair()
    model.mlp.choices.append(Choices(nu=hard + soft - soft.detach(), mask=None))
    found = losses(model, budget=0.01)["budget"]
    k = torch.arange(5.0)
    assert found.item() == pytest.approx((hard @ k).mean().item() / 4 - 0.01, rel=1e-5)
    (expected,) = torch.autograd.grad((soft @ k).mean() / 4, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(found, logits)
    torch.testing.assert_close(gradient, expected)


@pytest.fixture(scope="module")
def bert():
    """A tiny BERT with gates and random learners, two batches with padding, and their masks."""
    model, x = ALL["hf_bert"]()
    converted = acm_compiler.rewrite(model.eval(), acm_compiler.plan(model, x, init="random"))
    relax(converted, 0.8)
    for module in converted.modules():
        module.training = isinstance(module, ACM)  # no dropout: only the gates draw
    masks = [torch.arange(7) < torch.tensor(lengths)[:, None] for lengths in ((7, 3), (2, 5))]
    return converted, [torch.randint(0, 50, (2, 7)) for _ in masks], [mask.long() for mask in masks]


def losses_after(model, *calls, seed=3):
    torch.manual_seed(seed)
    for call in calls:
        call()
    return losses(model, 0.5)


def given_both_ways(model, x, mask):
    """The call alone, and the same inside of acm.batch; both attend by the mask."""

    def inside():
        with batch(model, mask=mask):
            model(x, attention_mask=mask)

    return lambda: model(x, attention_mask=mask), inside


def test_padding_that_the_call_marks_counts_in_no_loss(bert):
    model, (x, other), (mask, other_mask) = bert
    alone, inside = given_both_ways(model, x, mask)
    found, expected = losses_after(model, alone), losses_after(model, inside)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    placed = losses_after(model, lambda: model(x, mask))
    assert all(torch.equal(placed[name], expected[name]) for name in expected)

    def all_count():
        with batch(model, mask=torch.ones_like(mask)):
            model(x, attention_mask=mask)

    assert losses_after(model, all_count)["entropy"] != expected["entropy"]
    # several forwards before one call of losses, each with a mask of its own, and one without any
    more = given_both_ways(model, other, other_mask)
    found = losses_after(model, alone, more[0], lambda: model(x))
    expected = losses_after(model, inside, more[1], lambda: model(x))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_padding_is_left_out_whether_the_mask_has_rows_of_queries_or_the_call_leaves_out_the_head(bert):
    model, (x, _), (mask, _) = bert
    expected = losses_after(model, given_both_ways(model, x, mask)[1])
    per_query = mask[:, None, None].bool().expand(2, 1, 7, 7)
    added = torch.zeros(2, 1, 1, 7).masked_fill(~per_query[:, :, :1], torch.finfo(torch.float32).min)
    calls = [
        *(functools.partial(model, x, attention_mask=rows) for rows in (per_query, added)),
        lambda: model.bert(x, mask),
        lambda: model.forward(x, mask),  # which calls its BERT
    ]
    for call in calls:
        found = losses_after(model, call)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_padding_is_left_out_where_checkpoints_compute_again_and_in_copies(bert):
    model, (x, _), (mask, _) = bert
    expected = losses_after(model, given_both_ways(model, x, mask)[1])
    copied = copy.deepcopy(model)
    for layer in copied.bert.encoder.layer:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    found = losses_after(copied, lambda: copied(x, attention_mask=mask).logits.sum().backward())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    relax(copied, None)
    assert not copied._forward_pre_hooks and model._forward_pre_hooks


def test_a_compiled_call_leaves_out_the_padding_that_its_mask_says(bert):
    model, (x, _), (mask, _) = bert
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = losses_after(model, given_both_ways(model, x, mask)[1])
    for call in (lambda: compiled(x, attention_mask=mask), lambda: compiled(x, mask)):
        found = losses_after(model, call)
        assert all(found[name].item() == pytest.approx(expected[name].item(), abs=1e-6) for name in expected)


def test_what_wraps_a_model_may_be_relaxed_and_a_relaxed_model_be_kept(bert):
    model, (x, _), (mask, _) = bert
    expected = losses_after(model, lambda: model(x, attention_mask=mask))
    wrapped = torch.nn.ModuleDict({"module": copy.deepcopy(model)})
    relax(wrapped, 0.8)
    again = pickle.loads(pickle.dumps(wrapped["module"]))
    for one in (wrapped["module"], again):
        found = losses_after(one, lambda: one(x, mask))  # noqa: B023
        assert all(torch.equal(found[name], expected[name]) for name in expected)
