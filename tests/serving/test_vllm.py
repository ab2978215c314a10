"""Saved decoders in vLLM: what a request gets is what `generate` writes for it alone, at its own budget."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

import acm_compiler as acm
from tests.helpers import served
from tests.helpers.decoders import drawn, gated_llama, written
from tests.helpers.vllm_engine import TOKENS, run, run_cached

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")]
SIZES = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}  # vLLM's attention has no narrower heads
PROMPTS = [drawn(1, length)[0].tolist() for length in (3, 11, 17, 5)]
BUDGETS = [0.3, 0.9, None, 1]
PHASES = {"prefill": 0.9, "decode": 0.3}
SITES = {"mlps": "mlp", "projections": ["mlp", "attn"], "some": ["attn.q", "attn.o"], "int8": "mlp"}


def texts(model, budgets):
    """Texts of `generate`, each prompt alone at its own budget; None: the one that the model was saved with."""
    found = []
    for prompt, budget in zip(PROMPTS, budgets, strict=True):
        acm.set_budget(model, 0.5 if budget is None else budget)
        found.append(written(model, prompt))
    return found


def thought(model, prompt, end):
    """The text of `generate`: at `PHASES` until it has written the token `end`, then on at the prompt's budget."""
    from transformers import DynamicCache

    cache = DynamicCache()
    acm.set_budget(model, PHASES)
    thoughts = written(model, prompt, past_key_values=cache, eos_token_id=end)
    if len(thoughts) == TOKENS:
        return thoughts
    acm.set_budget(model, PHASES["prefill"])
    return thoughts + written(model, prompt + thoughts, TOKENS - len(thoughts), past_key_values=cache)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Makes models, saved at budget 0.5: (model, folder) by name."""
    made = {}

    def make(name):
        if name not in made:
            model, folder = gated_llama(SITES[name], **SIZES), tmp_path_factory.mktemp(name)
            if name == "int8":
                acm.quantize(model)
            acm.set_budget(model, 0.5)
            acm.save(model, folder)
            made[name] = model, folder
        return made[name]

    return make


def batch(*extras):
    return [[prompt, extra] for prompt, extra in zip(PROMPTS, extras, strict=True)]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_every_request_gets_the_text_of_its_own_budget(saved, eager):
    model, folder = saved("mlps")
    own, each, phases = texts(model, [None] * 4), texts(model, BUDGETS), texts(model, [PHASES] * 4)
    assert len({str(each[0]), str(own[0]), str(phases[0])}) == 3  # budgets change what is written
    plain, mixed = batch(*[None] * 4), batch(*[b and {"budget": b} for b in BUDGETS])
    by_phase = batch(*[{"budget": 0.3, "prefill_budget": 0.9}] * 4)
    bad = [[[PROMPTS[0], {"budget": wrong}]] for wrong in (7, "x", True, [1])]
    answers = run(folder, [plain, mixed, by_phase, *bad, plain], enforce_eager=eager, enable_prefix_caching=False)
    assert answers[:3] == [own, each, phases]
    assert "reaches this budget" in answers[3]
    assert all("cannot be read" in answer for answer in answers[4:-1])
    assert answers[-1] == own


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_thinking_and_answering_have_budgets_of_their_own(saved, eager):
    model, folder = saved("mlps")
    own, thinking, answering = (texts(model, [budget] * 4) for budget in (None, PHASES, PHASES["prefill"]))
    end = thinking[0][4]
    expected = [thought(model, prompt, end) for prompt in PROMPTS]
    assert expected[0] not in (thinking[0], answering[0])
    extra = {"budget": PHASES["prefill"], "thinking_budget": PHASES["decode"], "thinking_end": end}
    alone, bad = batch(*[extra] * 4), [PROMPTS[0], {"thinking_budget": 0.4}]
    beside = batch(extra, {"budget": 0.3, "prefill_budget": 0.9}, extra, None)
    long = drawn(1, 29)[0].tolist()
    acm.set_budget(model, PHASES)
    soon = written(model, long)[1]
    # at their fourth token four such texts need more blocks than there are: some are put off, and run again
    again = [[[long, extra | {"thinking_end": soon}]] * 4]
    few = {"block_size": 32, "num_gpu_blocks_override": 7}
    answers = run(folder, [alone, beside, [bad], *again], enforce_eager=eager, **few)
    assert answers[0] == expected
    assert answers[1] == [expected[0], thinking[1], expected[2], own[3]]
    assert "the id of the token that ends it" in answers[2]
    assert answers[3] == [thought(model, long, soon)] * 4


def test_the_servers_own_budgets_may_name_the_end_of_thinking(saved):
    model, folder = saved("mlps")
    end = texts(model, [PHASES] * 4)[0][4]
    own = {"acm_budget": {"prefill": 0.9, "thinking": 0.3, "thinking_end": end, "decode": 0.9}}
    expected = [thought(model, prompt, end) for prompt in PROMPTS]
    assert run(folder, [batch(*[None] * 4)], enforce_eager=True, additional_config=own) == [expected]


@pytest.mark.parametrize("name", ["projections", "some", "int8"])
def test_projections_and_int8_learners_are_served(saved, name):
    model, folder = saved(name)
    answers = run(
        folder, [batch(*[b and {"budget": b} for b in BUDGETS])], enforce_eager=True, enable_prefix_caching=False
    )
    assert answers == [texts(model, BUDGETS)]


def test_a_prompt_cut_into_parts_keeps_its_budgets(saved):
    model, folder = saved("mlps")
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 2, "enforce_eager": True, "enable_prefix_caching": False}
    answers = run(folder, [batch(*[{"budget": 0.3, "prefill_budget": 0.9}] * 4)], **options)
    assert answers == [texts(model, [PHASES] * 4)]


def test_the_server_may_name_its_own_budget(saved):
    model, folder = saved("mlps")
    own = {"acm_budget": PHASES}
    assert run(folder, [batch(*[None] * 4)], enforce_eager=True, additional_config=own) == [texts(model, [PHASES] * 4)]


def test_prefixes_are_cached_by_budget(saved):
    model, folder = saved("mlps")
    long = drawn(1, 70)[0].tolist()
    extras = [None, {"budget": 0.9}, {"budget": 0.3}, {"budget": 0.3, "prefill_budget": 0.9}, {"budget": 0.5}]
    budgets = [0.5, 0.9, 0.3, PHASES, 0.5]
    wanted = []
    for budget in budgets:
        acm.set_budget(model, budget)
        wanted.append([written(model, long)])
    batches = [[[long, extra]] for extra in extras]
    answers, cached = run_cached(folder, batches * 2, enforce_eager=True, block_size=32)
    assert answers == wanted * 2
    assert cached == [[0], [0], [0], [0], [64], [64], [64], [64], [0], [64]]  # 0.5 is the server's own


CONFIG = """
import json, sys
from acm_compiler.errors import AcmError
from acm_compiler.serving.vllm.config import FolderConfig
for folder in sys.argv[1:]:
    try:
        config = FolderConfig.from_dict({}, name_or_path=folder)
        print("found", json.dumps([config.model_type, config.architectures, config.acm_save]))
    except AcmError as error:
        print("found", json.dumps(str(error)))
"""


def test_the_config_is_the_base_models_and_of_one_save(saved, tmp_path):
    model, _ = saved("mlps")
    for name in ("a", "b"):
        acm.save(model, tmp_path / name)
    served.save_images(tmp_path / "images")
    folders = [str(tmp_path / name) for name in ("a", "b", "images")]
    done = subprocess.run([sys.executable, "-c", CONFIG, *folders], capture_output=True, text=True, check=True)
    a, b, images = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert a[:2] == b[:2] == ["llama", ["AcmForCausalLM"]]
    assert a[2] != b[2]  # vLLM keeps compiled graphs by it
    assert "vLLM serves language models" in images


def test_what_cannot_be_served_is_refused_before_anything_is_loaded(saved):
    _, folder = saved("mlps")
    (answer,) = run(folder, [], speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert "cannot be served with speculative decoding" in answer
