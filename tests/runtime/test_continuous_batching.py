"""transformers' continuous batching: requests of unequal length share a forward, and each keeps its own text."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest

import acm_compiler as acm
from tests.helpers.decoders import SIZES, drawn, gated_llama, written

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


def asked(port, document, process):
    """The text that the server completes, once it is up."""
    body = json.dumps(document).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return json.loads(response.read())["choices"][0]["text"]
        except urllib.error.URLError as error:
            if isinstance(error, urllib.error.HTTPError) or process.poll() is not None:
                raise
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(find_spec, ("openai", "fastapi", "uvicorn", "rich", "tokenizers"))), reason="transformers[serving]"
)
def test_transformers_serve_completes_texts_of_a_saved_folder_at_its_budget(model, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(SIZES["vocab_size"])}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    acm.set_budget(model, 0.3)
    acm.save(model, tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = "import acm_compiler.hf; from transformers.cli.transformers import main; main()"
    options = ["--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "128"]
    command = [
        sys.executable,
        "-c",
        start,
        "serve",
        str(tmp_path),
        *options,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for prompt in PROMPTS:
                document = {"model": str(tmp_path), "prompt": " ".join(f"w{number}" for number in prompt)}
                text = asked(port, document | {"max_tokens": 12, "temperature": 0}, process)
                assert text.split() == [f"w{number}" for number in written(model, prompt)]
        finally:
            process.terminate()
