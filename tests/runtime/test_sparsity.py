"""`acm.set_sparsity`: what a decoder skips, in which calls, and what it costs then."""

import copy
import inspect
import io

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import NotRewritten, UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from tests.helpers.decoders import drawn, gated, gated_llama, llama, written

transformers = pytest.importorskip("transformers")
BATCHES = [{"input_ids": drawn(4, 20)}, {"input_ids": drawn(3, 30)}]


@pytest.fixture(scope="module")
def measured():
    model = gated_llama()
    acm.set_budget(model, 0.6)
    acm.measure_sparsity(model, BATCHES, tokens=150)
    return model


@pytest.fixture
def model(measured):
    yield measured
    acm.set_sparsity(measured, None)
    acm.set_budget(measured, 0.6)


@torch.no_grad()
def read(model, ids):
    return model(input_ids=ids, use_cache=False).logits


@torch.no_grad()
def continued(model, ids, by=None):
    """Logits of the last token, which goes on from the others' cache; `by`: the model that does so."""
    parameters = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # as releases of transformers call it
    cache = transformers.DynamicCache()
    model(input_ids=ids[:, :-1], **{name: cache}, use_cache=True)
    return (model if by is None else by)(input_ids=ids[:, -1:], **{name: cache}, use_cache=True).logits


def reached(model, ids):
    with torch.no_grad(), acm.record(model) as usage:
        model(input_ids=ids)
    return usage


def test_calls_of_many_tokens_are_left_alone_and_calls_of_one_skip(model):
    ids = drawn(2, 12)
    whole, last = read(model, ids), continued(model, ids)
    acm.set_sparsity(model, 0.4)
    assert torch.equal(read(model, ids), whole)
    assert (continued(model, ids) - last).abs().max() > 1e-3
    assert "of what is chosen 40% are skipped in decode calls" in str(acm.status(model))
    acm.set_sparsity(model, None)
    assert torch.equal(continued(model, ids), last)


def test_explain_says_where_values_are_skipped(model):
    acm.set_sparsity(model, 0.4, calls="all")
    (first, _) = acm.explain(model, {"input_ids": drawn(1, 4), "use_cache": False}).sites
    assert first.implementation == "skipping" and "for up to 16 tokens" in first.reason


@pytest.mark.parametrize("share", [0.15, 0.3, 0.5])
def test_about_that_share_of_the_chosen_learners_is_skipped_and_the_record_says_so(model, share):
    ids = torch.cat([batch["input_ids"][:, :20] for batch in BATCHES])
    before = reached(model, ids)
    acm.set_sparsity(model, share, calls="all")
    after = reached(model, ids)
    # inputs that were cut make smaller hidden values, of which more are skipped
    assert 1 - after.budget / before.budget == pytest.approx(share, abs=0.07)
    assert (before.macs > after.macs).all() and after.kept_macs.equal(before.kept_macs)


def test_nothing_is_skipped_at_a_share_of_0(model):
    ids = drawn(2, 12)
    whole = read(model, ids)
    acm.set_sparsity(model, 0, calls="all")
    torch.testing.assert_close(read(model, ids), whole)
    assert reached(model, ids).budget == pytest.approx(0.6, abs=0.1)


def test_a_token_has_the_same_answer_whatever_its_neighbours_are(model):
    acm.set_sparsity(model, 0.4, calls="all")
    ids = drawn(5, 9)
    together = read(model, ids)
    torch.testing.assert_close(torch.cat([read(model, ids[i : i + 1]) for i in range(5)]), together)


def test_training_skips_nothing(model):
    ids = drawn(2, 12)
    whole = read(model, ids)
    acm.set_sparsity(model, 0.5, calls="all")
    for site in acm.sites(model).values():
        site.train()
    assert torch.equal(read(model, ids), whole)
    model.eval()


def test_generating_and_compiling_follow_it(model):
    prompt = [3, 5, 7, 11]
    plain = written(model, prompt)
    acm.set_sparsity(model, 0.5)
    skipped = written(model, prompt)
    assert skipped != plain
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="acm")
    ids = drawn(2, 8)
    found, expected = continued(model, ids, by=compiled), continued(model, ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_another_share_takes_no_other_graph(model):
    acm.set_sparsity(model, 0.2, calls="all")
    kept = {name: site.skips for name, site in acm.sites(model).items()}
    first = [site.skips.hidden.clone() for site in acm.sites(model).values()]
    acm.set_sparsity(model, 0.4, calls="all")
    for (name, site), before in zip(acm.sites(model).items(), first, strict=True):
        assert site.skips is kept[name] and (site.skips.hidden > before).any()


def test_sizes_are_saved_and_the_choice_is_not(model, tmp_path):
    acm.set_sparsity(model, 0.4, calls="all")
    expected = read(model, drawn(2, 12))
    acm.save(model, tmp_path / "saved")
    loaded = acm.load(tmp_path / "saved", base_model=llama())
    assert acm.status(loaded).sparsity is None
    acm.set_sparsity(loaded, 0.4, calls="all")
    torch.testing.assert_close(read(loaded, drawn(2, 12)), expected)


def test_it_holds_in_copies_and_other_types(model):
    acm.set_sparsity(model, 0.4, calls="all")
    ids = drawn(2, 12)
    other = copy.deepcopy(model)
    assert torch.equal(read(other, ids), read(model, ids))
    torch.save(other.state_dict(), io.BytesIO())
    assert not any("skips" in name for name in other.state_dict())
    other.bfloat16()
    assert read(other, ids).isfinite().all()


def test_lossless_learners_skip_at_k_n_too():
    model = gated(llama(), {"input_ids": torch.ones(1, 9, dtype=torch.int64)}, *BATCHES, lossless=True)
    # calibrated, so that what generates has been measured
    assert set(conversion(model).value_sizes) == set(acm.sites(model))
    acm.set_budget(model, 1)
    ids = drawn(2, 12)
    whole = read(model, ids)
    acm.set_sparsity(model, 0.3, calls="all")
    assert (read(model, ids) - whole).abs().max() > 1e-4
    assert reached(model, ids).budget == pytest.approx(0.7, abs=0.1)


@pytest.mark.parametrize("share", [-0.1, 0.7, "0.3", True, float("nan")])
def test_shares_out_of_range_are_refused(model, share):
    with pytest.raises(UsageError, match="share to skip"):
        acm.set_sparsity(model, share)


def test_batches_that_the_model_does_not_take_are_refused_in_words(model):
    with pytest.raises(UsageError, match=r"the model itself raises on a batch of .*\[2, 5\]"):
        acm.measure_sparsity(model, [torch.full((2, 5), 10**6)])
    with pytest.raises(UsageError, match=r"^tokens must count tokens \(found 0"):
        acm.measure_sparsity(model, BATCHES, tokens=0)


def test_what_cannot_skip_is_refused_in_words(model):
    with pytest.raises(UsageError, match="calls must be one kind"):
        acm.set_sparsity(model, 0.3, calls="prefill")
    with pytest.raises(UsageError, match="has not been measured"):
        acm.set_sparsity(gated_llama(), 0.3)
    with pytest.raises(UsageError, match="no site of this model can skip values"):
        acm.set_sparsity(gated_llama(sites="attn"), 0.3)
    with pytest.raises(NotRewritten):
        acm.set_sparsity(llama(), 0.3)


def test_what_takes_no_notice_of_skipping_refuses_it(model):
    acm.set_sparsity(model, 0.3)
    calls = (
        lambda: acm.quantize(model),
        lambda: acm.calibrate(model, BATCHES),
        lambda: acm.recalibrate(model, BATCHES),
        lambda: acm.measure_sparsity(model, BATCHES),
        lambda: acm.generate(model, drawn(1, 4), draft=0.5),
        lambda: acm.export(model, "nowhere", BATCHES[0]),
    )
    for call in calls:
        with pytest.raises(UsageError, match="for learners that skip no values"):
            call()
