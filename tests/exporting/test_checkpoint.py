"""Checkpoints of a fixed k: ordinary ones, which load where this package is not there."""

import json
import re
import subprocess
import sys
import warnings
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.errors import BudgetUnreachable, SitesNotFitted, UsageError
from acm_compiler.passes.rewrite.conversion import conversion
from tests.helpers.rewrite_cases import ALL, PUBLISHED, answer, assert_close, give_budgets, rewritten

ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
LOAD = """
import sys
sys.modules["acm_compiler"] = None  # importing it raises
import torch, transformers
model = getattr(transformers, sys.argv[1]).from_pretrained("out")
with torch.no_grad():
    torch.save(model.eval()(torch.load("x.pt")).logits, "y.pt")
"""


def learned(case, **options):
    """A converted model all of whose output biases are something."""
    _, x, model = rewritten(PUBLISHED[case], sites="mlp", **options)
    give_budgets(model)
    with torch.no_grad():
        for module in acm.sites(model).values():
            module.learners.b_out.add_(0.1 * torch.randn_like(module.learners.b_out))
    return model, x


@torch.no_grad()
@pytest.mark.parametrize(("case", "k"), [("hf_llama", 1), ("hf_gpt2", 3)])
def test_it_loads_without_this_package_and_gives_the_live_models_outputs(case, k, tmp_path):
    model, x = learned(case)
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=k)
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", LOAD, type(model).__name__]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    acm.set_k(model, k)
    assert_close(torch.load(tmp_path / "y.pt"), answer(model, x))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and "acm" not in json.dumps(config).lower()
    facts = json.loads((tmp_path / "out/export.json").read_text())
    assert set(facts["k"].values()) == {k} and facts["relative_error"] < 1e-4


@pytest.mark.parametrize("case", ["hf_llama", "hf_gpt2", "hf_vit", "hf_bert"])
def test_every_k_of_other_classes(case, tmp_path):
    model, x = learned(case)
    for k in (1, 2, 3, 4):  # the export compares what it wrote with the live model
        acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=k)
        assert json.loads((tmp_path / "out/export.json").read_text())["relative_error"] < 1e-5
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(set(modes.values())) == 1, modes  # whoever may read one file may read the weights


def test_weights_read_from_packed_ones_are_not_called_packed(tmp_path):
    model, x = learned("hf_llama")
    # as transformers leaves it behind where it reads a GGUF file
    model.config.quantization_config = {"quant_method": "gguf", "gguf_file": "model.gguf"}
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=2)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert model.config.quantization_config["quant_method"] == "gguf"


@torch.no_grad()
@pytest.mark.parametrize("case", ["hf_bert", "hf_llama"])
def test_openvino_converts_the_checkpoint(case, tmp_path):
    openvino = pytest.importorskip("openvino")
    model, x = learned(case)
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=2)
    thin = type(model).from_pretrained(tmp_path / "out", use_cache=False).eval()
    inputs = {"input_ids": x, "attention_mask": torch.ones_like(x)}  # without a mask it refuses any Llama
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing by torch.jit, which OpenVINO still does
        converted = openvino.convert_model(thin, example_input=inputs)
    run = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    acm.set_k(model, 2)
    (logits,) = run([value.numpy() for value in inputs.values()]).values()
    assert_close(torch.from_numpy(logits), answer(model, x))


def other_class(name):
    """A converted MLP model of a class with an own key for the width, with two, or with one in each of its parts."""
    import transformers as hf

    torch.manual_seed(0)
    small = {"vocab_size": 40, "max_position_embeddings": 16, "pad_token_id": 0}
    if name == "distilbert":
        config = hf.DistilBertConfig(dim=24, n_heads=2, n_layers=2, hidden_dim=48, **small)
        model, x = hf.DistilBertForSequenceClassification(config), {"input_ids": torch.randint(1, 40, (2, 7))}
    elif name == "clip":
        size = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 24}
        text = {**size, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2, "intermediate_size": 48}
        vision = {**size, "image_size": 8, "patch_size": 4, "intermediate_size": 40}
        model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
        x = {"input_ids": torch.randint(3, 40, (2, 7)), "pixel_values": torch.randn(2, 3, 8, 8)}
    else:
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 24}
        ids = torch.randint(1, 40, (2, 7))
        model = hf.BartForConditionalGeneration(hf.BartConfig(**layers, **heads, **small, use_cache=False))
        x = {"input_ids": ids, "decoder_input_ids": ids}
    converted = acm.rewrite(model.eval(), acm.plan(model, x, sites="mlp"))
    give_budgets(converted)
    return converted, x


@pytest.mark.parametrize("name", ["distilbert", "bart", "clip"])
def test_classes_that_call_the_width_otherwise_or_twice(name, tmp_path):
    model, x = other_class(name)
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=2)
    assert json.loads((tmp_path / "out/export.json").read_text())["relative_error"] < 1e-5
    written = (tmp_path / "out/config.json").read_text()
    widths = re.findall(r'"(?:hidden_dim|\w+_ffn_dim|intermediate_size)": (\d+)', written)
    assert set(widths) == ({"24"} if name == "distilbert" else {"24", "20"})


def test_a_class_gets_the_biases_of_projections_where_it_has_a_key_for_them(tmp_path):
    _, x, model = rewritten(PUBLISHED["hf_llama"])
    give_budgets(model)
    assert any(site.kind == "linear" for site in conversion(model).plan.sites)
    with torch.no_grad():
        for module in acm.sites(model).values():
            for parameter in module.learners.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=2)
    assert json.loads((tmp_path / "out/export.json").read_text())["relative_error"] < 1e-4
    assert json.loads((tmp_path / "out/config.json").read_text())["attention_bias"] is True


def own_widths():
    """A converted model of a class that reads the width of each layer from the configuration by layer."""
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(12, width), nn.Linear(width, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down_proj(nn.functional.gelu(self.up_proj(x)))

    class Config(PretrainedConfig):
        model_type = "own_widths"

        def __init__(self, **kwargs) -> None:
            self.num_hidden_layers, self.intermediate_size = 2, kwargs.pop("intermediate_size", 32)
            super().__init__(**kwargs)

    class Model(PreTrainedModel):
        config_class = Config

        def __init__(self, config: Config) -> None:
            super().__init__(config)
            widths = [config.per_layer_config[place].intermediate_size for place in range(2)]
            self.layers = nn.ModuleList(map(Layer, widths))
            self.post_init()

        def forward(self, x: torch.Tensor) -> CausalLMOutput:
            for layer in self.layers:
                x = layer(x)
            return CausalLMOutput(logits=x)

    if not hasattr(Config, "per_layer_config"):
        pytest.skip("this transformers has no configuration by layer")
    x = torch.randn(2, 5, 12)
    original = Model(Config()).eval()
    model = acm.rewrite(original, acm.plan(original, x))
    give_budgets(model)
    with torch.no_grad():
        for module in acm.sites(model).values():
            module.gate.outer.weight.mul_(10)  # tokens differ
    return model, x


@torch.no_grad()
def test_branches_packed_in_one_parameter(tmp_path):
    from transformers import Phi3Config, Phi3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    x = torch.randint(50, (2, 7))
    original = Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=50, pad_token_id=0)).eval()
    model = acm.rewrite(original, acm.plan(original, x, sites="mlp"))
    give_budgets(model)
    for k in (1, 3):
        acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=k)
        loaded = Phi3ForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert loaded.model.layers[0].mlp.gate_up_proj.out_features == 2 * 16 * k
        acm.set_k(model, k)
        assert_close(answer(loaded, x), answer(model, x))


def refused(model, path, x, match, **options):
    with pytest.raises(UsageError, match=match) as caught:
        acm.export(model, path, x, **options)
    assert caught.value.exit_code == 2 and not path.exists()


def test_what_a_class_cannot_say_is_refused(tmp_path):
    model, x = learned("hf_llama")
    out = tmp_path / "out"
    for k in (None, 0, 5, True):
        refused(model, out, x, "this export needs one k", format="checkpoint", fixed_k=k)
    refused(model, out, x, "a fixed k is for the formats onnx and checkpoint", fixed_k=2)
    _, y, plain = rewritten(ALL["swiglu"], sites="mlp")
    refused(plain, out, y, "no class to write a checkpoint of", format="checkpoint", fixed_k=2)
    _, x, unfitted = rewritten(PUBLISHED["hf_llama"])
    with pytest.raises(SitesNotFitted, match="a fixed k needs learners"):
        acm.export(unfitted, out, x, format="checkpoint", fixed_k=4)
    assert not out.exists()
    mixed, x = learned("hf_llama")
    next(iter(acm.sites(mixed).values())).k_min = 2
    refused(mixed, out, x, "how thin its layers are", format="checkpoint", fixed_k=1)


def spent(folder):
    return json.loads((folder / "export.json").read_text())


@torch.no_grad()
def test_a_budget_is_a_fixed_k_per_site_near_the_gates_mean_and_costs_no_more(tmp_path):
    model, x = own_widths()
    for budget in (0.3, 0.45, 0.6, 0.8, 1.0):
        acm.set_budget(model, budget)
        with acm.record(model) as usage:
            model(x)
        acm.export(model, tmp_path / "out", x, format="onnx" if budget == 0.6 and ONNX else "checkpoint", budget=budget)
        facts = spent(tmp_path / "out")
        assert facts["learner_share"] <= budget + 1e-6 and facts["relative_error"] < 1e-4
        for name, k in facts["k"].items():
            assert 1 <= k <= 4 and abs(k - float(usage.k[name].float().mean())) < 1.5


@torch.no_grad()
def test_layers_of_their_own_width_where_the_class_has_them(tmp_path):
    model, x = own_widths()
    for module, k_min in zip(acm.sites(model).values(), (1, 3), strict=True):  # so that the sites' k differ
        module.k_min = k_min
    acm.export(model, tmp_path / "out", x, format="checkpoint", fixed_k=1)
    assert sorted(spent(tmp_path / "out")["k"].values()) == [1, 3]
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert [layer.up_proj.out_features for layer in loaded.layers] == [8, 24]
    acm.set_k(model, 1)
    assert_close(answer(loaded.eval(), x), answer(model, x))


def test_budgets_that_the_class_cannot_hold_or_that_are_out_of_reach_are_refused(tmp_path):
    model, x = learned("hf_llama")
    with torch.no_grad():
        for module, wanted in zip(acm.sites(model).values(), (1, 3), strict=True):
            module.gate.outer.weight.zero_()
            module.gate.outer.bias.copy_(10.0 * (torch.arange(5) != wanted))
    out = tmp_path / "out"
    refused(
        model,
        out,
        x,
        "(?s)how thin its layers are .*LlamaForCausalLM.*fixed_k=2 .* costs no more.*onnx",
        format="checkpoint",
        budget=0.5,
    )
    refused(model, out, x, "a k and a budget", format="checkpoint", budget=0.5, fixed_k=2)
    refused(model, out, x, "for the formats onnx and checkpoint", budget=0.5)
    refused(model, out, x, "extra files must be None but for the format checkpoint", extra={"a.txt": "a"})
    refused(
        model, out, x, "name of one of the checkpoint's", format="checkpoint", fixed_k=3, extra={"config.json": "{}"}
    )
    with pytest.raises(BudgetUnreachable, match="one learner at every site"):
        acm.export(model, out, x, format="checkpoint", budget=0.21)
    assert not out.exists()


def test_the_verb_copies_the_tokenizer(tmp_path):
    model, _ = learned("hf_bert")
    acm.save(model, tmp_path / "saved", extra={"vocab.txt": "[UNK]\n[PAD]\n"})
    words = ["export", str(tmp_path / "saved"), "--format", "checkpoint", "--input", "1x7:int"]
    done = CliRunner().invoke(app, [*words, "--fixed-k", "2", "--json"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "saved/export/checkpoint"
    assert (folder / "vocab.txt").read_text() == "[UNK]\n[PAD]\n" and "vocab.txt" in spent(folder)["files"]
    for more in (["--budget", "0.5"], ["--budget", "0.5,1"], ["--budget", "2"], ["--budget", "x"]):
        failed = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "new"), *more])
        assert failed.exit_code in (2, 4) and not (tmp_path / "new").exists(), failed.output


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_quantised_learners_are_refused(to, tmp_path):
    model, x = learned("hf_llama")
    refused(acm.quantize(model, to), tmp_path / "out", x, f"are {to}", format="checkpoint", fixed_k=2)
