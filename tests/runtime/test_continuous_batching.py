"""transformers' continuous batching: requests of unequal length share a forward, and each keeps its own text."""

import pytest

import acm_compiler as acm
from tests.helpers.decoders import drawn, gated_llama, written

transformers = pytest.importorskip("transformers")
PROMPTS = [drawn(1, length)[0].tolist() for length in (3, 11, 1, 17)]


@pytest.fixture(scope="module")
def model():
    return gated_llama()


def batched(model):
    """Texts of `generate_batch` behind the prompts; few blocks, because its default takes all memory there is."""
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=128),
        warmup=False,
    )
    return [output.generated_tokens for output in outputs.values()]


def test_prompts_of_unequal_length_get_their_own_texts_at_every_budget(model):
    texts = []
    for budget in (0.3, 0.9):
        acm.set_budget(model, budget)
        texts.append([written(model, prompt) for prompt in PROMPTS])
        assert batched(model) == texts[-1]
    assert texts[0] != texts[1]  # the budget changes what is written
