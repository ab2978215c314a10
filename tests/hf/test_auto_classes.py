"""Saved transformers models: loaded by transformers' own calls with our package, by nothing without it."""

import copy
import json
import pickle
import shutil
import subprocess
import sys

import pytest
import torch

import acm_compiler as acm
from acm_compiler.errors import ModelSourceError, StorageError, UsageError
from acm_compiler.sources.build import build, parse_reference

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 30}
X = {"input_ids": torch.arange(12).reshape(2, 6) % 30}
OWN_CODE = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, width=8, **rest):
        super().__init__(**rest)
        self.width = width

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.up, self.down = nn.Linear(config.width, 16), nn.Linear(16, config.width)
        self.post_init()

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
"""


def classifier():
    """A small BERT with a classifier, rewritten."""
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3)).eval()
    return model, acm.rewrite(model, acm.plan(model, X))


def logits(model):
    with torch.no_grad():
        return model(**X).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved rewritten classifier: (model, folder)."""
    _, model = classifier()
    folder = tmp_path_factory.mktemp("hf") / "out"
    acm.save(model, folder)
    return model, str(folder)


def test_transformers_serve_finds_the_class_to_load(saved):
    import acm_compiler.hf  # noqa: F401

    model, folder = saved
    name = transformers.AutoConfig.from_pretrained(folder).architectures[0]  # as its model manager does
    assert torch.equal(logits(getattr(transformers, name).from_pretrained(folder)), logits(model))


def test_the_auto_class_gives_what_was_saved(saved):
    import acm_compiler.hf  # noqa: F401

    model, folder = saved
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(loaded) is type(model) and list(acm.sites(loaded)) == list(acm.sites(model))
    assert torch.equal(logits(loaded), logits(model))
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.bfloat16, device_map="cpu", output_loading_info=True
    )
    assert loaded.dtype == torch.bfloat16 and not info["missing_keys"]
    assert transformers.AutoConfig.from_pretrained(folder).auto_class == "AutoModelForSequenceClassification"
    for name in ("eager", "sdpa"):
        chosen = transformers.AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation=name)
        assert chosen.config._attn_implementation == name


def test_what_the_folder_cannot_give_is_refused_with_words(saved, tmp_path):
    import acm_compiler.hf  # noqa: F401

    _, folder = saved
    auto = transformers.AutoModelForSequenceClassification
    with pytest.raises(ModelSourceError, match="AutoModelForMaskedLM builds no BertForSequenceClassification"):
        transformers.AutoModelForMaskedLM.from_pretrained(folder)
    with pytest.raises(UsageError, match="hidden_dropout_prob"):
        auto.from_pretrained(folder, hidden_dropout_prob=0.0)
    for key, value in (("num_labels", 7), ("output_hidden_states", True)):  # what every config knows
        with pytest.raises(UsageError, match="is loaded as it was saved"):
            auto.from_pretrained(folder, **{key: value})
    with pytest.raises(UsageError, match="more than its config"):
        auto.from_config(transformers.AutoConfig.from_pretrained(folder))
    with pytest.raises(UsageError, match="on one device"):
        auto.from_pretrained(folder, device_map={"bert": 0, "classifier": 1})
    with pytest.raises(ModelSourceError, match="is converted already"):
        build(parse_reference(f"hf:{folder}"))


def test_the_auto_class_without_a_head_gives_the_body(saved, tmp_path):
    import acm_compiler.hf  # noqa: F401

    model, folder = saved
    body = transformers.AutoModel.from_pretrained(folder)
    assert type(body) is transformers.BertModel and list(acm.sites(body)) == list(acm.sites(model))
    with torch.no_grad():
        assert torch.equal(body(**X).last_hidden_state, model.bert(**X).last_hidden_state)
    for save in (body.save_pretrained, lambda path: acm.save(body, path)):
        with pytest.raises(UsageError, match="part of a rewritten model"):
            save(tmp_path / "body")


@pytest.mark.parametrize("cls", ["BertModel", "BertForSequenceClassification", "AutoModel"])
def test_a_class_with_a_config_of_its_own_stops_instead_of_drawing_weights(saved, cls):
    with pytest.raises(RuntimeError, match="mismatched"):
        getattr(transformers, cls).from_pretrained(saved[1], config=transformers.BertConfig(**SMALL))


def test_without_our_package_nothing_loads_it_silently(saved):
    code = (
        "import sys; sys.modules['acm_compiler'] = None\n"
        "import transformers\n"
        "for cls in ('AutoModelForSequenceClassification', 'BertModel', 'BertForSequenceClassification'):\n"
        "    try:\n"
        f"        getattr(transformers, cls).from_pretrained({saved[1]!r})\n"
        "    except ValueError as error:\n"
        "        print('refused' if 'acm_compiler' in str(error) else error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 3


def test_pipelines_run_from_the_folder(tmp_path):
    import acm_compiler.hf  # noqa: F401

    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    copied = acm.rewrite(model, acm.plan(model, X))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]
    tokenizer = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    acm.save(copied, tmp_path / "out")
    tokenizer.save_pretrained(tmp_path / "out")
    features = transformers.pipeline("feature-extraction", model=str(tmp_path / "out"), device="cpu")
    assert acm.sites(features.model)
    with torch.no_grad():
        expected = copied(**tokenizer("one three two", return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(torch.tensor(features("one three two")), expected, rtol=1e-5, atol=1e-6)
    acm.save(copied, tmp_path / "out")  # the tokenizer's files are no strangers


def test_settings_of_generate_come_back(tmp_path):
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.update(max_new_tokens=7, num_beams=2, pad_token_id=0)
    copied = acm.rewrite(model, acm.plan(model, X))
    acm.save(copied, tmp_path / "out")
    loaded = acm.load(tmp_path / "out")
    assert loaded.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert torch.equal(loaded.generate(**X), model.generate(**X))
    (tmp_path / "out" / "generation_config.json").write_text('{"max_new_tok')
    with pytest.raises(StorageError, match=r"(?s)generation_config\.json: the settings of generate .* copy the file"):
        acm.load(tmp_path / "out")


def test_save_pretrained_writes_what_can_be_loaded(tmp_path):
    _, model = classifier()
    (tmp_path / "checkpoint-10").mkdir()  # as in the output folder of a Trainer
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(acm.load(tmp_path)), logits(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.save_pretrained.model is twin
    with pytest.raises(UsageError, match="BertModel is a part of a rewritten model"):
        model.bert.save_pretrained(tmp_path / "part")
    with pytest.raises(UsageError, match="found push_to_hub"):
        model.save_pretrained(tmp_path / "hub", push_to_hub=True)
    acm.revert(model).save_pretrained(tmp_path / "dense")
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["model_type"] == "bert"


@pytest.fixture
def with_code(tmp_path):
    """The folder of a model that comes with its own Python file."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "modeling_own.py").write_text(OWN_CODE)
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"},
        "architectures": ["OwnModel"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_code_that_comes_with_a_model_runs_only_when_the_user_says_so(with_code, tmp_path):
    with pytest.raises(ModelSourceError, match="comes with Python files of its own, which are not run unasked"):
        build(parse_reference(f"hf:{with_code}", weights=None))
    built = build(parse_reference(f"hf:{with_code}", trust_remote_code=True, weights=None))
    assert type(built.model).__name__ == "OwnModel" and built.record["trust_remote_code"]
    x = torch.ones(1, 4, 8)
    copied = acm.rewrite(built.model, acm.plan(built.model, x, source=built.record))
    acm.save(copied, tmp_path / "out")
    with pytest.raises(ModelSourceError, match=r"allow_code=True"):
        acm.load(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(acm.load(tmp_path / "out", allow_code=True)(x), copied(x))


def test_only_models_of_transformers_bring_code():
    with pytest.raises(ModelSourceError, match="trust_remote_code must be left out unless source is hf"):
        parse_reference("timm:vit_tiny_patch16_224", trust_remote_code=True)


def more_tokens(model):
    model.resize_token_embeddings(40, mean_resizing=False)


def more_labels(model):
    model.classifier = torch.nn.Linear(16, 7)
    model.config.num_labels = model.num_labels = 7


def in_half(model):
    model.half().float()


@pytest.mark.parametrize("change", [more_tokens, more_labels, in_half])
@pytest.mark.parametrize("when", ["before the plan", "after the rewrite", "after the rewrite, of a known source"])
def test_a_model_that_was_changed_in_place_still_knows_how_to_be_built(change, when, tmp_path):
    config = transformers.BertConfig(**SMALL, num_labels=3)
    auto_class, source = "AutoModelForSequenceClassification", None
    if "source" in when:
        source = {"source": "hf", "name": "x", "auto_class": auto_class, "config": config.to_dict(), "weights": None}
    model = transformers.BertForSequenceClassification(config).eval()
    if when.startswith("before"):
        change(model)
    model = acm.rewrite(model, acm.plan(model, X, source=source))
    if when.startswith("after"):
        change(model)
    acm.save(model, tmp_path / "out")
    assert torch.equal(logits(acm.load(tmp_path / "out")), logits(model))
    assert torch.equal(logits(getattr(transformers, auto_class).from_pretrained(tmp_path / "out")), logits(model))


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_quantised_learners_still_know_how_to_be_built(to, rest, tmp_path):
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3)).eval()
    model = acm.rewrite(model, acm.plan(model, X, sites="mlp"))
    acm.quantize(model, to, rest=rest)
    acm.save(model, tmp_path / "out")
    assert torch.equal(logits(acm.load(tmp_path / "out")), logits(model))


def test_a_head_that_no_config_knows_is_asked_for(tmp_path, caplog):
    config = transformers.BertConfig(**SMALL, num_labels=3)
    source = {"source": "hf", "name": "x", "auto_class": "AutoModelForSequenceClassification", "weights": None}
    model = transformers.BertForSequenceClassification(config).eval()
    copied = acm.rewrite(model, acm.plan(model, X, source=source | {"config": config.to_dict()}))
    copied.classifier = torch.nn.Linear(16, 7)
    acm.save(copied, tmp_path / "out")
    reason = "(classifier.weight is (7, 16), its configuration says (3, 16))"
    assert f"nothing says how this BertForSequenceClassification is built again {reason}" in caplog.text
    with pytest.raises(StorageError, match="base_model=model"):
        acm.load(tmp_path / "out")
    model.classifier = torch.nn.Linear(16, 7)
    assert torch.equal(logits(acm.load(tmp_path / "out", base_model=model)), logits(copied))


@pytest.mark.parametrize(
    "record",
    [
        {"config": None},
        {"config": {}},
        {"config": {"model_type": "bert", "hidden_size": "wide"}},
        {"config": {"model_type": "bert", "hidden_size": -16, "num_attention_heads": 0}},
        {"config": {"model_type": "none of these"}},
        {"auto_class": "AutoTokenizer"},
        {"auto_class": None},
        {"source": "directory"},
        {"source": 3},
        {"name": None},
    ],
    ids=str,
)
def test_a_record_that_builds_nothing_is_refused_in_words(record, saved, tmp_path):
    shutil.copytree(saved[1], tmp_path / "out")
    path = tmp_path / "out" / "model.json"
    description = json.loads(path.read_text())
    path.write_text(json.dumps(description | {"source": description["source"] | record}))
    with pytest.raises((ModelSourceError, StorageError)):
        acm.load(tmp_path / "out")
