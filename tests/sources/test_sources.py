"""Model references: what is built from them, how it is built again, and what is refused."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from acm_compiler.errors import ModelSourceError, StorageError, UsageError
from acm_compiler.recipe.models import InputConfig, ModelConfig
from acm_compiler.sources.build import build, build_from_record, parse_reference
from acm_compiler.sources.builders import build_on
from acm_compiler.sources.inputs import parse_input

USERS_MODULE = """
import torch
from torch import nn

def plain(width=4):
    return nn.Linear(width, width)

def with_inputs():
    return nn.Linear(3, 2), torch.ones(5, 3)

def tied():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    model[1].weight = model[0].weight
    return model

def nothing():
    return None

number = 3
"""


@pytest.fixture
def users_module(tmp_path, monkeypatch):
    """A module `users_model` of the user's on the path."""
    (tmp_path / "users_model.py").write_text(USERS_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_model"
    sys.modules.pop("users_model", None)


def shapes(value):
    """The shapes in example inputs."""
    return {k: tuple(v.shape) for k, v in value.items()} if isinstance(value, dict) else tuple(value.shape)


def structure(model: nn.Module):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "text", ["torchvision:vit_b_16", "timm:a.b", "hf:org/name", "python:a.b:c", "shipped:digits_vit"]
)
def test_references_are_read_and_shown_alike(text):
    config = parse_reference(text)
    assert f"{config.source}:{config.name}" == text


def test_a_saved_directory_is_a_reference(tmp_path):
    (tmp_path / "model.json").write_text("{}")
    assert parse_reference(str(tmp_path)) == ModelConfig(source="directory", name=str(tmp_path))


@pytest.mark.parametrize(
    "text", ["vit_b_16", "torchvision:", "trochvision:vit_b_16", "nowhere/at/all", "", "my.models:mine"]
)
def test_what_is_no_reference_is_refused_with_the_forms_there_are(text):
    with pytest.raises(ModelSourceError, match="torchvision:NAME, timm:NAME, hf:PATH_OR_NAME") as caught:
        parse_reference(text)
    assert caught.value.exit_code == 2
    assert ("did you mean 'torchvision'" in str(caught.value)) == text.startswith("trochvision")
    assert ("did you mean python:my.models:mine?" in str(caught.value)) == text.startswith("my.models")


def test_folders_of_others_are_told_apart(tmp_path):
    with pytest.raises(ModelSourceError, match="holds no saved model"):
        parse_reference(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=f"write hf:{tmp_path}"):
        parse_reference(str(tmp_path))


def test_a_torchvision_model_on_meta_has_no_values_and_its_own_input():
    built = build(parse_reference("torchvision:vit_b_16"), device="meta")
    assert {parameter.device.type for parameter in built.model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in built.model.parameters()) == 86_567_656
    assert shapes(built.example_inputs) == (1, 3, 224, 224)
    assert built.example_inputs.device.type == "meta"
    assert built.record["weights"] == "IMAGENET1K_V1"
    assert not built.model.training


def test_named_weights_decide_the_structure_also_without_loading_them():
    config = ModelConfig(source="torchvision", name="vit_l_16", weights="IMAGENET1K_SWAG_E2E_V1")
    assert shapes(build(config, device="meta").example_inputs) == (1, 3, 512, 512)
    plain = build(config.model_copy(update={"weights": None}), device="meta")
    assert shapes(plain.example_inputs) == (1, 3, 224, 224)


def test_torchvisions_other_kinds_get_inputs_of_their_kind():
    assert shapes(build(parse_reference("torchvision:swin3d_t"), device="meta").example_inputs) == (1, 3, 16, 224, 224)
    assert shapes(build(parse_reference("torchvision:swin_v2_t"), device="meta").example_inputs) == (1, 3, 256, 256)
    assert build(parse_reference("torchvision:fcn_resnet50"), device="meta").example_inputs is None


def test_models_that_read_values_while_built_are_on_meta_too_and_stay_tied():
    def build_tied():
        torch.ones(1).item()
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
        return model

    tied = build_on("meta", build_tied)
    assert {tensor.device.type for tensor in tied.state_dict().values()} == {"meta"}
    assert tied[1].weight is tied[0].weight
    model = build(parse_reference("torchvision:regnet_y_400mf"), device="meta").model
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"source": "torchvision", "name": "vit_b_61"}, "no model 'vit_b_61' .did you mean 'vit_b_16'"),
        ({"source": "torchvision", "name": "vit_b_16", "weights": "IMAGENET1K_V2"}, "has no weights 'IMAGENET1K_V2'"),
        ({"source": "torchvision", "name": "vit_b_16", "args": {"layers": 3}}, "cannot be built with args layers=3"),
        ({"source": "torchvision", "name": "vit_b_16", "args": {"weights": "x"}}, "use the key weights instead"),
        ({"source": "timm", "name": "vit_tiny_patch61_224"}, "no model 'vit_tiny_patch61_224' .did you mean 'vit_tiny"),
        (
            {"source": "timm", "name": "vit_tiny_patch16_224", "weights": "augreg"},
            "write name: vit_tiny_patch16_224.augr",
        ),
        (
            {"source": "hf", "name": "/no/such/folder", "weights": None},
            "no folder or file '/no/such/folder' .found the path ends at /",
        ),
        ({"source": "shipped", "name": "digits_vti"}, "did you mean 'digits_vit'"),
        ({"source": "shipped", "name": "digits_vit", "weights": "best"}, "have no weights named 'best'"),
        ({"source": "python", "name": "no_module_of_this_name:f"}, "no module 'no_module_of_this_name'"),
        ({"source": "python", "name": "no_module_here.py:f"}, "no module.*\n.*package.module without .py"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_that_nothing_has_are_refused_with_the_nearest(config, message):
    with pytest.raises(UsageError, match=message):
        build(ModelConfig(**config), device="meta")


@pytest.mark.parametrize("name", ["./minilmm", "models/minilmm", "minilmm", "../here/models/minilmm"])
def test_a_mistyped_folder_is_met_with_what_lies_beside_it(tmp_path, monkeypatch, name):
    place = tmp_path / "here"
    for folder in ("models/minilm", "models/resnet", "minilm"):
        (place / folder).mkdir(parents=True)
        (place / folder / "config.json").write_text("{}")
    monkeypatch.chdir(place)
    with pytest.raises(ModelSourceError, match=rf"did you mean '{re.escape(name[:-1])}'"):
        build(parse_reference(f"hf:{name}"), device="meta")
    with pytest.raises(ModelSourceError, match=r"^((?!did you mean)[\s\S])*$"):
        build(parse_reference(f"hf:{name[:-7]}quite-another"), device="meta")


def test_the_users_own_folder_is_found_behind_a_source(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_reference("hf:~/minilm").name == str(tmp_path / "minilm")


_WITHOUT_HUB = """
from acm_compiler.errors import ModelSourceError
from acm_compiler.sources.build import build
from acm_compiler.sources.build import parse_reference

for name in ("hf:owner/name", "timm:vit_tiny_patch16_224"):
    try:
        build(parse_reference(name))
    except ModelSourceError as error:
        print(" ".join(str(error).split()))
"""


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path):
    pytest.importorskip("timm")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        settings = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", _WITHOUT_HUB], env=os.environ | settings, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    assert "Retrying" not in done.stdout + done.stderr
    hf, timm = done.stdout.splitlines()
    assert re.search(r"no model at 'owner/name' .*nothing .* in the hub's cache; the hub cannot be reached", hf)
    assert re.search(r"weights of timm:vit_tiny.* .found none in the hub's cache; the hub cannot be reached", timm)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16_224.nonsense", "has no pretrained tag 'nonsense' .expected augreg_in21k, augreg_in21k_ft_i"),
        ("vit_tiny_patch16_224.augreg_in12k", r"'augreg_in12k' \(did you mean 'augreg_in21k'\?\)"),
        ("vit_tiny_patch16_224.", "has no pretrained tag ''"),
        ("mvitv2_small_cls.augreg", "'augreg' .expected none"),
    ],
)
def test_a_pretrained_tag_that_timm_lacks_is_met_with_those_it_has(name, message):
    pytest.importorskip("timm")
    with pytest.raises(ModelSourceError, match=message):
        build(parse_reference(f"timm:{name}"), device="meta")


def test_offline_by_choice_is_said(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelSourceError, match=r"HF_HUB_OFFLINE is set\)\n  give a folder"):
        build(parse_reference("hf:owner/name"), device="meta")


def test_a_users_function_gives_a_model_and_maybe_inputs(users_module):
    built = build(ModelConfig(source="python", name=f"{users_module}:plain", args={"width": 6}))
    assert built.model.in_features == 6
    assert built.example_inputs is None
    assert shapes(build(parse_reference(f"python:{users_module}:with_inputs")).example_inputs) == (5, 3)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("nothing", {}, "returned no model .found NoneType"),
        ("plian", {}, "has no 'plian' .did you mean 'plain'"),
        ("number", {}, "not a function"),
        ("plain", {"wdith": 3}, "does not take the recipe's args .*wdith"),
    ],
)
def test_functions_that_give_no_model_are_refused(users_module, name, args, message):
    with pytest.raises(UsageError, match=message):
        build(ModelConfig(source="python", name=f"{users_module}:{name}", args=args))


def test_code_named_in_a_directory_runs_only_when_allowed(users_module, tmp_path):
    record = build(parse_reference(f"python:{users_module}:plain")).record
    (tmp_path / "model.json").write_text(json.dumps({"source": record}))
    saved = parse_reference(str(tmp_path))
    sys.modules.pop(users_module)
    with pytest.raises(ModelSourceError, match="--allow-code"):
        build(saved, device="meta")
    assert users_module not in sys.modules
    assert isinstance(build(saved, device="meta", allow_code=True).model, nn.Linear)


def test_a_saved_directory_gives_the_base_models_structure_and_inputs(tmp_path):
    built = build(ModelConfig(source="torchvision", name="vit_b_32", args={"num_classes": 7}), device="meta")
    (tmp_path / "model.json").write_text(json.dumps({"source": built.record}))
    again = build(parse_reference(str(tmp_path)), device="meta")
    assert structure(again.model) == structure(built.model)
    assert shapes(again.example_inputs) == (1, 3, 224, 224)
    with pytest.raises(ModelSourceError, match=r"converted already.*\n.*acm\.load"):
        build(parse_reference(str(tmp_path)))


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"source": null}'),
        *('{"source": {"source": "torchvision"}}', '{"source": {"source": "x", "name": "y"}}'),
    ],
)
def test_a_damaged_record_is_refused(tmp_path, text):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(StorageError):
        build(ModelConfig(source="directory", name=str(tmp_path)), device="meta")


def test_the_shipped_model_has_its_weights_and_its_input():
    first, second = build(parse_reference("shipped:digits_vit")), build(parse_reference("shipped:digits_vit"))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert shapes(first.example_inputs) == (1, 3, 36, 36)
    assert first.model(first.example_inputs).shape == (1, 10)


def test_weights_come_from_a_file_when_it_fits(users_module, tmp_path):
    name = f"{users_module}:plain"
    wanted = {"weight": torch.full((4, 4), 2.0), "bias": torch.zeros(4)}
    save_file(wanted, tmp_path / "w.safetensors")
    torch.save(wanted, tmp_path / "w.pt")
    for file in ("w.safetensors", "w.pt"):
        built = build(ModelConfig(source="python", name=name, weights=str(tmp_path / file)))
        assert torch.equal(built.model.weight, wanted["weight"])


def test_tied_weights_may_stand_in_a_file_once_and_no_other_weight_may_be_missing(users_module, tmp_path):
    path, weight, bias = tmp_path / "w.safetensors", torch.randn(5, 4), torch.randn(5)
    save_file({"0.weight": weight, "1.bias": bias}, path)
    config = ModelConfig(source="python", name=f"{users_module}:tied", weights=str(path))
    built = build(config)
    assert built.model[1].weight is built.model[0].weight and torch.equal(built.model[1].weight, weight)
    save_file({"0.weight": weight}, path)
    with pytest.raises(ModelSourceError, match=r"missing: 1\.bias;"):
        build(config)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight": torch.ones(4, 4)}, "missing: bias; unknown: none"),
        ({"weight": torch.ones(4, 4), "bias": torch.ones(4), "x": torch.ones(1)}, "missing: none; unknown: x"),
        ({"weight": torch.ones(4, 5), "bias": torch.ones(4)}, "weights of other shapes"),
        (None, "no such weights file"),
        (b"rubbish", "not a file of weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused(users_module, tmp_path, tensors, message):
    path = tmp_path / "w.safetensors"
    if isinstance(tensors, dict):
        save_file(tensors, path)
    elif tensors is not None:
        path.write_bytes(tensors)
    with pytest.raises(ModelSourceError, match=message):
        build(ModelConfig(source="python", name=f"{users_module}:plain", weights=str(path)))


def test_pickled_code_is_never_run(users_module, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (print, ("executed",))

    torch.save(Bomb(), tmp_path / "w.pt")
    with pytest.raises(ModelSourceError, match="not a file of weights"):
        build(ModelConfig(source="python", name=f"{users_module}:plain", weights=str(tmp_path / "w.pt")))


def test_a_file_that_is_no_pickle_is_refused(users_module, tmp_path):
    (tmp_path / "w.pt").write_text("hello\n")  # torch's reader takes it for a reference to something that is not there
    with pytest.raises(ModelSourceError, match="not a file of weights"):
        build(ModelConfig(source="python", name=f"{users_module}:plain", weights=str(tmp_path / "w.pt")))


HF_MODELS = {
    "vit": ("ViTForImageClassification", {"image_size": 32, "patch_size": 16}, {"pixel_values": (1, 3, 32, 32)}),
    "bert": ("BertForMaskedLM", {"max_position_embeddings": 64}, {"input_ids": (1, 64)}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 1, "n_head": 2}, {"input_ids": (1, 128)}),
    "llama": ("LlamaForCausalLM", {}, {"input_ids": (1, 128)}),
    "wav2vec2": ("Wav2Vec2ForCTC", {}, {"input_values": (1, 160_000)}),
    "t5": (
        "T5ForConditionalGeneration",
        {"num_layers": 1},
        {"input_ids": (1, 128), "decoder_input_ids": (1, 128)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {},
        {"input_features": (1, 80, 3000), "decoder_input_ids": (1, 32)},
    ),
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def hf_folder(folder, model_type: str, architecture: str | None, **settings) -> str:
    """A folder with the config of a small transformers model."""
    config = {"model_type": model_type, **settings}
    (folder / "config.json").write_text(
        json.dumps(config | ({"architectures": [architecture]} if architecture else {}))
    )
    return str(folder)


@pytest.mark.parametrize("model_type", HF_MODELS)
def test_a_transformers_model_is_built_from_its_config_and_again_from_the_record(tmp_path, model_type):
    pytest.importorskip("transformers")
    architecture, settings, inputs = HF_MODELS[model_type]
    small = SMALL if model_type in ("vit", "bert", "llama") else {}
    built = build(
        parse_reference(f"hf:{hf_folder(tmp_path, model_type, architecture, **small, **settings)}"), device="meta"
    )
    assert type(built.model).__name__ == architecture
    assert shapes(built.example_inputs) == inputs
    assert {tensor.device.type for tensor in built.model.state_dict().values()} == {"meta"}
    (tmp_path / "config.json").unlink()
    again = build_from_record(json.loads(json.dumps(built.record)), device="meta")
    assert type(again) is type(built.model)
    assert structure(again) == structure(built.model)


def test_a_transformers_model_takes_another_class_and_changed_settings(tmp_path):
    pytest.importorskip("transformers")
    folder = hf_folder(tmp_path, "bert", None, **SMALL)
    built = build(ModelConfig(source="hf", name=folder, weights=None, args={"num_hidden_layers": 2}))
    assert type(built.model).__name__ == "BertModel"
    assert len(built.model.encoder.layer) == 2
    assert built.model(**built.example_inputs).last_hidden_state.shape == (1, 128, 16)
    ctc = ModelConfig(source="hf", name=folder, weights=None, auto_class="AutoModelForCTC")
    with pytest.raises(
        ModelSourceError, match=r"AutoModelForCTC builds no bert models \(expected .*AutoModelForMaskedLM"
    ):
        build(ctc)
    with pytest.raises(ModelSourceError, match=r"no key 'num_hiden_layers' \(did you mean 'num_hidden_layers'"):
        build(ModelConfig(source="hf", name=folder, weights=None, args={"num_hiden_layers": 2}))
    with pytest.raises(ModelSourceError, match=r"weights of hf:.* cannot be loaded"):
        build(ModelConfig(source="hf", name=folder))


def test_transformers_weights_are_the_saved_ones(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    model.save_pretrained(tmp_path)
    built = build(parse_reference(f"hf:{tmp_path}"))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in built.model.state_dict().items())


def test_a_saved_config_cannot_make_transformers_run_others_code(tmp_path):
    pytest.importorskip("transformers")
    built = build(parse_reference(f"hf:{hf_folder(tmp_path, 'bert', None, **SMALL)}"), device="meta")
    record = json.loads(json.dumps(built.record))
    record["config"] |= {"auto_map": {"AutoModel": "evil--x.Y"}, "_attn_implementation": "evil/kernel"}
    again = build_from_record(record, device="meta")
    assert not hasattr(again.config, "auto_map")
    assert again.config._attn_implementation != "evil/kernel"
    record["auto_class"] = "pipeline"
    with pytest.raises((ModelSourceError, StorageError), match="auto_class"):
        build_from_record(record, device="meta")


@pytest.mark.parametrize(
    ("text", "shape", "whole"),
    [("1x3x224x224", (1, 3, 224, 224), None), ("1x128:int", (1, 128), True), ("4:float", (4,), False)],
)
def test_shapes_are_read_from_the_command_line(text, shape, whole):
    spec = parse_input(text)
    assert (spec.shape, spec.whole_numbers) == (shape, whole)


@pytest.mark.parametrize("text", ["", "1x", "1x0", "axb", "1,3", "1x3:bool", "-1x3"])
def test_what_is_no_shape_is_refused(text):
    with pytest.raises(UsageError, match="is not a shape"):
        parse_input(text)


@pytest.mark.parametrize(
    ("example", "shape", "dtype"),
    [
        (InputConfig(image=(3, 8, 9)), (1, 3, 8, 9), torch.float64),
        (InputConfig(tokens=7), (1, 7), torch.int64),
        (InputConfig(audio_seconds=0.5), (1, 8000), torch.float64),
        (InputConfig(shape=(7, 4)), (1, 7, 4), torch.float64),
        (parse_input("2x4"), (2, 4), torch.float64),
        (parse_input("2x4:int"), (2, 4), torch.int64),
    ],
)
def test_examples_fit_the_model(users_module, example, shape, dtype, monkeypatch):
    import users_model

    monkeypatch.setattr(users_model, "plain", lambda: nn.Linear(4, 4).double())
    inputs = build(parse_reference(f"python:{users_module}:plain"), example=example).example_inputs
    assert (tuple(inputs.shape), inputs.dtype) == (shape, dtype)


def test_a_transformers_models_example_goes_by_its_name(tmp_path):
    pytest.importorskip("transformers")
    config = parse_reference(f"hf:{hf_folder(tmp_path, 'bert', None, **SMALL)}")
    for example in (InputConfig(tokens=9), parse_input("1x9")):
        inputs = build(config, device="meta", example=example).example_inputs
        assert (shapes(inputs), inputs["input_ids"].dtype) == ({"input_ids": (1, 9)}, torch.int64)


def test_a_timm_model_has_its_own_input():
    pytest.importorskip("timm")
    built = build(parse_reference("timm:vit_tiny_patch16_384"), device="meta")
    assert shapes(built.example_inputs) == (1, 3, 384, 384)
    assert structure(build_from_record(built.record, device="meta")) == structure(built.model)
