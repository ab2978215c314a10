"""The small wav2vec2 of spoken digits: how it is trained, and what comes with the package."""

import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.data.spoken_digits import PROGRAM, VOCABULARY, UtteranceSet, voices
from acm_compiler.errors import StorageError
from acm_compiler.recipe import ModelConfig, load_recipe
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.run_recipe import run_recipe
from acm_compiler.shipped import WAV2VEC2_DIGITS
from acm_compiler.sources.build import build
from acm_compiler.tasks.ctc import open_ctc
from scripts.train_shipped import spoken as train_spoken_model

pytest.importorskip("soundfile")
pytest.importorskip("transformers")
spoken = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason="espeak-ng is not installed (apt-get install espeak-ng)"
)


@spoken
def test_letters_are_placed_where_their_words_are():
    data = UtteranceSet("train", count=3, most_words=3)
    batch = data.collate([data[i] for i in range(3)])
    frames = batch["input_values"].shape[1] // 200
    logits = torch.zeros(3, frames, len(VOCABULARY), requires_grad=True)
    train_spoken_model.place_letters(logits, batch).backward()
    target = (-logits.grad).argmax(-1)  # the gradient of a cross entropy at even logits points to its target
    real = logits.grad.abs().sum(-1) > 0
    for row in range(3):
        said = [int(v) for v in target[row][real[row]]]
        merged = [label for i, label in enumerate(said) if label and (i == 0 or said[i - 1] != label)]
        assert merged == [label for label in batch["labels"][row].tolist() if label >= 0]


def trained(steps: int, *, batch: int):
    torch.manual_seed(1)
    model = WAV2VEC2_DIGITS.build_model()
    return train_spoken_model.train(model, train_spoken_model.utterances(steps, batch, seed=1), steps=steps, lr=2e-3)


@spoken
def test_training_lowers_the_loss_and_gives_the_same_weights_again():
    made = [trained(6, batch=4) for _ in range(2)]
    for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(a, b)
    start = WAV2VEC2_DIGITS.build_model()
    data = UtteranceSet("train", count=16, most_words=1)
    batch = data.collate([data[i] for i in range(16)])
    task = open_ctc(data, start)
    longer = trained(60, batch=8)
    with torch.no_grad():
        before, after = (float(task.loss(model(**task.inputs(batch)), batch)) for model in (start.eval(), longer))
    assert after < 0.7 * before


@spoken
def test_its_loss_and_its_greedy_answers_agree_on_the_spaces():
    """A model that CTC leaves unsure of "|" needs a bias to write it, which finetuning by CTC takes back at once."""
    model = WAV2VEC2_DIGITS.load_weights(WAV2VEC2_DIGITS.build_model()).eval()
    data = UtteranceSet("eval", count=48, most_words=3, seed=6)
    task = open_ctc(data, model)
    batch = data.collate([data[i] for i in range(48)])
    with torch.no_grad():
        logits = model(**task.inputs(batch)).logits
    assert float(task.loss(logits, batch)) < 0.15
    raised = logits + 2.0 * (torch.arange(len(VOCABULARY)) == VOCABULARY.index("|"))
    errors = [float(task.score(heard, batch).sum()) for heard in (logits, raised)]
    assert abs(errors[0] - errors[1]) < 0.03 * float(task.units(batch).sum())


@spoken
def test_the_shipped_model_understands_takes_that_it_never_heard():
    model = WAV2VEC2_DIGITS.load_weights(WAV2VEC2_DIGITS.build_model()).eval()
    errors, words = train_spoken_model.measure(model, count=96, seed=5)
    assert words > 150 and errors / words < 0.12
    assert WAV2VEC2_DIGITS.weights.stat().st_size <= 1_500_000


def test_the_shipped_model_is_built_by_its_name_without_the_synthesiser(monkeypatch):
    monkeypatch.setenv("PATH", "")
    config = ModelConfig(source="shipped", name="wav2vec2_digits")
    built = build(config)
    assert built.example_inputs["input_values"].shape == (1, 24_000)
    with torch.no_grad():
        assert built.model(**built.example_inputs).logits.shape[2] == len(VOCABULARY)


def test_with_norms_after_the_sums_every_mlp_has_a_bypass_too():
    config = ModelConfig(source="shipped", name="wav2vec2_digits", weights=None, args={"post_norm": True})
    model = build(config).model
    assert type(model.wav2vec2.encoder).__name__ == "Wav2Vec2Encoder"
    plan = acm.plan(model, WAV2VEC2_DIGITS.example_input(), sites="mlp")
    assert [site.k_min for site in plan.sites] == [0] * 4


def test_a_run_without_the_synthesiser_ends_in_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    voices.cache_clear()
    done = CliRunner().invoke(app, ["rewrite", "--recipe", "wav2vec2_digits", "--out", str(tmp_path / "out")])
    assert done.exit_code == 1 and "espeak-ng speaks these words" in done.stderr and "Traceback" not in done.stderr


def test_weights_that_are_missing_or_others_are_named(tmp_path):
    with pytest.raises(StorageError, match=re.escape("train_shipped.spoken --out PATH")):
        WAV2VEC2_DIGITS.load_weights(WAV2VEC2_DIGITS.build_model(), tmp_path / "gone.safetensors")


@spoken
def test_the_papers_phases_run_for_a_few_steps(tmp_path):
    pytest.importorskip("jiwer")
    few = [f"schedule[{i}].{key}" for i in range(3) for key in ("epochs=null", "steps=2", "batch=4")]
    few += ["data.train.count=12", "data.eval.count=6", "expect.within=1", "expect.examples=6"]
    recipe = load_recipe("wav2vec2_digits_paper", few)
    said: list[str] = []
    found = run_recipe(recipe, RunOptions(directory=tmp_path / "out"), say=said.append)
    ends = [line.partition(" in ")[0] for line in said if line.startswith("phase ")]
    assert ends == [f"phase {name} done" for name in ("distill", "gate", "finetune")]
    assert found.metric.name == "word error rate" and len(found.budgets) == 5 and len(found.fixed) == 5


@spoken
@pytest.mark.slow
def test_calibrated_alone_it_writes_down_as_many_words_and_spends_more_on_speech(tmp_path):
    pytest.importorskip("jiwer")
    recipe = load_recipe("wav2vec2_digits", ["data.train.count=500", "data.eval.count=240", "schedule[0].tokens=12000"])
    said: list[str] = []
    found = run_recipe(recipe, RunOptions(directory=tmp_path / "out"), say=said.append)
    by_budget = {result.asked: result for result in found.budgets}
    assert by_budget[0.6].metric < found.metric.dense + 0.02
    assert by_budget[0.25].metric < found.metric.dense + 0.05
    reached = {asked: result.reached for asked, result in by_budget.items()}
    assert reached == pytest.approx({asked: asked for asked in reached}, abs=0.03)  # few clips to measure knobs on
    use = by_budget[0.4].foreground
    assert use.of == "frames" and use.ratio > 1.5 and use.shuffled == pytest.approx(1, abs=0.02)
