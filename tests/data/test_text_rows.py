"""Rows of texts that a user's function gives: of the package `datasets`, or of no use."""

import csv
import json

import pytest
import torch
from typer.testing import CliRunner

from acm_compiler.cli import app
from acm_compiler.data import open_dataset
from acm_compiler.errors import AcmError
from acm_compiler.recipe.datasets import TextRowsData

transformers = pytest.importorskip("transformers")
WORDS = ("red", "green", "blue", "round", "square")
RECIPE = """
acm: 1
name: rows
model: {{source: hf, name: "{0}", auto_class: AutoModelForSequenceClassification, weights: null}}
input: {{tokens: 8}}
task: {{kind: classify}}
data:
  train: &rows
    kind: text_rows
    rows: "python:datasets:{1}"
    args: {2}
    text: sentence
    label: kind
    tokenizer: "{0}"
  eval: *rows
sites: [{{match: mlp, learners: 2}}]
budgets: {{train: 0.6, report: [0.6, 1.0]}}
schedule: [{{phase: calibrate, tokens: 600, batch: 8}}]
run: {{seed: 1}}
"""


def rows(count: int = 40, *, without: str | None = None, **odd):
    """Sentences of two classes; `odd` values stand in the third row, which has no key `without`."""
    made = [{"sentence": " ".join(WORDS[i % 5 :] + WORDS[: i % 3]), "kind": i % 2} for i in range(count)]
    made[2] = {key: value for key, value in (made[2] | odd).items() if key != without}
    return made


def rows_of_pairs():
    """Rows that name nothing."""
    return [("red green", 0)]


def frame():
    """The rows as a table of pandas."""
    return pytest.importorskip("pandas").DataFrame(rows())


def split_of(split: str):
    """Fail as a function does whose data has no such split; the package datasets says so too."""
    raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")


def splits():
    """Give several splits, as `datasets.load_from_disk` does for a folder of them."""
    return {"train": rows(), "test": rows(8)}


def missing():
    """Fail as a function does whose data is not there."""
    raise FileNotFoundError("no folder called data")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tokenizer and the config of a classifier."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("rows")
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["[PAD]", "[UNK]", *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=8, architectures=["BertForSequenceClassification"])
    config.save_pretrained(root)
    return root


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("splits", {}, r"several sets of rows \(found train, test, expected one\).*split: train"),
        ("missing", {}, "no folder called data"),
        ("split_of", {"split": "trian"}, 'Unknown split "trian"'),
        ("frame", {}, r"no rows by number \(found DataFrame: KeyError\(0\), .*frame.to_dict\('records'\)"),
        ("rows_of_pairs", {}, r"row 0 has no 'sentence' \(found tuple, expected a mapping"),
        ("rows", {"without": "sentence"}, r"row 2 has no 'sentence' \(found kind,"),
        ("rows", {"without": "kind"}, r"row 2 has no 'kind' \(found sentence,"),
        ("rows", {"sentence": None}, r"1 of 40 rows have no text \(found None in row 2\)"),
        ("rows", {"kind": "red"}, r"1 of 40 rows have no class 0, 1, 2, … \(found 'red' in row 2\)"),
        ("rows", {"kind": None}, "class_encode_column"),
        ("rows", {"kind": -1}, r"found -1 in row 2"),
        ("rows", {"kind": 0.5}, r"found 0.5 in row 2"),
        ("rows", {"kind": torch.tensor(0.5)}, r"found tensor\(0.5000\) in row 2"),
        ("rows", {"kind": torch.tensor([0, 1])}, r"found tensor\(\[0, 1\]\) in row 2"),
        ("rows", {"kind": torch.tensor(-1)}, r"found tensor\(-1\) in row 2"),
    ],
)
def test_rows_of_no_use_are_told(place, function, options, message):
    reference = f"python:tests.data.test_text_rows:{function}"
    config = {"kind": "text_rows", "rows": reference, "args": options, "text": "sentence", "label": "kind"}
    with pytest.raises(AcmError, match=rf"(?s){reference}.*{message}"):
        open_dataset(TextRowsData(**config, tokenizer=str(place)))


def test_a_tensor_of_one_whole_number_is_a_class(place):
    config = {"kind": "text_rows", "rows": "python:tests.data.test_text_rows:rows", "args": {"kind": torch.tensor(1)}}
    read = open_dataset(TextRowsData(**config, text="sentence", label="kind", tokenizer=str(place)))
    assert read.facts["label"][:4] == [0, 1, 1, 1]


def saved_rows(datasets, root):
    """The same rows as every kind of file, and how a recipe reads each."""
    made = datasets.Dataset.from_list(rows()).cast_column("kind", datasets.ClassLabel(names=["odd", "even"]))
    made.save_to_disk(root / "disk")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(root / "splits")
    with (root / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["sentence", "kind"])
        writer.writeheader()
        writer.writerows(rows())
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())))
    load = {"split": "train", "cache_dir": str(root / "cache")}
    return {
        "disk": ("load_from_disk", {"dataset_path": str(root / "disk")}),
        "one of several": ("load_from_disk", {"dataset_path": str(root / "splits" / "train")}),
        "csv": ("load_dataset", {"path": "csv", "data_files": str(root / "rows.csv"), **load}),
        "json": ("Dataset.from_json", {"path_or_paths": str(root / "rows.jsonl"), "cache_dir": str(root / "cache")}),
    }


def test_sets_of_the_package_datasets_are_rows(place, tmp_path):
    datasets = pytest.importorskip("datasets")
    ways = saved_rows(datasets, tmp_path)
    for function, options in ways.values():
        config = {"kind": "text_rows", "rows": f"python:datasets:{function}", "args": options, "text": "sentence"}
        read = open_dataset(TextRowsData(**config, label="kind", tokenizer=str(place)))
        assert read.texts == [row["sentence"] for row in rows()]
        assert list(read.facts["label"]) == [row["kind"] for row in rows()]


@pytest.mark.parametrize("way", ["disk", "csv"])
def test_a_recipe_runs_on_a_set_of_the_package_datasets(place, tmp_path, way):
    function, options = saved_rows(pytest.importorskip("datasets"), tmp_path)[way]
    (tmp_path / "rows.yaml").write_text(RECIPE.format(place, function, json.dumps(options)))
    done = CliRunner().invoke(app, ["rewrite", "--recipe", f"{tmp_path}/rows.yaml", "--out", f"{tmp_path}/out"])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out/eval.json").read_text())
    assert found["n"] == 40 and found["masked"] and found["metric"]["dense"] is not None
