"""The small models of text that come with the package: what they know, how they are trained, and converted."""

from dataclasses import replace

import pytest
import torch

from acm_compiler.data import BatchStream
from acm_compiler.data.texts import TextSet
from acm_compiler.errors import StorageError
from acm_compiler.recipe import load_recipe
from acm_compiler.recipe.datasets import TextData
from acm_compiler.runs.folder import RunOptions
from acm_compiler.runs.pipeline import plan_recipe
from acm_compiler.runs.run_recipe import run_recipe
from acm_compiler.shipped import LLAMA_DOCS, MODERNBERT_PACKAGES, TOKENIZER, unpacked
from acm_compiler.sources.build import build
from acm_compiler.tasks.base import base_metric
from scripts.train_shipped import text as train_text_model
from scripts.train_shipped.from_scratch import Checkpoint, OneCycle, packed, round_as_packed

pytest.importorskip("transformers")
pytest.importorskip("sklearn")


@pytest.mark.parametrize(
    ("name", "good"), [("llama_docs", lambda p: p < 150), ("modernbert_packages", lambda a: a > 0.65)]
)
def test_a_shipped_model_knows_texts_of_files_that_it_never_read(name, good):
    recipe, lesson = load_recipe(name), train_text_model.LESSONS[name]
    model = build(recipe.model, example=recipe.input).model
    data = train_text_model.texts(TOKENIZER, "eval")
    stream = BatchStream(dataset=data, batch=32, shuffle=True).epoch()
    assert good(base_metric(model, [next(stream) for _ in range(6)], lesson.task))


def test_their_recipes_are_planned_with_every_site():
    plans = [plan_recipe(load_recipe(name))[1] for name in ("llama_docs", "modernbert_packages")]
    assert [[site.kind for site in plan.sites].count("gated_mlp") for plan in plans] == [6, 4]
    assert [site.role for site in plans[1].sites if site.role] == ["qkv", "o"] * 4


def test_shipped_files_are_small():
    files = (LLAMA_DOCS.weights, MODERNBERT_PACKAGES.weights, TOKENIZER)
    assert sum(path.stat().st_size for path in files) < 3_000_000


def test_weights_packed_in_8_bits_are_read_back_to_half_a_step():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight = torch.nn.Parameter(torch.randn(8, 8).mul(torch.logspace(-3, 2, 8)[:, None]))
    tensors = packed(model)
    assert tensors["0.weight"].dtype == torch.int8 and tensors["1.weight"].dtype == torch.float16
    assert sum(name.endswith("weight") for name in tensors) == 2  # shared ones once
    error = (unpacked(tensors)["0.weight"] - model[0].weight).abs().amax(1)
    assert (error <= 0.51 / 127 * model[0].weight.abs().amax(1)).all() and error.min() > 0
    before = model[2].weight.detach().clone()
    round_as_packed(model)
    assert torch.equal(model[2].weight, unpacked(tensors)["0.weight"]) and not torch.equal(model[2].weight, before)


@pytest.fixture
def few_texts(tmp_path):
    """Sixteen texts of a dozen words each."""
    for i in range(16):
        words = " ".join(f"{'abcdefgh'[(i + j) % 8]}rgument" for j in range(12))
        (tmp_path / f"{i}.txt").write_text(f"Xx {words}.")
    config = TextData(kind="texts", split="train", root=str(tmp_path), tokenizer=str(TOKENIZER))
    return TextSet(config)


def test_training_lowers_the_loss_and_gives_the_same_weights_again(few_texts):
    lesson = replace(train_text_model.LESSONS["llama_docs"], steps=8)
    made = [train_text_model.train(lesson, few_texts, batch=4, seed=1) for _ in range(2)]
    for a, b in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(1)
    batches = list(BatchStream(dataset=few_texts, batch=4).epoch())
    before, after = (base_metric(m, batches, lesson.task) for m in (lesson.build(), made[0]))
    assert after < 0.8 * before


@pytest.fixture
def kept_often(monkeypatch):
    monkeypatch.setattr(train_text_model, "_KEPT_EVERY", 2)


def test_an_interrupted_training_goes_on_to_the_same_weights(few_texts, tmp_path, monkeypatch, kept_often):
    lesson = replace(train_text_model.LESSONS["llama_docs"], steps=6)
    whole = train_text_model.train(lesson, few_texts, batch=2, seed=1)
    checkpoint = Checkpoint(tmp_path / "new/kept.pt", {"steps": 6})
    step = OneCycle.step

    def interrupted(cycle, loss):
        if checkpoint.path.exists():
            raise KeyboardInterrupt
        step(cycle, loss)

    monkeypatch.setattr(OneCycle, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_text_model.train(lesson, few_texts, batch=2, seed=1, checkpoint=checkpoint)
    steps = []
    monkeypatch.setattr(OneCycle, "step", lambda cycle, loss: (steps.append(1), step(cycle, loss)))
    again = train_text_model.train(lesson, few_texts, batch=2, seed=1, checkpoint=checkpoint)
    assert len(steps) == 4
    for a, b in zip(whole.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_training_of_another_kind_is_not_gone_on_with(few_texts, tmp_path, kept_often):
    lesson = replace(train_text_model.LESSONS["llama_docs"], steps=2)
    path = tmp_path / "kept.pt"
    train_text_model.train(lesson, few_texts, batch=2, seed=1, checkpoint=Checkpoint(path, {"steps": 2}))
    with pytest.raises(StorageError, match=r"another kind.*'steps': 2"):
        train_text_model.train(lesson, few_texts, batch=2, seed=1, checkpoint=Checkpoint(path, {"steps": 3}))


def test_the_training_command_writes_a_file_that_loads_with_its_tied_weights(few_texts, tmp_path, monkeypatch):
    monkeypatch.setattr(train_text_model, "texts", lambda tokenizer, split: few_texts)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    path = tmp_path / "new/weights.safetensors"
    train_text_model.main(["--model", "llama_docs", "--steps", "2", "--batch", "2", "--out", str(path)])
    assert [file.name for file in path.parent.iterdir()] == ["weights.safetensors"]
    model = LLAMA_DOCS.load_weights(LLAMA_DOCS.build_model(), path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tokenizer_is_learned_from_the_texts_alone(tmp_path, monkeypatch):
    from tokenizers import Tokenizer

    from acm_compiler.data.paragraphs import Paragraph

    drawn = (Paragraph("An argument of an argument is an argument.", 0, 0),)
    monkeypatch.setattr("acm_compiler.data.paragraphs.draw_paragraphs", lambda *a, **k: drawn)
    train_text_model.learn_tokenizer(tmp_path / "t.json", seed=1)
    learned = Tokenizer.from_file(str(tmp_path / "t.json")).encode("argument")
    assert learned.tokens[0] == "<s>" and learned.tokens[-1] == "</s>" and len(learned.tokens) < 6


def test_weights_that_are_missing_are_named_with_what_makes_them(tmp_path):
    with pytest.raises(StorageError, match=r"train_shipped\.text --model llama_docs --out PATH"):
        LLAMA_DOCS.load_weights(LLAMA_DOCS.build_model(), tmp_path / "gone.safetensors")


@pytest.mark.slow
def test_the_language_model_keeps_its_perplexity_and_beats_every_fixed_k(tmp_path):
    small = ["data.train.count=1500", "data.eval.count=200", "schedule[0].tokens=12000", "schedule[1].steps=30"]
    said: list[str] = []
    found = run_recipe(load_recipe("llama_docs", small), RunOptions(directory=tmp_path / "out"), say=said.append)
    assert found.metric.name == "perplexity"
    by_budget = {result.asked: result.metric / found.metric.dense for result in found.budgets}
    assert by_budget[0.6] < 1.03 and by_budget[0.25] < 1.3
    by_k = {result.k: result.metric / found.metric.dense for result in found.fixed}
    # of 8 learners: at as many or fewer MACs
    assert by_budget[0.25] < by_k[2] and by_budget[0.4] < by_k[3] and by_budget[0.6] < by_k[4]


@pytest.mark.slow
def test_the_classifier_keeps_its_accuracy(tmp_path):
    small = ["data.train.count=1500", "data.eval.count=600", "schedule[0].tokens=20000"]
    said: list[str] = []
    found = run_recipe(
        load_recipe("modernbert_packages", small), RunOptions(directory=tmp_path / "out"), say=said.append
    )
    loss = {result.asked: found.metric.dense - result.metric for result in found.budgets}
    assert loss[0.6] < 0.01 and loss[0.4] < 0.01 and loss[0.25] < 0.02
    alike = {result.asked: result.likeness for result in found.budgets}
    assert alike[0.25] > 0.99 and alike[0.25] >= next(r.likeness for r in found.fixed if r.k == 1)
