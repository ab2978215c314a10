"""Budgets of their own for a decoder's two phases: reading a prompt, and writing token by token."""

import dataclasses

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import BudgetUnreachable, LayoutUnknown, UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runtime.measure_budgets import measure_budgets

transformers = pytest.importorskip("transformers")
DynamicCache = transformers.DynamicCache
SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 64, "bos_token_id": 0}
PHASES = {"prefill": 0.75, "decode": 0.3}


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, eos_token_id=None, pad_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    plan = acm.plan(model, {"input_ids": torch.ones(1, 9, dtype=torch.int64)}, sites="mlp", init="random")
    converted = acm.rewrite(model, plan)
    with torch.no_grad():
        for site in acm.sites(converted).values():
            for parameter in (*site.gate.parameters(), *site.learners.parameters()):
                parameter.copy_(torch.randn_like(parameter) * 0.4)
    measure_budgets(converted, [({"input_ids": torch.randint(1, 60, (8, 20))}, None)])
    return converted


@pytest.fixture
def model(made):
    yield made
    acm.set_k(made, 4)
    conversion(made).budget = None


def prompts(count: int = 3, tokens: int = 7):
    return torch.randint(1, 60, (count, tokens), generator=torch.Generator().manual_seed(1))


def run_of(model, ids, cache):
    with torch.no_grad(), acm.record(model) as usage:
        out = model(ids, cache, use_cache=True)  # by place: its name differs between releases of transformers
    return usage.k, out.logits


def test_each_phase_runs_the_learners_of_its_own_budget(model):
    ids = prompts()
    acm.set_budget(model, PHASES["prefill"])
    prefill, logits = run_of(model, ids, cache := DynamicCache())
    token = logits[:, -1:].argmax(-1)
    acm.set_budget(model, PHASES["decode"])
    decode, _ = run_of(model, token, cache)
    assert acm.set_budget(model, PHASES) == pytest.approx(PHASES)
    both, _ = run_of(model, ids, cache := DynamicCache())
    then, _ = run_of(model, token, cache)
    for name in prefill:
        assert torch.equal(both[name], prefill[name]) and torch.equal(then[name], decode[name])
    assert any(not torch.equal(run_of(model, ids, DynamicCache())[0][n][:, -1:], then[n]) for n in then)


def test_generate_follows_both_budgets(model):
    ids = prompts()
    acm.set_budget(model, PHASES)
    with acm.record(model) as usage:
        model.generate(ids, max_new_tokens=12, do_sample=False)
    for k in usage.k.values():
        assert k.shape == (3, 7 + 11)
    total = sum(k.float() for k in usage.k.values()) / (4 * len(usage.k))
    assert float(total[:, 7:].mean()) < float(total[:, :7].mean()) - 0.2


def test_beams_take_a_budget_for_each_of_their_rows(model):
    ids, options = prompts(2), {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    with acm.batch(model, budgets=[0.4, 0.9]), pytest.raises(LayoutUnknown, match="of beams and num_return_sequences"):
        model.generate(ids, **options)
    with acm.batch(model, budgets=[0.4, 0.4, 0.9, 0.9]):
        both = model.generate(ids, **options)
    for row, budget in enumerate((0.4, 0.9)):
        acm.set_budget(model, budget)
        assert torch.equal(model.generate(ids[row : row + 1], **options), both[row : row + 1])


def test_padded_prompts_are_answered_as_alone(model):
    ids = prompts(2)
    acm.set_budget(model, PHASES)
    alone = model.generate(ids[1:, 3:], max_new_tokens=6, do_sample=False)[0, 4:]
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[1, :3] = mask[1, :3] = 0
    with acm.record(model) as usage:
        together = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)[1, 7:]
    assert torch.equal(alone, together)
    for k in usage.k.values():
        assert (k[1, :3] == -1).all() and (k[1, 3:] >= 0).all() and (k[0] >= 0).all()


def test_without_a_cache_every_call_is_prefill(model):
    acm.set_budget(model, PHASES["prefill"])
    one = model.generate(prompts(), max_new_tokens=5, do_sample=False, use_cache=False)
    acm.set_budget(model, PHASES)
    assert torch.equal(one, model.generate(prompts(), max_new_tokens=5, do_sample=False, use_cache=False))


def test_phase_budgets_are_kept_and_come_back(model, tmp_path):
    acm.set_budget(model, PHASES)
    expected = model.generate(prompts(), max_new_tokens=8, do_sample=False)
    acm.save(model, tmp_path / "out")
    loaded = acm.load(tmp_path / "out")
    assert torch.equal(loaded.generate(prompts(), max_new_tokens=8, do_sample=False), expected)
    assert conversion(loaded).budget == PHASES and "prefill 0.750, decode 0.300" in str(acm.status(loaded))
    acm.set_k(model, 1)
    acm.set_k(model, None)
    assert torch.equal(model.generate(prompts(), max_new_tokens=8, do_sample=False), expected)
    measure_budgets(model, [({"input_ids": prompts()}, None)])  # leaves what holds as it was
    assert torch.equal(model.generate(prompts(), max_new_tokens=8, do_sample=False), expected)
    acm.recalibrate(model, [{"input_ids": torch.randint(1, 60, (8, 20))}])
    assert conversion(model).budget == pytest.approx(PHASES)


def test_one_budget_holds_for_both_again(model):
    acm.set_budget(model, PHASES)
    acm.set_budget(model, 0.5)
    for site in acm.sites(model).values():
        values = site.run_time()
        assert all(values[name] == values[f"decode_{name}"] for name in ("knob", "k_lo", "k_hi"))


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ({"prefill": 0.5}, UsageError, "found prefill, expected prefill, decode"),
        ({"prefill": 0.5, "decode": 0.4, "encode": 1}, UsageError, "name both phases"),
        ({"prefill": 0.5, "decode": 1.4}, BudgetUnreachable, "1.4"),
    ],
)
def test_phases_that_cannot_be_meant_are_refused_and_change_nothing(model, budget, error, message):
    acm.set_budget(model, 0.5)
    before = [site.run_time() for site in acm.sites(model).values()]
    with pytest.raises(error, match=message):
        acm.set_budget(model, budget)
    for site, values in zip(acm.sites(model).values(), before, strict=True):
        assert site.run_time() == values


def test_a_site_that_cannot_tell_the_phases_apart_is_named(model):
    site = next(iter(acm.sites(model).values()))
    layout = site.layout
    site.layout = dataclasses.replace(layout, folds=4)
    try:
        with pytest.raises(LayoutUnknown, match=site.name):
            acm.set_budget(model, PHASES)
    finally:
        site.layout = layout
