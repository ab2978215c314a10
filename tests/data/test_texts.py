"""Texts as data, sentence vectors as a task, and files of installed packages."""

import re
from pathlib import Path

import pytest
import torch

from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.data.paragraphs import draw_paragraphs
from acm_compiler.data.texts import TokenizedTexts
from acm_compiler.errors import DataError, UsageError
from acm_compiler.recipe.datasets import TextData
from acm_compiler.recipe.load import installed_path, shipped_recipes
from acm_compiler.tasks.embed import Embed

WORDS = tuple(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "omicron",
        "pi",
        "rho",
        "sigma",
        "tau",
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty files of three paragraphs each, code and headings among them, and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("texts")
    for file in range(40):
        lines = ["# A heading", "x = {1: 2}", "Too short."]
        for paragraph in range(3):
            drawn = [WORDS[(file * 7 + paragraph * 5 + i * i) % len(WORDS)] for i in range(8 + file % 9)]
            lines.append(" ".join(drawn).capitalize() + ".")
        (root / f"{file}.md").write_text("\n\n".join(lines))
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    return root


def texts(folder, **options):
    values = {"kind": "texts", "tokenizer": str(folder), "root": str(folder), "split": "train"}
    return open_dataset(TextData(**values | options))


def test_paragraphs_are_prose_and_no_source_is_in_both_splits(folder):
    train, held_out = texts(folder), texts(folder, split="eval")
    assert len(train) > len(held_out) > 0
    assert not set(train.sources) & set(held_out.sources)
    everything = {*train.texts, *held_out.texts}
    assert len(everything) == len(train) + len(held_out) <= 120
    assert all(text[0].isupper() and len(text.split()) >= 8 for text in everything)


def test_a_package_of_the_user_or_the_system_is_a_class_like_those_of_this_environment(folder, monkeypatch):
    monkeypatch.syspath_prepend(folder.parent)
    assert draw_paragraphs(None, "train", 4, seed=0, classes=(folder.name,))


def test_the_same_seed_draws_the_same_paragraphs(folder):
    few = texts(folder, count=9, seed=1)
    assert len(few) == 9 and few.texts == texts(folder, count=9, seed=1).texts
    assert few.texts != texts(folder, count=9, seed=2).texts


def test_batches_are_padded_to_their_longest(folder):
    batch = next(iter(BatchStream(dataset=texts(folder, max_tokens=12), batch=8).epoch()))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert ids.shape == mask.shape and ids.shape[1] <= 12
    assert int(mask.sum(1).max()) == ids.shape[1] and not ids[mask == 0].any()
    assert {"source", "index"} <= batch.keys()


def test_a_batch_of_an_epoch_holds_texts_of_like_length(folder):
    read = texts(folder)
    order = torch.randperm(len(read), generator=torch.Generator().manual_seed(0)).tolist()
    grouped = read.group(order, 5)
    batches = [
        [len(read.tokens[index]) for index in grouped[start : start + 5]] for start in range(0, len(order) - 4, 5)
    ]
    assert sorted(grouped) == sorted(order)
    assert all(batch == sorted(batch, reverse=True) for batch in batches)
    padded = sum(len(batch) * batch[0] for batch in batches)
    assert padded < 1.1 * sum(map(sum, batches))
    assert [batch[0] for batch in batches] != sorted((batch[0] for batch in batches), reverse=True)


def test_a_few_examples_are_drawn_before_like_lengths_are_brought_together(folder):
    read = texts(folder)
    few = BatchStream(dataset=read, batch=4, seed=3, shuffle=True, count=10)
    drawn = [batch["index"] for batch in few.epoch()]
    alike = list(range(len(read)))  # without `group`
    order = BatchStream(dataset=alike, batch=len(read), seed=3, shuffle=True)._shares(0)[0].indices
    assert len(few) == 3 and few.examples == 10 and [len(part) for part in drawn] == [4, 4, 2]
    assert sorted(torch.cat(drawn).tolist()) == sorted(order[:10])
    everything = BatchStream(dataset=read, batch=4, shuffle=True, count=10_000)
    assert everything.examples == len(read) and len(list(everything.epoch())) == len(everything)


@pytest.mark.parametrize(("batch", "drop_last"), [(4, True), (4, False), (5, False)])
def test_two_of_the_batches_that_stay_apart_are_as_long_as_all(folder, batch, drop_last):
    read = texts(folder)
    stream = BatchStream(dataset=read, batch=batch, shuffle=True, drop_last=drop_last, apart=3)
    lengths, seen = [], []
    for epoch in range(80):
        parts = [share.indices for share in stream._shares(epoch)]
        assert [len(part) for part in parts[:-1]] == [batch] * (len(parts) - 1) and len(parts) == len(stream)
        seen = [index for part in parts for index in part]
        assert len(seen) == len(set(seen))
        lengths.append([len(read.tokens[index]) for part in (parts[2], parts[5]) for index in part])
    assert len(seen) == (len(read) // batch * batch if drop_last else len(read))
    means = torch.tensor(lengths, dtype=torch.float64).mean(1)
    every = torch.tensor([len(tokens) for tokens in read.tokens], dtype=torch.float64)
    # as the means of as many texts drawn at random vary
    assert abs(float(means.mean() - every.mean())) < 0.05 * float(every.mean())
    assert float(means.std()) < 1.3 * float(every.std()) / (2 * batch) ** 0.5


def test_the_first_batches_are_as_long_as_all(folder):
    read = texts(folder)
    generator, first = torch.Generator().manual_seed(0), []
    for _ in range(300):
        grouped = read.group(torch.randperm(len(read), generator=generator).tolist(), 5)
        first += [len(read.tokens[index]) for index in grouped[:5]]
    mean = sum(map(len, read.tokens)) / len(read)
    assert sum(first) / len(first) == pytest.approx(mean, rel=0.03)


def test_a_missing_tokenizer_is_told(folder, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        texts(folder, tokenizer=str(tmp_path))


PROSE = "This is a paragraph of eight words or more."


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, r"no text files for data.train \(found no such folder, expected files of .md, .rst, .txt"),
        ({}, "no text files for data.train .found an empty folder"),
        ({"a.csv": PROSE, "b.pdf": ""}, "no text files for data.train .found files of other kinds: 2"),
        ({"a.txt": ""}, "no paragraphs of prose for data.train .found 1 file, expected prose of 8 words"),
        (
            {"a.txt": f"Too short.\n\nToo short, too.\n\n{PROSE[:-1]}\n\n{PROSE.lower()}", "b.md": b"\xff\xfe"},
            "no paragraphs of prose for data.train .found 2 files, not UTF-8: 1, paragraphs of fewer than 8 words: 2, "
            "paragraphs ending without . ! .: 1, paragraphs beginning without a capital: 1, expected prose",
        ),
        ({"a.txt": f"{PROSE[:-1]} >>> but it is more like code."}, ".*found 1 file, paragraphs like code or tables: 1"),
        ({"6.txt": PROSE}, "no paragraphs for data.train .found 1 in 1 file, but of the other split.*give more files"),
    ],
)
def test_where_there_is_no_prose_it_is_said_what_there_is(folder, tmp_path, files, words):
    root = tmp_path / "texts"
    if files is not None:
        root.mkdir()
    for name, content in (files or {}).items():
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=f"(?s){root}: {words}"):
        texts(folder, root=str(root))


def test_documentation_of_installed_packages_is_read_where_no_folder_is_named(folder):
    data = texts(folder, root=None, count=50, max_tokens=16)
    assert len(data) == 50 and len(set(data.sources)) > 10


def test_files_of_packages_are_found_without_running_them():
    assert installed_path("some/where") == "some/where"
    assert installed_path("package:torch/version.py").endswith("torch/version.py")
    with pytest.raises(UsageError, match="not installed"):
        installed_path("package:no_such_package/model")
    with pytest.raises(UsageError, match="holds no 'nothing'"):
        installed_path("package:torch/nothing")


def test_files_of_the_packages_that_recipes_name_are_there():
    named = {
        text
        for path in shipped_recipes().values()
        for text in re.findall(r"package:(acm_compiler/[^\s\"']+)", path.read_text())
    }
    assert named == {"acm_compiler/shipped/weights/docs_tokenizer.json"}
    for text in (*named, "acm_compiler/data/weights/docs_tokenizer.json"):  # as it was named before it moved
        assert Path(installed_path(f"package:{text}")).is_file()


def test_a_vector_is_the_mean_of_real_tokens_with_length_one():
    hidden, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    vectors = Embed().answer({"last_hidden_state": hidden}, mask)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    mean = hidden[0, :2].mean(0)
    torch.testing.assert_close(vectors[0], mean / mean.norm())
    torch.testing.assert_close(Embed().answer(hidden[1:]), vectors[1:])


def test_the_score_is_the_cosine_to_what_the_dense_model_said():
    task, hidden = Embed(), torch.randn(2, 4, 8)
    batch = task.remember(hidden, {"input_ids": torch.zeros(2, 4), "attention_mask": torch.ones(2, 4)})
    torch.testing.assert_close(task.score(hidden, batch), torch.ones(2))
    assert task.score(-hidden, batch).tolist() == pytest.approx([-1, -1])
    assert float(task.loss(-hidden, batch)) == pytest.approx(2)
    assert set(task.inputs(batch)) == {"input_ids", "attention_mask"}


def test_what_has_no_hidden_states_or_no_teacher_is_refused():
    with pytest.raises(UsageError, match="no hidden states"):
        Embed().answer({"logits": torch.zeros(2, 3)})
    with pytest.raises(DataError, match="not known"):
        Embed().score(torch.zeros(2, 3, 4), {"attention_mask": torch.ones(2, 3)})


def test_tokens_are_written_as_text_with_spaces_where_words_begin(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    def pieces(model, decoder, tokens):
        tokenizer = Tokenizer(model)
        tokenizer.decoder = decoder
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        read = TokenizedTexts([], str(tmp_path), max_tokens=8)
        return read.pieces([read.tokenizer.token_to_id(token) for token in tokens])

    vocabulary = {token: i for i, token in enumerate(("<s>", "Ġna", "Ã¯", "ve", "[UNK]", "##ve", "na", "▁na"))}
    words = models.WordLevel(vocabulary, "[UNK]")
    assert pieces(words, decoders.ByteLevel(), ["<s>", "Ġna", "Ã¯", "ve"]) == ["<s>", " na", "ï", "ve"]
    assert pieces(words, decoders.WordPiece(), ["na", "##ve"]) == [" na", "ve"]
    assert pieces(words, decoders.Metaspace(), ["▁na", "ve"]) == [" na", "ve"]
    assert pieces(words, None, ["na"]) == ["na"]
