"""Data that calibration keeps: moments, samples, gradients of random projections, padding."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from acm_compiler.acm import precision
from acm_compiler.calibration import examples as examples_module
from acm_compiler.calibration.answer import (
    answers,
    default_answer,
    energy,
    random_directions,
    root_probabilities,
    run,
)
from acm_compiler.calibration.calibrate import calibrate, calibrate_on
from acm_compiler.calibration.examples import Examples, Options, in_parts, masked
from acm_compiler.calibration.moments import Moments, Reservoir, SecondMoment
from acm_compiler.calibration.observe import observe
from acm_compiler.calibration.records import SiteRecord, WholeExamples
from acm_compiler.errors import BudgetUnreachable, DataError, LayoutUnknown, UsageError
from acm_compiler.passes.rewrite.conversion import rewritten, sites
from acm_compiler.passes.rewrite.dense_region import read_dense
from acm_compiler.passes.rewrite.rewrite import rewrite
from acm_compiler.runs.pipeline import plan
from acm_compiler.runtime.control import relax, set_k
from acm_compiler.runtime.usage import record as use_of
from acm_compiler.site import Layout
from tests.helpers.calibration_tiny import make_tiny, observed, texts
from tests.helpers.decoders import llama
from tests.helpers.models import WIDTH, Flattened, Mlp, Residual, Stack, example


def records_of(model):
    found = rewritten(model)
    dense = read_dense(found)
    return {s.name: SiteRecord(s, dense[s.name], sample=1000, seed=3) for s in found.plan.sites}


def test_moments_of_a_stream_are_those_of_all_of_it():
    data = torch.randn(9000, 7) @ torch.randn(7, 7) + 3
    moments = Moments()
    for block in data.split([1, 0, 4999, 4000]):
        moments.add(block)
    assert moments.count == 9000
    torch.testing.assert_close(moments.mean, data.double().mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moments.covariance, torch.cov(data.double().T, correction=0), rtol=1e-5, atol=1e-5)


def test_wide_moments_are_symmetric_and_whole():
    v, g = torch.randn(50, 600), torch.randn(40, 600)
    moments, metric = Moments(), SecondMoment()
    for part in v.split(20):
        moments.add(part)
    for part in g.split(20):
        metric.add(part)
        metric.count_tokens(len(part))
    torch.testing.assert_close(moments.covariance, torch.cov(v.double().T, correction=0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(metric.value(600, v.device), (g.T @ g).double() / 40, atol=1e-5, rtol=1e-4)
    assert torch.equal(moments.covariance, moments.covariance.T)


def test_weights_count_as_repetitions():
    data, weight = torch.randn(300, 4) + 2, torch.randint(0, 4, (300,))
    moments, repeated = Moments(), Moments()
    moments.add(data, weight.float())
    repeated.add(data.repeat_interleave(weight, 0))
    assert moments.count == int(weight.sum())
    torch.testing.assert_close(moments.mean, repeated.mean, rtol=1e-5, atol=1e-6)
    around = torch.randn(4, dtype=torch.float64)
    wanted = (data.repeat_interleave(weight, 0).double() - around).T @ (
        data.repeat_interleave(weight, 0).double() - around
    )
    torch.testing.assert_close(moments.spread_around(around), wanted / moments.count, rtol=1e-4, atol=1e-4)


def test_examples_are_kept_whole_until_there_is_no_room():
    kept = WholeExamples(10)
    g = torch.arange(40.0)[:, None]
    for first, lengths in ((0, (3, 4)), (2, (2, 9)), (4, (1, 1))):
        example_T = torch.repeat_interleave(torch.arange(first, first + 2), torch.tensor(lengths))
        for _ in range(2):  # a site that is called twice
            kept.offer(example_T[:, None].float(), example_T)(g[: len(example_T)])
    value = kept.take()
    # 3 + 4 + 2 tokens fit; the fourth example does not, and no later one is asked
    assert value.example_T.bincount().tolist() == [6, 8, 4]
    assert torch.equal(value.x_TD[:, 0].long(), value.example_T)
    assert value.g_TPO[:7, 0, 0].tolist() == list(range(7))
    assert value.at_T.tolist() == [*range(14), 14, 15, 25, 26]
    long, none = WholeExamples(2), WholeExamples(2)
    long.offer(torch.zeros(5, 1), torch.zeros(5, dtype=torch.long))(torch.zeros(5, 1))
    assert len(long.take().x_TD) == 5 and none.take() is None


def test_a_mean_far_from_zero_costs_the_covariance_no_digits():
    data = torch.randn(4000, 5) + 5000.0
    moments = Moments()
    for block in data.split(500):
        moments.add(block)
    wanted = torch.cov(data.double().T, correction=0)
    torch.testing.assert_close(moments.covariance, wanted, rtol=1e-4, atol=1e-4)


def test_moments_are_finite_while_their_squares_are():
    moments = Moments()
    moments.add(torch.tensor([[1.0, 2.0], [1e19, 3.0]]))
    assert moments.is_finite
    moments.add(torch.tensor([[1e25, 2.0]]))
    assert not moments.is_finite


def test_second_moments_count_tokens_that_no_gradient_reached():
    g, second = torch.randn(50, 4), SecondMoment()
    second.add(g)
    second.count_tokens(80)
    wanted = g.double().T @ g.double() / 80
    torch.testing.assert_close(second.value(4, g.device), wanted, rtol=1e-5, atol=1e-6)


def test_a_reservoir_keeps_every_token_with_the_same_chance_and_its_own_weight():
    kept = torch.zeros(200)
    for seed in range(300):
        reservoir = Reservoir(20, seed)
        for block in torch.arange(200.0)[:, None].split([5, 60, 100, 35]):
            reservoir.offer(block).weigh(block[:, 0] * 2)
            reservoir.flush()
        assert torch.equal(reservoir.weights, 2 * reservoir.vectors[:, 0])
        assert len(reservoir.vectors.unique()) == 20
        kept[reservoir.vectors[:, 0].long()] += 1
    # 300 * 20 / 200 = 30 expected each, standard deviation about 5
    assert kept.sum() == 6000 and kept.min() > 8 and kept.max() < 56
    assert kept[:100].mean() == pytest.approx(30, abs=2)


def test_a_small_stream_is_kept_whole_and_unweighted_tokens_weigh_nothing():
    reservoir = Reservoir(20, 0)
    first, second = torch.randn(7, 3), torch.randn(4, 3)
    reservoir.offer(first).weigh(torch.ones(7))
    reservoir.offer(second)
    reservoir.flush()
    assert torch.equal(reservoir.vectors, torch.cat([first, second]))
    assert reservoir.weights.tolist() == [1.0] * 7 + [0.0] * 4


def test_records_hold_the_moments_of_what_the_dense_site_computes():
    model, batches = make_tiny(), texts(3)
    inputs = {name: [] for name in sites(model)}
    for acm in sites(model).values():
        acm.tap = lambda acm, x, o: inputs[acm.name].append(x[acm.mask_of(x.shape[:-1]).reshape(x.shape[:2])])
    from acm_compiler.runtime.batch_context import batch

    for b in batches:
        with torch.no_grad(), batch(model, mask=b["attention_mask"]):
            model(**b)
    for acm in sites(model).values():
        acm.tap = None
    records, _ = observed(model, batches)
    block = {name.rpartition(".")[2]: (records[name], torch.cat(x)) for name, x in inputs.items()}
    hidden = {
        "proj": lambda x: x,
        "mlp": lambda x: sites(model)["blocks.0.mlp"].dense[:2](x),
        "glu": lambda x: (
            torch.nn.functional.silu(sites(model)["blocks.0.glu"].dense.a(x)) * sites(model)["blocks.0.glu"].dense.b(x)
        ),
    }
    for kind, (record, x) in block.items():
        h = hidden[kind](x).detach().double()
        torch.testing.assert_close(record.moments.mean, h.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(record.moments.covariance, torch.cov(h.T, correction=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(record.sample.vectors, x.detach())


def test_gradients_are_those_of_the_projected_output():
    model = make_tiny()
    (example,) = texts(1, batch=1, tokens=5)
    example = {"x": example["x"][:, :2], "attention_mask": torch.ones(1, 2, dtype=torch.long)}
    records, _ = observed(model, [example])
    dense, outputs = make_tiny(), {}
    for name, acm in sites(dense).items():
        acm.tap = lambda acm, x, o, name=name: outputs.__setitem__(name, o.requires_grad_())
    # a leaf must not be changed in place, as this model does: give it a graph
    for acm in sites(dense).values():
        acm.dense.requires_grad_(True)
    answer = dense(**example)
    along = random_directions([answer], None, first=0, seed=0)
    for name, output in outputs.items():
        if name != "blocks.0.mlp":  # its tensor was changed in place afterwards
            (g,) = torch.autograd.grad(answer, output, along, retain_graph=True)
            wanted = g[0].double().T @ g[0].double() / 2
            torch.testing.assert_close(records[name].metric.value(12, g.device), wanted, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(records[name].sample.weights, g[0].square().sum(1), rtol=1e-4, atol=1e-6)
    # the MLP's output is only added to a bypass: its gradient is that of the sum
    assert records["blocks.0.mlp"].metric.value(12, torch.device("cpu")).trace() > 0


def test_no_gradient_of_a_weight_is_computed():
    def mlp():  # without a bias, which would be a small parameter of its region
        return nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.GELU(), nn.Linear(32, WIDTH, bias=False))

    dense, x = nn.Sequential(Residual(mlp()), Residual(mlp())).eval(), torch.randn(2, 5, WIDTH)
    model = rewrite(dense, plan(dense, x))

    def flops(act):
        with FlopCounterMode(display=False) as counted:
            act()
        return counted.get_total_flops()

    def seen(number):
        found = rewritten(model)
        return observe(found, [(x, None)], {}, Options(backward_passes=number))

    # from the output to the second MLP's input, and so to the output of the first
    assert flops(lambda: seen(2)) - flops(lambda: seen(1)) == flops(lambda: dense[1](x))


def test_squared_projected_gradients_expect_the_squared_change_of_the_output():
    jacobian = torch.randn(6, 4)
    total = torch.zeros(4, 4)
    for seed in range(3000):
        v = torch.zeros(1, 4, requires_grad=True)
        output = v @ jacobian.T
        (g,) = torch.autograd.grad(output, v, random_directions([output], None, first=0, seed=seed))
        total += g.T @ g
    torch.testing.assert_close(total / 3000, jacobian.T @ jacobian, rtol=0.2, atol=0.6)


def test_several_backward_passes_expect_what_one_does_with_less_noise():
    """Squares of gradients scatter less around their mean, and each direction is another one."""
    example = texts(1, batch=1, tokens=5)[0]

    def shown(number, seed=0):
        return observed(make_tiny(), [example], seed=seed, backward_passes=number)[0]["blocks.0.glu"]

    found = {n: torch.stack([shown(n, seed).sample.weights.sum() for seed in range(24)]) for n in (1, 6)}
    assert float(found[6].mean()) == pytest.approx(float(found[1].mean()), rel=0.5)
    assert float(found[6].std()) < 0.7 * float(found[1].std())
    record = shown(6)
    whole = record.whole.take()
    assert whole.g_TPO.shape[:2] == (len(whole.x_TD), 6)
    listens_T = whole.g_TPO.square().sum((1, 2))
    torch.testing.assert_close(listens_T, record.sample.weights[whole.at_T])
    torch.testing.assert_close(
        record.metric.value(12, torch.device("cpu")).trace().float(), listens_T.mean(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("number", [1, 4])
def test_a_calibration_makes_as_many_backward_passes_of_a_batch_as_were_asked_for(number):
    model, passes = make_tiny(), []

    def answer(output, mask):
        if output.requires_grad:
            output.register_hook(passes.append)
        return output

    calibrate(model, texts(30), tokens=120, gradient_tokens=1, backward_passes=number, answer=answer)
    assert len(passes) == number


@pytest.mark.parametrize("number", [0, 1.0, True, None])
def test_a_number_of_backward_passes_that_is_none_is_refused(number):
    with pytest.raises(UsageError, match="backward_passes must be a whole number, at least 1"):
        calibrate(make_tiny(), texts(2), backward_passes=number)


def test_once_there_are_enough_gradients_batches_are_run_forward_for_the_moments_alone():
    batches, grads = texts(6), []

    def answer(output, mask):
        grads.append(torch.is_grad_enabled())
        return default_answer(output, mask)

    asked = iter([False, False, True])
    found, seen = observed(make_tiny(), batches, answer=answer, backward_passes=2, enough=lambda: next(asked))
    every, total = observed(make_tiny(), batches, backward_passes=2)
    first, part = observed(make_tiny(), batches[:2], backward_passes=2)
    assert grads == [True, True] and (seen.examples, seen.judged) == (24, 8)
    assert seen.examples == total.examples == total.judged and seen.energy == part.energy
    for name, record in found.items():
        assert record.tokens == every[name].tokens > first[name].tokens
        assert torch.equal(record.moments.covariance, every[name].moments.covariance)
        assert torch.equal(record.metric.value(12, record.home), first[name].metric.value(12, record.home))
        assert torch.equal(record.sample.vectors, first[name].sample.vectors)
        assert torch.equal(record.sample.weights, first[name].sample.weights)


class Twice(torch.nn.Module):
    """An MLP that may be called once more than planned, and a head."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        self.norm, self.head, self.again = torch.nn.LayerNorm(8), torch.nn.Linear(8, 3), False

    def forward(self, x):
        x = x + self.inner(self.norm(x))
        if self.again:
            x = x + self.inner(self.norm(x))
        return self.head(x)


@pytest.fixture
def linears(monkeypatch):
    """Sizes of the outputs of all linear layers that are run."""
    sizes, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: sizes.append(len(args[1])) or linear(*args))
    return sizes


@pytest.mark.parametrize("again", [False, True])
def test_batches_without_gradients_end_at_the_last_site_unless_it_is_called_more_often_than_planned(again, linears):
    original, data = Twice().eval(), [torch.randn(4, 3, 8) for _ in range(6)]
    model = rewrite(original, plan(original, data[0]))
    model.again = again
    linears.clear()
    asked = iter([False, False, *[True] * 4])
    records, seen = observed(model, data, enough=asked.__next__)
    (record,) = records.values()
    assert linears.count(3) == (6 if again else 2) and seen.examples == 24
    assert record.tokens == 6 * 12 * (1 + again)


def test_hidden_activations_are_those_that_the_model_computes(linears):
    original, data = Twice().eval(), [torch.randn(4, 3, 8) for _ in range(3)]
    model = rewrite(original, plan(original, data[0]))
    linears.clear()
    (record,) = observed(model, data)[0].values()
    assert linears == [16, 8, 3] * 3
    h = torch.cat([original.inner[:2](original.norm(x)).flatten(0, 1) for x in data]).double()
    torch.testing.assert_close(record.moments.mean, h.mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(record.moments.covariance, torch.cov(h.T, correction=0), rtol=1e-4, atol=1e-6)


def test_rows_of_many_tokens_are_run_in_parts_where_much_is_kept_of_them():
    ids = torch.arange(24 * 90).view(24, 90)
    rows = [ids[at : at + 6] for at in range(0, 24, 6)] * 2
    batches = [({"input_ids": part, "attention_mask": part >= 0, "flag": None}, None) for part in rows]
    examples = Examples(batches, tokens=9, apart=True)
    assert [len(inputs["input_ids"]) for inputs, _ in examples.read(lambda: False)] == [6] * 7
    assert [len(inputs["input_ids"]) for inputs, _ in examples.held_out] == [2] * 3
    assert all(inputs["attention_mask"].shape == (2, 90) for inputs, _ in examples.held_out)
    assert torch.equal(torch.cat([inputs["input_ids"] for inputs, _ in examples.held_out]), ids[6:12])
    assert [len(inputs["input_ids"]) for inputs, _ in Examples([*batches], tokens=9).read(lambda: False)] == [6] * 7


def ragged(lengths, columns):
    """A batch of numbered tokens, rows of these lengths before padding."""
    mask = torch.arange(columns) < torch.tensor(lengths)[:, None]
    ids = torch.arange(1, len(lengths) * columns + 1).view(-1, columns) * mask
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.mark.parametrize("given", [True, False])
def test_held_out_rows_come_without_padding_where_batches_of_several_lengths_were_read(given):
    lengths = [90, 20, 3, 90, 0, 20, 60]
    batches = [(ragged([8, 8], 8 + 2 * number), None) for number in range(5)]
    held_out = ragged(lengths, 90)
    batches.append((held_out, held_out["attention_mask"].bool() if given else None))
    examples = Examples([*batches, (ragged([8], 8), None)], tokens=9, apart=True)
    list(examples.read(lambda: False))
    parts = examples.held_out
    assert [tuple(inputs["input_ids"].shape) for inputs, _ in parts] == [(2, 90), (3, 60), (2, 3)]
    rows = [row[row > 0].tolist() for inputs, _ in parts for row in inputs["input_ids"]]
    assert sorted(rows) == sorted(row[row > 0].tolist() for row in held_out["input_ids"])
    for inputs, mask in parts:
        assert torch.equal(inputs["attention_mask"] > 0, inputs["input_ids"] > 0)
        assert (mask is not None) is given and (mask is None or torch.equal(mask, inputs["input_ids"] > 0))


@pytest.mark.parametrize(
    "changes",
    [
        {"decoder_input_ids": torch.ones(6, 90, dtype=torch.int64)},  # which the mask does not speak of
        {"attention_mask": torch.ones(6, 90, 90)},  # of one row per query
        {"attention_mask": None},
    ],
)
def test_held_out_rows_keep_columns_that_the_mask_of_tokens_does_not_rule(changes):
    held_out = {name: value for name, value in (ragged([9] * 6, 90) | changes).items() if value is not None}
    batches = [(ragged([8, 8], 8 + 2 * number), None) for number in range(5)]
    examples = Examples([*batches, (held_out, None)], tokens=9, apart=True)
    list(examples.read(lambda: False))
    assert [tuple(inputs["input_ids"].shape) for inputs, _ in examples.held_out] == [(2, 90)] * 3


@pytest.mark.parametrize("tokens, forward_alone", [(1024, [4]), (18, [3, 1])])
def test_batches_in_parts_have_the_statistics_of_whole_ones(monkeypatch, tokens, forward_alone):
    monkeypatch.setattr(examples_module, "_AT_ONCE", 12)
    monkeypatch.setattr(examples_module, "_FORWARD_ALONE", tokens)
    sizes, records = {}, {}
    for apart in (False, True):
        model, asked, ran = make_tiny(), iter([False, False, True]), []
        model.embed.register_forward_pre_hook(lambda module, args, ran=ran: ran.append(len(args[0])))
        records[apart], seen = observed(model, texts(4), enough=lambda asked=asked: next(asked), apart=apart)
        assert (seen.examples, seen.judged) == (16, 8)
        sizes[apart] = ran
    assert sizes == {False: [4] * 4, True: [2] * 4 + forward_alone * 2}
    for name, whole in records[False].items():
        parts = records[True][name]
        torch.testing.assert_close(parts.moments.covariance, whole.moments.covariance, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(
            parts.metric.value(12, parts.home), whole.metric.value(12, whole.home), rtol=1e-4, atol=1e-6
        )
        assert torch.equal(parts.sample.vectors, whole.sample.vectors)


def test_rows_without_padding_have_the_moments_of_padded_ones(monkeypatch):
    monkeypatch.setattr(examples_module, "_AT_ONCE", 12)
    original = llama()
    batches = [ragged([6, 2, 6], 6), ragged([5, 5, 5], 5), ragged([9, 2, 3, 0], 9), ragged([2, 9], 9)]
    batches = [batch | {"input_ids": batch["input_ids"] % original.config.vocab_size} for batch in batches]
    records, ran = {}, []
    for apart in (False, True):
        model, asked = rewrite(original, plan(original, batches[0], sites=["mlp"])), iter([False, False, False, True])
        model.model.embed_tokens.register_forward_pre_hook(lambda module, args: ran.append(tuple(args[0].shape)))
        records[apart], seen = observed(model, batches, enough=lambda asked=asked: next(asked), apart=apart)
        assert (seen.examples, seen.judged) == (12, 10)
    assert ran == [(3, 6), (3, 5), (4, 9), (2, 9), (2, 6), (1, 6), (2, 5), (1, 5), (1, 9), (3, 3), (2, 9)]
    for name, whole in records[False].items():
        parts = records[True][name].moments
        assert parts.count == whole.moments.count == 14 + 15 + 14 + 11
        torch.testing.assert_close(parts.covariance, whole.moments.covariance, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(64, 100),  # features
        torch.randint(0, 9, (3, 300, 300)),  # pictures
        (torch.randint(0, 9, (8, 100)), torch.randn(100, 8)),  # what is not by row
        torch.randint(0, 9, (1, 300)),
        torch.randint(0, 9, (48, 4)),
    ],
)
def test_other_batches_are_run_whole(inputs):
    (only,) = in_parts((inputs, None))
    assert all(one is other for one, other in zip(tree_leaves(only[0]), tree_leaves(inputs), strict=True))


def test_gradients_stop_at_the_tokens_asked_for():
    grads, wanted = [], {"tokens": 100, "gradient_tokens": 30}

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))

        def forward(self, x):
            grads.append(torch.is_grad_enabled())
            return x + self.inner(x)

    model, data = Watched().eval(), [torch.randn(4, 3, 8) for _ in range(12)]
    calibrate(rewrite(model, plan(model, data[0])), data, **wanted)
    with_gradients = [grad for grad in grads if grad]
    grads.clear()
    calibrate(rewrite(model, plan(model, data[0])), data, tokens=100)
    assert len(with_gradients) == 3 and sum(grads) == 9
    with pytest.raises(UsageError, match="tokens"):
        calibrate(rewrite(model, plan(model, data[0])), data, gradient_tokens=0)


def test_a_model_read_in_bfloat16_has_nearly_the_same_statistics(monkeypatch):
    monkeypatch.setattr(precision, "is_fast_in_bfloat16", lambda device: True)  # slow is as good here
    model, data = make_tiny(), texts(24)
    records = {fast: observed(model, data, fast=fast)[0] for fast in (False, True)}
    for name, exact in records[False].items():
        rounded = records[True][name]
        metrics = [record.metric.value(12, torch.device("cpu")) for record in (rounded, exact)]
        for found, expected in [(rounded.moments.covariance, exact.moments.covariance), metrics]:
            assert found.dtype == torch.float64 and (found - expected).norm() / expected.norm() < 0.02
        assert rounded.tokens == exact.tokens
    answers = {}
    for kind in ("fp32", "bf16"):
        calibrate(fresh := make_tiny(), data, tokens=400, precision=kind)
        set_k(fresh, 2)
        with torch.no_grad():
            answers[kind] = fresh(**data[0])
    assert (answers["bf16"] - answers["fp32"]).norm() / answers["fp32"].norm() < 0.05


@pytest.mark.parametrize("masked", [False, True])
def test_roots_of_probabilities_have_their_gradient_and_none_at_padding(masked):
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]]) if masked else None
    roots = root_probabilities(logits, mask)
    kept = torch.ones(2, 3, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(roots.square().sum(-1), 4 * kept.double())
    torch.testing.assert_close(roots[kept], 2 * logits.softmax(-1).sqrt()[kept])
    assert torch.autograd.gradcheck(lambda z: root_probabilities(z, mask), logits)
    small = root_probabilities(torch.randn(2, 3, 7).bfloat16().requires_grad_(), mask)
    assert small.dtype == torch.float32
    (gradient,) = torch.autograd.grad(roots.sum(), logits)
    assert not gradient[~kept].any()


def test_roots_of_probabilities_keep_one_tensor_for_the_gradient():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        root_probabilities(torch.randn(2, 3, 7, requires_grad=True))
    assert len(saved) == 1


def test_energies_are_sums_of_squares_without_padding():
    output, mask = torch.randn(3, 4, 5).half(), torch.rand(3, 4) > 0.4
    assert energy([output], mask) == pytest.approx(float(output.double()[mask].square().sum()), rel=1e-6)
    assert energy([output.double(), output[:, 0, 0]], None) == pytest.approx(
        float(output.double().square().sum() + output[:, 0, 0].double().square().sum()), rel=1e-6
    )


def test_padding_and_batching_change_nothing():
    batches = texts(4)
    together, seen = observed(make_tiny(), batches)
    singles = [
        {"x": b["x"][i : i + 1, :length], "attention_mask": torch.ones(1, length, dtype=torch.long)}
        for b in batches
        for i, length in enumerate(b["attention_mask"].sum(1).tolist())
    ]
    alone, seen_alone = observed(make_tiny(), singles)
    assert seen.examples == seen_alone.examples == 16
    assert seen.energy == pytest.approx(seen_alone.energy, rel=1e-5)
    for name, record in together.items():
        other = alone[name]
        assert record.tokens == other.tokens == sum(int(b["attention_mask"].sum()) for b in batches)
        for mine, its in (
            (record.moments.mean, other.moments.mean),
            (record.moments.covariance, other.moments.covariance),
            (record.metric.value(12, record.home), other.metric.value(12, record.home)),
            (record.sample.vectors, other.sample.vectors),
            (record.sample.weights, other.sample.weights),
        ):
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-5)


def test_a_mask_of_the_call_that_speaks_of_other_tokens_is_passed_over():
    model = make_tiny()
    for acm in sites(model).values():
        acm.layout = Layout(batch_axis=1)
    records, _ = observed(model, texts(1))
    assert {r.tokens for r in records.values()} == {24}


def test_a_mask_given_explicitly_must_fit():
    model = make_tiny()
    (example,) = texts(1)
    with pytest.raises(LayoutUnknown, match=r"blocks\.0\.proj"):
        observe(rewritten(model), [(example, torch.ones(4, 9))], records_of(model), Options())


def test_observing_leaves_no_trace():
    model = make_tiny()
    model.embed.weight.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    observed(model, texts(2))
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert all(acm.tap is None for acm in sites(model).values())
    with pytest.raises(UsageError):
        observed(model, texts(2), answer=lambda output, mask: [output.long()])
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(acm.tap is None for acm in sites(model).values())


def test_every_sixth_batch_is_held_out_and_reading_stops_when_there_is_enough():
    drawn = []

    def endless():
        for i in range(1000):
            drawn.append(i)
            yield torch.full((1,), i), None

    examples = Examples(endless(), tokens=12)
    for _ in examples.read(lambda: len(examples.fitted) >= 12):
        pass
    assert [int(x) for x, _ in examples.held_out] == [5, 11]
    assert [int(x) for x, _ in examples.fitted] == [i for i in range(14) if i not in (5, 11)]
    assert len(drawn) == 14


@pytest.mark.parametrize("tokens, every", [(24_576, 6), (40_960, 10)])
def test_of_many_tokens_no_more_are_held_out_than_tell(tokens, every):
    examples = Examples(masked(list(torch.arange(40.0)[:, None])), tokens=tokens)
    list(examples.read(lambda: False))
    assert [int(x) for x, _ in examples.held_out] == list(range(every - 1, 40, every))


def test_few_batches_serve_for_both():
    examples = Examples(masked([torch.zeros(1), torch.ones(1)]), tokens=2)
    assert len(list(examples.read(lambda: False))) == 2
    assert [int(x) for x, _ in examples.held_out] == [0, 1]


def test_no_batches_is_an_error():
    with pytest.raises(DataError, match="no batches"):
        list(Examples(masked([])).read(lambda: False))


def test_a_model_that_autocasts_by_itself_is_recorded_in_its_own_types():
    batches, wanted = texts(4), make_tiny()
    plain, _ = observed(wanted, batches)
    model = make_tiny()
    glu, inner = model.blocks[0].glu, model.blocks[0].glu.forward
    glu.forward = torch.autocast("cpu", torch.bfloat16)(inner)
    cast, _ = observed(model, batches)
    covariances = (records["blocks.0.glu"].moments.covariance for records in (cast, plain))
    torch.testing.assert_close(*covariances, rtol=1e-5, atol=1e-7)  # bfloat16's would differ by one in a hundred


def test_batches_made_in_inference_mode_can_be_used():
    with torch.inference_mode():
        batches = texts(1)
    examples = Examples(masked(batches))
    ((inputs, _),) = examples.read(lambda: False)
    assert not inputs["x"].is_inference()


class Output(dict):
    __getattr__ = dict.get


@pytest.mark.parametrize(
    ("output", "picked"),
    [
        (Output(last_hidden_state=torch.ones(1, 2, 3), pooler_output=torch.ones(1, 3)), 1),
        ((torch.ones(1, 2), torch.ones(1, dtype=torch.long), [torch.ones(1, 4)]), 2),
        (torch.ones(2, 3), 1),
        ({"a": torch.ones(2, 3), "b": None}, 1),
    ],
)
def test_what_matters_of_an_output(output, picked):
    assert len(answers(output, default_answer)) == picked


def test_logits_under_other_names_are_judged_as_logits_beside_what_else_there_is():
    tokens, examples, boxes = torch.randn(2, 3, 5), torch.randn(2, 4), torch.randn(2, 3, 4)
    output = {"prediction_logits": tokens, "loss": None, "chain_logits": examples, "boxes": boxes}
    by_token, by_example, as_is = answers(output, default_answer)
    torch.testing.assert_close(by_token, 2 * tokens.softmax(-1).sqrt())
    torch.testing.assert_close(by_example, examples - examples.mean(-1, keepdim=True))
    assert as_is is boxes


def test_logits_of_pixels_are_left_whole():
    logits = torch.randn(2, 4, 6, 5)  # a class at axis 1
    stripe = torch.zeros_like(logits).index_fill_(1, torch.tensor([2]), 3.0)  # moves one class along whole rows
    (before,), (after,) = (answers(Output(logits=z), default_answer) for z in (logits, logits + stripe))
    torch.testing.assert_close(after - before, stripe)


def test_logits_matter_up_to_what_all_classes_share():
    z = torch.randn(2, 5)
    (a,), (b,) = (answers(Output(logits=logits), default_answer) for logits in (z, z + 7))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("never", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 5)])
@pytest.mark.parametrize("named", [True, False])
def test_what_a_model_never_predicts_counts_for_nothing(never, shape, named):
    z = torch.randn(shape).requires_grad_()
    masked_z = z.masked_fill(torch.arange(5) == 2, never)
    (judged,) = answers(Output(logits=masked_z) if named else masked_z, default_answer)
    assert judged.isfinite().all() and (judged[..., 2] == 0).all()
    (grad,) = torch.autograd.grad(judged.square().sum(), z)
    assert grad.isfinite().all() and (grad[..., 2] == 0).all()
    if named and len(shape) == 2:
        others = z[..., [0, 1, 3, 4]]
        torch.testing.assert_close(judged[..., [0, 1, 3, 4]], others - others.mean(-1, keepdim=True))


def test_logits_of_tokens_matter_as_far_as_they_are_likely():
    z = torch.randn(2, 3, 5, dtype=torch.float64)
    likely, unlikely = z.clone(), z.clone()
    likely[..., 0] += 40
    unlikely[..., 0] -= 40
    for logits, moves in ((likely, False), (z, True), (unlikely, False)):
        logits.requires_grad_()
        (judged,) = answers(Output(logits=logits), default_answer)
        torch.testing.assert_close(judged, 2 * logits.softmax(-1).sqrt())
        (grad,) = torch.autograd.grad(judged.sum(), logits)
        assert bool(grad[..., 0].abs().max() > 1e-6) == moves


def test_an_output_without_numbers_is_refused():
    with pytest.raises(UsageError, match="no floating tensor"):
        answers({"ids": torch.ones(2, dtype=torch.long)}, default_answer)


@pytest.mark.parametrize("batches", [torch.ones(2, 3), {"x": torch.ones(2)}, None, 3])
def test_one_batch_is_no_iterable_of_batches(batches):
    with pytest.raises(UsageError, match=r"\[batch\]"):
        masked(batches)


def test_options_without_meaning_are_refused():
    for tokens in (0, 400.5, float("inf"), float("nan"), True):
        with pytest.raises(UsageError, match=f"found {tokens}, expected a whole number, at least 1"):
            Options(tokens=tokens)
    with pytest.raises(UsageError, match=r"found 1\.5, expected a whole number, at least 1"):
        Options(gradient_tokens=1.5)
    assert Options(tokens=2e4).tokens == 20_000
    with pytest.raises(BudgetUnreachable, match=r"found 0\.01, expected 0\.\d+ to 1"):
        calibrate_on(make_tiny(), masked(texts(1)), options=Options(budgets=(0.5, 0.01)))
    with pytest.raises(UsageError, match=r"found 'int8', expected fp32 or bf16"):
        Options(precision="int8")
    with pytest.raises(UsageError, match=r"a share of learner MACs in .*found 3\.0"):
        calibrate_on(make_tiny(), masked(texts(1)), options=Options(budgets=(3.0,)))


def test_energy_leaves_padding_out():
    mask = torch.tensor([[True, False], [True, True]])
    tensor = torch.tensor([[[1.0], [100.0]], [[2.0], [3.0]]])
    assert energy([tensor], mask) == 14.0
    assert energy([tensor[:, 0]], mask) == 5.0


class _Masked(nn.Module):
    """A model whose second argument is optional, so that labels would pass for it."""

    def __init__(self):
        super().__init__()
        self.inner = Stack(Residual(Mlp()))

    def forward(self, x, mask=None):
        return self.inner(x) if mask is None else self.inner(x * mask.view(-1, 1, 1))


@pytest.mark.parametrize("labels", [torch.zeros(2, dtype=torch.int64), torch.rand(2, 1)])
def test_labels_in_a_batch_are_refused_and_not_passed_on(labels):
    dense = _Masked().eval()
    model = rewrite(dense, plan(dense, example()))
    for act in (calibrate, lambda model, batches: run(rewritten(model), batches[0])):
        with pytest.raises(UsageError, match="looks like labels") as caught:
            act(model, [[example(), labels]])
        assert "for x, label in loader" in caught.value.fix
    run(rewritten(model), {"x": example(), "mask": labels})  # named, they are meant
    run(rewritten(rewrite(dense, plan(dense, (example(), labels)))), (example(), labels))


@torch.library.custom_op("acm_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An operator without a formula for its gradient."""
    return x * 2


doubled.register_fake(torch.empty_like)
_LIBRARY = torch.library.Library("acm_tests", "FRAGMENT")
_LIBRARY.define("tripled(Tensor x) -> Tensor")
_LIBRARY.impl("tripled", lambda x: x * 3, "CPU")
_LIBRARY.impl("tripled", torch.empty_like, "Meta")


@pytest.mark.parametrize("operator", ["doubled", "tripled"])
def test_an_operator_without_a_gradient_is_named_with_the_remedy(operator):
    class Custom(Residual):
        def forward(self, x):
            return getattr(torch.ops.acm_tests, operator)(super().forward(x))

    dense = Stack(Custom(Mlp())).eval()
    with pytest.raises(UsageError, match=f"no gradient, .*found acm_tests::{operator}") as caught:
        calibrate(rewrite(dense, plan(dense, example())), [example()])
    assert "register_autograd" in caught.value.fix


def test_tokens_that_lie_along_the_batch_are_told_apart_at_other_lengths_than_planned():
    model = Flattened(Mlp()).eval()
    model = rewrite(model, plan(model, torch.randn(2, 5, WIDTH)))
    lengths = torch.tensor([6, 4, 3])
    batch = {"x": torch.randn(3, 6, WIDTH), "attention_mask": (torch.arange(6) < lengths[:, None]).long()}
    singles = [{"x": batch["x"][i : i + 1, :length]} for i, length in enumerate(lengths)]
    seen = []
    for batches in ([batch], singles):
        records = records_of(model)
        examples = [(inputs, None) for inputs in batches]
        assert observe(rewritten(model), examples, records, Options(backward_passes=1)).examples == 3
        seen.append(records["inner"])
    assert seen[0].tokens == seen[1].tokens == 13
    torch.testing.assert_close(seen[0].moments.covariance, seen[1].moments.covariance, rtol=1e-5, atol=1e-5)
    calibrate(model, [batch, *singles] * 3, tokens=80)
    with torch.no_grad(), use_of(model) as usage:
        model(**batch)
    assert [(k_S >= 0).sum() for k_S in usage.k["inner"]] == lengths.tolist()
    for share, single in zip(usage.shares, singles, strict=True):
        with torch.no_grad(), use_of(model) as alone:
            model(**single)
        assert share == pytest.approx(float(alone.shares))
    relax(model.train(), 0.8)
    model(**batch)
    (choices,) = sites(model)["inner"].choices
    assert choices.nu.shape[:2] == (3, 6) and torch.equal(choices.mask, batch["attention_mask"].bool())
