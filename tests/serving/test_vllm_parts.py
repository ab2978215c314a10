"""The parts of the plugin for vLLM that need no vLLM: budgets of a folder and of tokens, ACMs in their places."""

import dataclasses

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import BudgetUnreachable, PlanMismatch, SitesNotFitted, StorageError, UsageError
from acm_compiler.passes.rewrite.conversion import Conversion
from acm_compiler.runtime.budgets import Setting
from acm_compiler.serving.vllm.budgets import Row, SavedBudgets, Settings, TokenSettings
from acm_compiler.serving.vllm.sites import Places
from tests.helpers.decoders import drawn, gated_llama, llama

SITES = ["mlp", "attn"]
LOW, HIGH = Setting(knob=3.0, k_lo=0, share=0.2), Setting(knob=0.5, k_lo=1, share=0.7)


@pytest.fixture(scope="module")
def model():
    return gated_llama(SITES)


def saved(model, folder, **options):
    acm.save(model, folder)
    return SavedBudgets.read(str(folder), options)


def test_the_saved_budget_holds_unless_the_server_or_a_request_names_another(model, tmp_path):
    acm.set_budget(model, 0.4)
    found = saved(model, tmp_path)
    assert not found.own.by_phase and found.own.decode.share == pytest.approx(0.4, abs=1e-3)
    asked = SavedBudgets.read(str(tmp_path), {"acm_budget": 0.7})
    assert asked.own.decode.share == pytest.approx(0.7, abs=1e-3)
    request = found.of_request({"budget": "95%", "prefill_budget": 1})
    assert request.prefill.share == 1 > request.decode.share > 0.4
    assert found.of_request({"prefill_budget": 1}).decode == found.own.decode
    with pytest.raises(BudgetUnreachable):
        found.of_request({"budget": 1.5})
    with pytest.raises(UsageError, match="prefill and decode"):
        SavedBudgets.read(str(tmp_path), {"acm_budget": {"decode": 0.4}})


def test_budgets_by_phase_are_read(model, tmp_path):
    acm.set_budget(model, {"prefill": 0.9, "decode": 0.3})
    found = saved(model, tmp_path)
    assert found.own.by_phase and found.own.prefill.share > 0.85 > 0.35 > found.own.decode.share


def test_a_fixed_k_is_refused_and_no_choice_runs_every_learner(model, tmp_path):
    acm.set_budget(model, 0.4)
    acm.set_k(model, 2)
    fixed = saved(model, tmp_path)
    with pytest.raises(UsageError, match="a k of its own"):
        filled(fixed)
    filled(SavedBudgets.read(str(tmp_path), {"acm_budget": 0.5}))
    plain = gated_llama()
    for site in acm.sites(plain).values():
        assert int(site.k_lo) == site.count
    found = saved(plain, tmp_path / "plain")
    assert found.own.decode.share == 1
    with pytest.raises(UsageError, match="must be the id of a token"):
        found.of_request({"thinking_budget": 0.5, "thinking_end": -1})
    acm.set_k(plain, 2)
    with pytest.raises(UsageError, match="saved with a fixed k"):
        saved(plain, tmp_path / "plain")


def test_sites_without_learners_are_refused(tmp_path):
    dense = llama()
    converted = acm.rewrite(dense, acm.plan(dense, {"input_ids": drawn(1, 9)}, sites=["attn"]))
    with pytest.raises(SitesNotFitted, match="vLLM needs learners"):
        saved(converted, tmp_path)


def test_int8_layers_around_acms_are_refused(tmp_path):
    model = gated_llama()
    acm.quantize(model, rest=True)
    with pytest.raises(UsageError, match="quantised layers around"):
        saved(model, tmp_path)


def test_tokens_get_the_setting_of_their_request_and_phase():
    tokens = TokenSettings(Settings(HIGH, HIGH), tokens=9, device=torch.device("cpu"))
    tokens.rows |= {0: Row(3, Settings(LOW, HIGH)), 1: Row(2, Settings(HIGH, HIGH)), 2: Row(5, Settings(LOW, LOW))}
    ids = torch.zeros(9, dtype=torch.int64)
    tokens.write(ids, torch.tensor([1, 2, 3, 7, 0, 1, 0, 0, 0]), [0, 3, 4, 6])  # behind the sixth lies padding
    assert tokens.knob[:6].tolist() == [3.0, 3.0, 0.5, 0.5, 3.0, 3.0]
    assert tokens.k_lo[:6].tolist() == [0, 0, 1, 1, 0, 0]
    tokens.rows.clear()
    tokens.rows[0] = Row(3, Settings(HIGH, HIGH))
    tokens.write(ids, torch.arange(9), [0, 9])
    assert tokens.knob.tolist() == [0.5] * 9 and tokens.k_lo.tolist() == [1] * 9


def test_an_answer_begins_with_the_token_that_ends_thinking_wherever_it_is_seen():
    end, tokens = 7, TokenSettings(Settings(HIGH, HIGH), tokens=9, device=torch.device("cpu"))
    settings = Settings(HIGH, HIGH, LOW, end)
    ids = torch.tensor([end, 5, 6, 7, 8, 9])  # the prompt's own end, two thoughts, the end, two of the answer

    def knobs(row, *parts):
        tokens.rows[0] = row
        found = []
        for part in parts:
            positions = torch.tensor(part)
            tokens.write(ids[positions], positions, [0, len(part)])
            found += tokens.knob[: len(part)].tolist()
        return found

    expected = [HIGH.knob, LOW.knob, LOW.knob, HIGH.knob, HIGH.knob, HIGH.knob]
    assert knobs(Row(1, settings), range(6)) == knobs(Row(1, settings), *([i] for i in range(6))) == expected
    again = Row(1, settings)  # of a request that had written this much, part of which is not run again
    again.find_answer(ids[1:].tolist(), 1)
    assert knobs(again, [4, 5]) == expected[4:]
    assert knobs(Row(1, settings._replace(thinking_end=3)), range(6)) == [HIGH.knob] + [LOW.knob] * 5


def test_budgets_of_thinking_are_read(model, tmp_path):
    found = saved(model, tmp_path, acm_budget={"prefill": 1, "thinking": 0.3, "thinking_end": 7, "decode": 0.9})
    assert [round(phase.share, 1) for phase in found.own.phases] == [1, 0.3, 0.9] and found.own.thinking_end == 7
    assert not found.of_request({"budget": 0.5}).by_phase  # which is all that such a request wants
    request = found.of_request({"budget": 0.5, "thinking_budget": 0.4, "thinking_end": 8})
    assert [round(phase.share, 1) for phase in request.phases] == [0.5, 0.4, 0.5] and request.by_phase
    for half in ({"thinking_budget": 0.4}, {"thinking_end": 7}):
        with pytest.raises(UsageError, match=r"the id of the token that ends it.*\n.*or neither"):
            found.of_request(half)
    for wrong in (-1, "7", True, 7.0):
        with pytest.raises(UsageError, match="must be the id of a token"):
            found.of_request({"thinking_budget": 0.4, "thinking_end": wrong})


def filled(found, prefix="model"):
    """A Llama without values at the sites, ACMs in their places: (model, settings of its tokens)."""
    built = llama()
    places = Places(built.model, found.owner.plan.sites, prefix=prefix)
    assert not any(isinstance(part, torch.nn.Linear) for part in built.model.layers.modules())
    tokens = TokenSettings(found.own, tokens=32, device=torch.device("cpu"))
    places.fill(found, tokens, like=torch.empty(()))
    return built, tokens


@torch.no_grad()
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
def test_acms_in_their_places_compute_what_the_saved_model_does(model, tmp_path, quantized):
    if quantized:
        model = gated_llama(SITES)
        acm.set_budget(model, 0.5)
        acm.quantize(model, quantized)
    acm.set_budget(model, 0.5)
    found = saved(model, tmp_path)
    built, tokens = filled(found)
    for name, site in acm.sites(model).items():
        own = site.state_dict()
        assert built.get_submodule(name).load_weights(own.items()) == set(own)
    ids = drawn(1, 15)
    for budget in (0.3, 0.6, 1):
        acm.set_budget(model, budget)
        tokens.rows[0] = Row(15, found.of_request({"budget": budget}))
        tokens.write(ids[0], torch.arange(15), [0, 15])
        torch.testing.assert_close(built(ids).logits, model(ids).logits)


class Stashed(torch.nn.Module):
    """An MLP whose activation is a function, written into a block."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

    def forward(self, x):
        return x + self.last(torch.nn.functional.gelu(self.first(x)))


@torch.no_grad()
def test_an_mlp_whose_activation_is_a_function_reads_the_stash():
    dense, x = Stashed().eval(), torch.randn(1, 6, 8)
    plan = acm.plan(dense, x, init="random")
    assert [site.graft.kind for site in plan.sites] == ["S"]
    converted = acm.rewrite(dense, plan)
    found = SavedBudgets(owner=Conversion(plan=plan), own=Settings(HIGH, HIGH), rules={}, choices=None)
    tokens = TokenSettings(found.own, tokens=6, device=torch.device("cpu"))
    built = Stashed().eval()
    Places(built, plan.sites, prefix="model").fill(found, tokens, like=x)
    ((name, site),) = acm.sites(converted).items()
    for parameter in site.parameters():
        parameter.copy_(torch.randn_like(parameter))
    built.get_submodule(name).load_weights(site.state_dict().items())
    site.set_choices(knob=HIGH.knob, k_lo=HIGH.k_lo, k_hi=site.count)
    torch.testing.assert_close(built(x), converted(x))
    assert not torch.equal(converted(x), dense(x))


def test_weights_that_do_not_fit_are_refused(model, tmp_path):
    acm.set_budget(model, 0.5)
    built, _ = filled(saved(model, tmp_path))
    site = built.model.layers[0].mlp
    for name, shape in (("learners.w_in", (2,)), ("gate.other", (2,)), ("k_lo", ())):
        with pytest.raises(StorageError, match="does not fit"):
            site.load_weights([(name, torch.zeros(shape))])


def test_places_that_are_no_modules_are_refused(model):
    plan = acm.plan(llama(), {"input_ids": drawn(1, 9)}, sites=["mlp"])
    of_weights = dataclasses.replace(plan.sites[0], graft=dataclasses.replace(plan.sites[0].graft, kind="R"))
    with pytest.raises(UsageError, match="in the place of modules"):
        Places(llama().model, [of_weights], prefix="model")
    with pytest.raises(PlanMismatch, match="no such module"):
        Places(llama().model, plan.sites, prefix="transformer")
