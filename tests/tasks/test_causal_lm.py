"""Decoders: loss and perplexity of the next token, padding, and a GPT-2 converted by a recipe."""

import json
import math

import pytest
import torch
from torch.nn.functional import log_softmax
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.errors import DataError, UsageError
from acm_compiler.recipe.tasks import CausalLMTask
from acm_compiler.tasks import open_task

pytestmark = pytest.mark.usefixtures("rough_budgets")

transformers = pytest.importorskip("transformers")
TASK = open_task(CausalLMTask(kind="causal_lm"))
SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 64, "bos_token_id": 0}
RECIPE = """
acm: 1
name: language
model: {{source: hf, name: "{0}", weights: null}}
input: {{tokens: 16}}
task: {{kind: causal_lm}}
data:
  train: {{kind: texts, tokenizer: "{0}", root: "{0}", split: train, max_tokens: 16}}
  eval: {{kind: texts, tokenizer: "{0}", root: "{0}", split: eval, max_tokens: 16}}
sites: [{{match: mlp, learners: 2}}]
budgets: {{train: 0.6, report: [0.6, 1.0]}}
schedule: [{{phase: calibrate, tokens: 600, batch: 8}}, {{phase: finetune, steps: 3, batch: 8}}]
"""


def test_loss_and_perplexity_are_those_of_the_real_tokens():
    ids = torch.tensor([[1, 2, 3, 0], [2, 2, 1, 3]])
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])}
    logits = torch.randn(2, 4, 5)
    logp = log_softmax(logits, -1)
    first = -(logp[0, 0, 2] + logp[0, 1, 3])
    second = -(logp[1, 0, 2] + logp[1, 1, 1] + logp[1, 2, 3])
    torch.testing.assert_close(TASK.score(logits, batch), torch.stack([first, second]))
    assert TASK.units(batch).tolist() == [2.0, 3.0]
    torch.testing.assert_close(TASK.loss(logits, batch), (first + second) / 5)
    perplexity = TASK.value(TASK.score(logits, batch), TASK.units(batch))
    assert perplexity == pytest.approx(math.exp(float(first + second) / 5))


def test_the_loss_is_the_models_own_where_nothing_is_padded():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, eos_token_id=0)).eval()
    ids = torch.randint(0, 40, (3, 9))
    output = model(ids, labels=ids)
    torch.testing.assert_close(TASK.loss(output, {"input_ids": ids}), output.loss)
    assert TASK.mask({"input_ids": ids}) is None
    torch.testing.assert_close(TASK.answer(output).mean(-1), torch.zeros(3, 9), atol=1e-5, rtol=0)


def test_what_a_model_gives_at_padding_is_of_no_account():
    ids, mask = torch.tensor([[0, 0, 1, 2]]), torch.tensor([[0, 0, 1, 1]])
    logits = torch.randn(1, 4, 5)
    broken = logits.masked_fill(mask[..., None] == 0, math.nan)
    batch = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(TASK.score(broken, batch), TASK.score(logits, batch))
    for judge in (TASK.answer, TASK.judged_by):
        assert torch.equal(judge(broken, mask), judge(logits, mask))


def test_padding_alone_is_no_data():
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, eos_token_id=0)).eval()
    batch = {"input_ids": torch.randint(0, 40, (3, 9)), "attention_mask": torch.zeros(3, 9, dtype=torch.int64)}
    model = acm.rewrite(model, acm.plan(model, {"input_ids": batch["input_ids"][:1]}, learners=2, sites="mlp"))
    with pytest.raises(DataError, match="something to score, got padding alone"):
        acm.evaluate(model, [batch], budgets=[1.0], task="causal_lm")
    with pytest.raises(DataError, match="padding"):
        acm.calibrate(model, [batch] * 6, tokens=60)


def test_calibration_judges_by_the_divergence_of_probabilities():
    torch.manual_seed(0)
    logits, mask = torch.randn(2, 3, 12, dtype=torch.float64) * 3, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    moved = logits + 1e-2 * torch.randn_like(logits)
    change = (TASK.judged_by(moved, mask) - TASK.judged_by(logits, mask)).square().sum(-1)
    p, q = logits.log_softmax(-1), moved.log_softmax(-1)
    divergence = (p.exp() * (p - q)).sum(-1) * mask
    torch.testing.assert_close(change.double(), 2 * divergence, rtol=2e-2, atol=1e-9)
    unlikely = logits - 40 * torch.nn.functional.one_hot(torch.tensor(5), 12)
    more = unlikely - torch.nn.functional.one_hot(torch.tensor(5), 12)
    assert (TASK.judged_by(unlikely) - TASK.judged_by(more)).abs().max() < 1e-6


def test_models_and_data_without_language_are_refused():
    with pytest.raises(UsageError, match="no logits of tokens"):
        TASK.loss(torch.zeros(2, 3), {"input_ids": torch.zeros(2, 4, dtype=torch.long)})
    with pytest.raises(DataError, match="gives no tokens"):
        TASK.units({"image": torch.zeros(2)})


def test_a_recipe_converts_a_decoder_that_generates_at_a_budget(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [f"{a}{b}rgument" for a in "abcdef" for b in "ghijkl"]
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0} | {word: i + 1 for i, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = transformers.GPT2Config(**SIZES, eos_token_id=None, architectures=["GPT2LMHeadModel"])
    config.save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(0)
    for i in range(24):
        paragraphs = [[words[j] for j in torch.randint(36, (14,), generator=draw).tolist()] for _ in range(4)]
        (tmp_path / f"{i}.txt").write_text("\n\n".join(" ".join(["Xx", *paragraph]) + "." for paragraph in paragraphs))
    (tmp_path / "language.yaml").write_text(RECIPE.format(tmp_path))
    result = CliRunner().invoke(app, ["rewrite", "--recipe", f"{tmp_path}/language.yaml", "--out", f"{tmp_path}/out"])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out/eval.json").read_text())
    assert found["metric"]["name"] == "perplexity" and 20 < found["metric"]["dense"] < 60
    model = acm.load(tmp_path / "out")
    acm.set_budget(model, 0.6)
    prompt = torch.randint(0, 40, (2, 5))
    cached, whole = (model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=use) for use in (True, False))
    assert cached.shape == (2, 11) and torch.equal(cached, whole)
