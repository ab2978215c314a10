"""`acm.generate`: drafts at a low budget, checked by the same model, end in what the model writes alone."""

import logging

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import BudgetUnreachable, UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from tests.helpers.decoders import drawn, gated, gated_llama, llama, mixture

transformers = pytest.importorskip("transformers")
ALWAYS = {"confidence": 0.0}


@pytest.fixture(scope="module")
def made():
    return gated_llama()


@pytest.fixture
def model(made):
    acm.set_budget(made, 0.9)
    yield made
    conversion(made).budget = None


def alone(model, ids, **options):
    return model.generate(ids, do_sample=False, max_new_tokens=24, **options)


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize("budget", [0.2, 0.5, "95%"])
def test_drafts_do_not_change_what_is_written(model, budget, tokens):
    draft = acm.Draft(budget=budget, tokens=tokens, confidence=0.2)
    written = acm.generate(model, drawn(1, 11), draft=draft, do_sample=False, max_new_tokens=24)
    assert torch.equal(written, alone(model, drawn(1, 11)))
    assert 0 < draft.rounds <= draft.drafted <= draft.rounds * tokens
    assert draft.accepted <= draft.drafted


def test_checks_of_drafts_spend_the_budget_of_decoding(model):
    for prefill, decode in ((1, 0.4), (0.3, 1)):
        acm.set_budget(model, {"prefill": prefill, "decode": decode})
        draft = acm.Draft(budget=0.3, **ALWAYS)
        written = acm.generate(model, drawn(1, 9), draft=draft, do_sample=False, max_new_tokens=24)
        assert torch.equal(written, alone(model, drawn(1, 9)))
        assert draft.drafted


@pytest.mark.parametrize("make", [llama, pytest.param(mixture, marks=pytest.mark.slow)])
def test_a_lossless_model_writes_what_the_dense_one_writes(make):
    dense, batch = make(), {"input_ids": drawn(8, 20)}
    converted = gated(dense, {"input_ids": torch.ones(1, 9, dtype=torch.int64)}, batch, lossless=True)
    acm.set_budget(converted, 1)
    draft = acm.Draft(budget=0.4, **ALWAYS)
    for seed in range(3):
        ids = drawn(1, 6 + seed)
        assert torch.equal(
            acm.generate(converted, ids, draft=draft, do_sample=False, max_new_tokens=24), alone(dense, ids)
        )
    assert 0 < draft.accepted < draft.drafted


@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_at_the_models_own_budget_are_all_accepted(model, sampled):
    draft = acm.Draft(budget=0.9, tokens=4, **ALWAYS)
    torch.manual_seed(0)
    written = acm.generate(model, drawn(1, 11), draft=draft, do_sample=sampled, max_new_tokens=26)
    assert written.shape == (1, 37)
    assert draft.accepted == draft.drafted
    assert (draft.rounds, draft.drafted) == (5, 20)  # the first token comes with the prompt, one more with each check


def test_sampled_text_has_the_models_own_distribution(model):
    ids, count, kind = drawn(1, 5), 400, {"do_sample": True, "max_new_tokens": 3, "top_k": 3}
    torch.manual_seed(0)
    draft = acm.Draft(budget=0.2, **ALWAYS)
    thirds = {
        "alone": model.generate(ids.expand(count, -1), **kind)[:, -1],
        "drafted": torch.stack([acm.generate(model, ids, draft=draft, **kind)[0, -1] for _ in range(count)]),
    }
    shares = {way: third.bincount(minlength=60) / count for way, third in thirds.items()}
    assert (shares["alone"] - shares["drafted"]).abs().sum() < 0.25  # of 2; two draws of 400 are .1 apart


def test_the_prompt_is_read_once_and_drafts_run_few_learners(model):
    calls = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda _m, args, _out: calls.append(args[0].shape[-2]))
    acm.generate(model, drawn(1, 30), draft=acm.Draft(budget=0.3, **ALWAYS), do_sample=False, max_new_tokens=9)
    handle.remove()
    assert calls[0] == 30
    assert set(calls[1:6]) == {1, 5}
    assert max(calls[1:]) <= 5


def test_padding_before_the_prompt_is_no_hindrance(model):
    ids = torch.nn.functional.pad(drawn(1, 11), (3, 0))
    mask = (ids != 0).long()
    draft = acm.Draft(budget=0.9, **ALWAYS)
    written = acm.generate(model, ids, draft=draft, attention_mask=mask, do_sample=False, max_new_tokens=24)
    assert torch.equal(written, alone(model, ids, attention_mask=mask))


def test_an_encoder_decoder_drafts_too():
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 60}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    dense = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": drawn(4, 12), "decoder_input_ids": drawn(4, 7)}
    converted = gated(dense, {name: ids[:1] for name, ids in inputs.items()}, inputs)
    acm.set_budget(converted, 0.9)
    draft = acm.Draft(budget=0.9, **ALWAYS)
    written = acm.generate(converted, drawn(1, 11), draft=draft, do_sample=False, max_new_tokens=16)
    assert torch.equal(written, converted.generate(drawn(1, 11), do_sample=False, max_new_tokens=16))
    assert draft.accepted == draft.drafted > 0


def test_texts_that_end_early_and_processors_are_followed(model):
    ids = drawn(1, 11)
    plain = alone(model, ids)
    options = {"eos_token_id": int(plain[0, 18]), "repetition_penalty": 1.3}
    written = acm.generate(model, ids, draft=0.3, do_sample=False, max_new_tokens=24, **options)
    assert torch.equal(written, alone(model, ids, **options))


def test_prompts_that_are_vectors_are_followed(model):
    vectors = model.get_input_embeddings()(drawn(1, 11)).detach()
    draft = acm.Draft(budget=0.9, **ALWAYS)
    written = acm.generate(model, inputs_embeds=vectors, draft=draft, do_sample=False, max_new_tokens=16)
    assert torch.equal(written, model.generate(inputs_embeds=vectors, do_sample=False, max_new_tokens=16))
    assert draft.accepted == draft.drafted > 0


# transformers before 5.24 refuses to check drafts in a static cache
STATIC = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24), reason="no drafts in static caches"
)


@pytest.mark.parametrize("config", [True, pytest.param(False, marks=STATIC)], ids=["config", "options"])
def test_other_caches_and_configs_are_followed(model, config, recwarn):
    options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    if config:
        options = {"generation_config": transformers.GenerationConfig(**options)}
    else:
        options["cache_implementation"] = "static"
    draft = acm.Draft(budget=0.9, **ALWAYS)
    written = acm.generate(model, drawn(1, 11), draft=draft, **options)
    assert torch.equal(written, alone(model, drawn(1, 11))[:, : 11 + 16])
    assert draft.accepted == draft.drafted > 0
    assert not [warning for warning in recwarn if "generation_config" in str(warning.message)]


def test_options_of_generate_and_streamers_work(model):
    class Kept(transformers.generation.BaseStreamer):
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    kept = Kept()
    found = acm.generate(
        model, drawn(1, 4), draft=0.3, streamer=kept, do_sample=False, max_new_tokens=9, return_dict_in_generate=True
    )
    assert kept.ended
    assert kept.tokens == found.sequences[0].tolist()


def test_what_was_accepted_is_logged(model, caplog):
    with caplog.at_level(logging.INFO, logger="acm_compiler"):
        acm.generate(model, drawn(1, 11), draft=0.9, do_sample=False, max_new_tokens=9)
    assert "accepted" in caplog.text


def test_other_callers_of_the_model_are_left_alone(model):
    before = dict(vars(model))
    acm.generate(model, drawn(1, 4), draft=0.3, do_sample=False, max_new_tokens=5)
    assert vars(model) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"assistant_model": "m"}, "no room for drafts"),
        ({"num_beams": 3}, "no room for drafts"),
        ({"use_cache": False}, "no room for drafts"),
        ({"generation_config": transformers.GenerationConfig(prompt_lookup_num_tokens=3)}, "no room for drafts"),
        ({"inputs": torch.ones(2, 3, dtype=torch.int64)}, "one sequence"),
        ({"input_ids": torch.ones(3, 3, dtype=torch.int64)}, "one sequence"),
        ({"inputs": torch.ones(3, dtype=torch.int64)}, "one sequence"),
        ({"inputs": [1, 2]}, "one sequence"),
        ({"inputs": {"input_ids": torch.ones(1, 3, dtype=torch.int64)}}, r"\*\*inputs"),
        ({"draft": 1.7}, "budget"),
    ],
)
def test_what_cannot_be_drafted_is_refused_before_the_prompt_is_read(model, options, words, monkeypatch):
    monkeypatch.setattr(type(model), "generate", lambda *a, **b: pytest.fail("called"))
    with pytest.raises((UsageError, BudgetUnreachable), match=words):
        acm.generate(model, **{"draft": 0.3} | options)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens": 1.5}, {"confidence": 2}, {"confidence": "1"}])
def test_a_draft_has_tokens_and_a_probability(wrong):
    with pytest.raises(UsageError):
        acm.Draft(budget=0.3, **wrong)


class Wrapper(torch.nn.Module):
    """A wrapper whose `generate` is the model's, as PEFT's is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.generate, self._get_candidate_generator = inner.generate, inner._get_candidate_generator


def test_a_model_that_does_not_generate_itself_is_refused(model):
    for other in (torch.nn.Linear(2, 2), Wrapper(model)):
        with pytest.raises(UsageError, match="generate"):
            acm.generate(other, draft=0.3)


def test_a_compiled_model_drafts_as_the_eager_one(model):
    draft = acm.Draft(budget=0.9, **ALWAYS)
    compiled = torch.compile(model, backend="eager")
    written = acm.generate(compiled, drawn(1, 4), draft=draft, do_sample=False, max_new_tokens=9)
    assert torch.equal(written, model.generate(drawn(1, 4), do_sample=False, max_new_tokens=9))
    assert draft.accepted == draft.drafted > 0
