"""Hidden tokens: which are hidden, loss and perplexity of them, and an encoder converted by a recipe."""

import json
import math

import pytest
import torch
from torch.nn.functional import log_softmax
from typer.testing import CliRunner

from acm_compiler.cli import app
from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.errors import DataError, UsageError
from acm_compiler.recipe.datasets import TextRowsData
from acm_compiler.recipe.tasks import MaskedLMTask
from acm_compiler.tasks import open_task

transformers = pytest.importorskip("transformers")
MASK, CLS, SEP, PAD = 1, 2, 3, 0
RECIPE = """
acm: 1
name: hidden
model: {{source: hf, name: "{0}", weights: null}}
input: {{tokens: 12}}
task: {{kind: masked_lm, share: 0.3}}
data:
  train: {{kind: texts, tokenizer: "{0}", root: "{0}", split: train, max_tokens: 16}}
  eval: {{kind: texts, tokenizer: "{0}", root: "{0}", split: eval, max_tokens: 16}}
sites: [{{match: mlp, learners: 2}}]
budgets: {{train: 0.6, report: [0.6, 1.0]}}
schedule: [{{phase: calibrate, tokens: 500, batch: 8}}, {{phase: finetune, steps: 2, batch: 8}}]
"""


class Marked:
    """A data set with no more than the task asks for."""

    mask_id, marks = MASK, {PAD, MASK, CLS, SEP}


TASK = open_task(MaskedLMTask(kind="masked_lm", share=0.4), Marked())


def some_batch(size: int = 6, tokens: int = 20):
    ids = torch.randint(4, 30, (size, tokens), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1] = CLS, SEP
    mask = torch.ones_like(ids)
    ids[1, 9:], mask[1, 9:] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask, "index": torch.arange(size)}


def test_marks_and_padding_are_never_hidden_and_the_rest_by_its_share():
    batch = some_batch(200, 30)
    hidden = TASK.guessed(batch)
    assert not hidden[torch.isin(batch["input_ids"], torch.tensor(sorted(Marked.marks)))].any()
    eligible = 200 * 28 - 21
    assert float(hidden.sum()) / eligible == pytest.approx(0.4, abs=0.03)
    shown = TASK.inputs(batch)
    assert (shown["input_ids"][hidden] == MASK).all() and "index" not in shown
    assert torch.equal(shown["input_ids"][~hidden], batch["input_ids"][~hidden])


def test_a_text_hides_the_same_tokens_in_every_batch():
    batch = some_batch()
    hidden = TASK.guessed(batch)
    alone = {name: value[1:2, :9] if value.dim() == 2 else value[1:2] for name, value in batch.items()}
    assert torch.equal(TASK.guessed(alone)[0], hidden[1, :9])
    other = open_task(MaskedLMTask(kind="masked_lm", share=0.4, seed=1), Marked())
    assert not torch.equal(other.guessed(batch), hidden)


def test_perplexity_is_that_of_the_hidden_tokens():
    batch = some_batch()
    logits = torch.randn(6, 20, 30)
    hidden = TASK.guessed(batch)
    logp = log_softmax(logits, -1).gather(-1, batch["input_ids"][..., None])[..., 0]
    torch.testing.assert_close(TASK.loss(logits, batch), -logp[hidden].mean())
    found = TASK.value(TASK.score(logits, batch), TASK.units(batch))
    assert found == pytest.approx(math.exp(float(-logp[hidden].mean())), rel=1e-5)
    assert TASK.units(batch).tolist() == hidden.sum(1).tolist()
    with pytest.raises(UsageError, match="AutoModelForMaskedLM"):
        TASK.loss(torch.zeros(2, 3), batch)


def test_a_tokenizer_without_a_mask_is_refused():
    with pytest.raises(DataError, match=r"\[MASK\]"):
        open_task(MaskedLMTask(kind="masked_lm"), object())


@pytest.fixture
def place(tmp_path):
    """A tokenizer, texts and a BERT without weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = [f"{a}{b}rgument" for a in "abcdef" for b in "ghijkl"]
    marks = ["[PAD]", "[MASK]", "[CLS]", "[SEP]", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*marks, *words])}, "[UNK]"))
    tokenizer.add_special_tokens(marks)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=50, architectures=["BertForMaskedLM"])
    config.save_pretrained(tmp_path)
    draw = torch.Generator().manual_seed(0)
    for i in range(24):
        paragraphs = [[words[j] for j in torch.randint(36, (14,), generator=draw).tolist()] for _ in range(4)]
        (tmp_path / f"{i}.txt").write_text("\n\n".join(" ".join(["Xx", *paragraph]) + "." for paragraph in paragraphs))
    return tmp_path


def test_a_recipe_converts_a_masked_language_model(place):
    (place / "hidden.yaml").write_text(RECIPE.format(place))
    result = CliRunner().invoke(app, ["rewrite", "--recipe", f"{place}/hidden.yaml", "--out", f"{place}/out"])
    assert result.exit_code == 0, result.output
    found = json.loads((place / "out/eval.json").read_text())
    assert found["metric"]["name"] == "masked perplexity" and 20 < found["metric"]["dense"] < 80 and found["masked"]
    done = CliRunner().invoke(app, ["report", f"{place}/out"])
    assert done.exit_code == 0, done.output
    page = (place / "out/report/index.html").read_text()
    assert "Each token is shaded" in page and "[CLS]" in page


def rows(count: int = 5, key: str = "sentence"):
    """Rows as a package of data sets would give them."""
    return [{key: f"agrgument bhrgument {'cirgument ' * i}", "kind": i % 2} for i in range(count)]


def test_rows_of_a_function_are_texts_with_labels(place):
    config = {"kind": "text_rows", "rows": "python:tests.tasks.test_masked_lm:rows", "tokenizer": str(place)}
    dataset = open_dataset(TextRowsData(**config, text="sentence", label="kind"))
    batch = next(BatchStream(dataset=dataset, batch=5).epoch())
    assert batch["label"].tolist() == [int(index) % 2 for index in batch["index"]]
    assert batch["attention_mask"].sum(1).tolist() == [4 + int(index) for index in batch["index"]]
    assert dataset.pieces([2, 5]) == ["[CLS]", "agrgument"] and dataset.mask_id == 1 and {0, 1, 2, 3} <= dataset.marks
    assert "label" not in open_dataset(TextRowsData(**config, text="sentence"))[0]
    with pytest.raises(DataError, match=r"row 0 has no 'text' .*found sentence, kind"):
        open_dataset(TextRowsData(**config))
    with pytest.raises(DataError, match="gave no rows"):
        open_dataset(TextRowsData(**config, args={"count": 0}))


def test_functions_that_a_folder_s_rows_name_are_not_imported(place):
    (place / "out").mkdir()
    data = f'{{kind: text_rows, rows: "python:antigravity:fly", tokenizer: "{place}"}}'
    text = RECIPE.format(place).split("data:")[0] + f"data: {{train: {data}, eval: {data}}}\n"
    (place / "out/recipe.yaml").write_text(text)
    done = CliRunner().invoke(app, ["eval", f"{place}/out"])
    assert done.exit_code == 2 and "--allow-code" in done.stderr and "antigravity" in done.stderr


def test_folders_are_classes_and_each_file_is_in_one_split(place):
    from acm_compiler.recipe.datasets import TextData

    root = place / "classes"
    for name in ("one", "two", "other"):
        (root / name / "deep").mkdir(parents=True)
        for i in range(12):
            paragraph = " ".join(["Agrgument", name, *(["bhrgument"] * 9), "abcdefghijkl"[i]]) + "."
            (root / name / "deep" / f"{i}.txt").write_text(paragraph)
    facts = {"kind": "texts", "tokenizer": str(place), "root": str(root), "classes": ["two", "one"]}
    split = {part: open_dataset(TextData(**facts, split=part)) for part in ("train", "eval")}
    texts = [text for dataset in split.values() for text in dataset.texts]
    assert len(texts) == len(set(texts)) == 24
    assert not {*split["train"].facts["source"]} & {*split["eval"].facts["source"]}
    for dataset in split.values():
        assert dataset.classes == ("two", "one")
        assert all(f" {dataset.classes[dataset[i]['label']]} " in dataset.texts[i] for i in range(len(dataset)))
    with pytest.raises(DataError, match="a class must be a folder with texts"):
        open_dataset(TextData(**facts | {"classes": ["gone"]}, split="train"))
    (root / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no text files for data.train \(found an empty folder"):
        open_dataset(TextData(**facts | {"classes": ["one", "empty"]}, split="train"))
