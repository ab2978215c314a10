"""Packages of AOTInductor: the live model's outputs at every budget, in Python and in C++, without this package."""

import copy
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.codegen.cpu.build import find_compiler
from acm_compiler.codegen.gpu.stages import Machine
from acm_compiler.errors import UsageError, VerificationFailed
from acm_compiler.exporting import aoti
from acm_compiler.exporting.controls import Controlled
from acm_compiler.passes.rewrite.conversion import wholly_rewritten
from tests.helpers.rewrite_cases import ALL, PUBLISHED, assert_close, give_budgets, rewritten

if find_compiler() is None:
    pytest.skip("packages need a C++ compiler", allow_module_level=True)

BUDGETS = (0.2, 0.35, 0.5, 0.7, 1.0)
EXAMPLE = Path(__file__).parents[2] / "examples/cpp"
ALONE = """
import json, sys
import torch
x = torch.load("x.pt")
exec(json.load(open("export.json"))["usage"].rpartition(";")[0])
found = [model(x, budget=torch.tensor(budget)) for budget in (0.2, 0.5, 1.0)]
assert "acm_compiler" not in sys.modules
from acm_compiler.acm import ops  # what comes later does not mind the library
assert ops.load_kernels("cpu") and torch.equal(model(x, budget=torch.tensor(0.5)), found[1])
torch.save(found, "y.pt")
"""


class Block(nn.Module):
    """A norm and an MLP beside a bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mlp = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def learned(original, x):
    """A converted model with a budget table whose gates choose different k for different tokens."""
    model = acm.rewrite(original, acm.plan(original, x))
    give_budgets(model)
    return model


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(3)
    x = torch.randn(2, 7, 12)
    return learned(Block().eval(), x), x


@pytest.fixture(scope="module")
def folder(block, tmp_path_factory):
    model, x = block
    file = acm.export(model, tmp_path_factory.mktemp("aoti") / "out", x, "aoti", dynamic={"x": 1})
    torch.save(x, file.with_name("x.pt"))
    return file.parent


@pytest.fixture(scope="module")
def package(folder):
    torch.ops.load_library(str(folder / "acm_operators.so"))
    return torch._inductor.aoti_load_package(str(folder / "package.pt2"))


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 7), (1, 1), (5, 33)])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_package_gives_the_live_models_outputs_at_every_budget(block, package, budget, shape):
    model, _ = block
    x = torch.randn(*shape, 12)
    acm.set_budget(model, budget)
    assert_close(package(x, budget=torch.tensor(budget)), model(x))


def raised(reason):
    """The reason, or what torch 2.11 raises in its place when an operator fails; it prints the reason."""
    return "API call failed" if torch.__version__ < (2, 12) else reason


def test_budgets_change_what_runs_and_those_out_of_range_are_refused(block, package):
    _, x = block
    low, high = (package(x, budget=torch.tensor(budget)) for budget in (0.2, 1.0))
    assert (low - high).abs().max() > 1e-3
    for budget in (0.19, 1.01, float("nan")):
        with pytest.raises(RuntimeError, match=raised(f"budget must be from 0.2 to 1, got {budget:g}")):
            package(x, budget=torch.tensor(budget))


def test_it_runs_without_this_package_and_beside_it(block, folder):
    model, x = block
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=folder, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for budget, found in zip((0.2, 0.5, 1.0), torch.load(folder / "y.pt"), strict=True):
        acm.set_budget(model, budget)
        with torch.no_grad():
            assert_close(found, model(x))


def test_the_folder_says_inputs_outputs_and_what_the_library_is_of(folder):
    facts = json.loads((folder / "export.json").read_text())
    assert facts["kind"] == "aoti" and facts["files"] == ["acm_operators.so", "package.pt2", "export.json"]
    assert [(t["name"], t["shape"]) for t in facts["inputs"]] == [("x", ["batch", "length", 12]), ("budget", [])]
    assert facts["outputs"] == ["output"] and facts["budgets"]["out_of_range"] == "refused"
    assert "acm_compiler 0" in facts["operators"] and facts["processor"]


def test_operators_refuse_packages_of_another_version_and_calls_that_nothing_runs(block, folder, package):
    model, x = block
    site = acm.sites(model)["mlp"]
    tensors = (x.reshape(-1, 12), *site.gate.weights(), torch.tensor(0.0), torch.tensor(0), torch.tensor(4))
    options = {"cost": 1.0, "k_min": 0, "rule": "damage"}
    with pytest.raises(RuntimeError, match=r"exported with acm_compiler 0\.0\.9, .* are of acm_compiler 0"):
        torch.ops.acm_package.gate(*tensors, **options, built="acm_compiler 0.0.9")
    built = json.loads((folder / "export.json").read_text())["operators"]
    with pytest.raises(UsageError, match="operand b_inner of acm::gate"):
        torch.ops.acm_package.gate(*tensors[:2], torch.zeros(3), *tensors[3:], **options, built=built)


def test_gate_norm_and_bypass_are_of_one_operator(block):
    model, x = block
    program = torch.export.export(model, (x,), strict=False)
    before = program.module()(x)
    aoti.with_packaged_operators(program)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count("acm_package.gated_learners.default") == 1
    assert not [name for name in called if "layer_norm" in name or "add" in name or name.startswith("acm.")]
    assert_close(program.module()(x), before)


def refused(model, path, x, match, **options):
    with pytest.raises(UsageError, match=match) as caught:
        acm.export(model, path, x, "aoti", **options)
    assert caught.value.exit_code == 2 and not path.exists()


def test_what_no_package_can_hold_is_refused(block, tmp_path):
    model, x = block
    out = tmp_path / "out"
    with acm.meter(model):
        refused(model, out, x, r"(?s)no package can hold this ACM.*counters of acm.meter.*meter\.stop")
    refused(model, out, x, "a fixed k is for the formats onnx and checkpoint", fixed_k=2)
    doubled = learned(Block().eval().double(), x.double())
    refused(doubled, out, x.double(), "(?s)supports float32 and bfloat16, not float64.*format pt2")
    odd = nn.Sequential(nn.Linear(12, 40), nn.Softsign(), nn.Linear(40, 12))
    odd_block = Block().eval()
    odd_block.mlp = odd
    refused(learned(odd_block, x), out, x, "activation .* is not supported by the native CPU kernel")


def test_packages_for_gpus_hold_what_the_triton_kernels_run(block, monkeypatch):
    """The reasons, on an H200; what a package starts is in tests/helpers/faked_gpu_cases.py."""
    monkeypatch.setattr(aoti.gpu, "machine_of", lambda device: Machine(arch=90, processors=132, fenced=True))
    (site,) = acm.sites(block[0]).values()
    on_gpu = torch.device("cuda", 0)
    assert aoti._not_covered(site, on_gpu) is None
    assert "not float64" in aoti._not_covered(copy.deepcopy(site).double(), on_gpu)
    quantized = learned(Block().eval(), block[1])
    acm.quantize(quantized, "int8")
    assert "quantised" in aoti._not_covered(next(iter(acm.sites(quantized).values())), on_gpu)


def test_a_package_that_would_ask_python_for_an_operator_is_refused(block, tmp_path):
    file = tmp_path / "package.pt2"
    with zipfile.ZipFile(file, "w") as package:
        package.writestr("p/data/wrapper.json", '{"nodes": [{"target": "acm::gated_learners"}]}')
    with pytest.raises(VerificationFailed, match=r"(?s)need Python for an ACM.*format pt2"):
        aoti.check_launches(file)


def test_controls_of_a_program_on_a_gpu_are_clamped(block):
    controls, found = ("budget", "cap", "k_hi"), wholly_rewritten(block[0], "a program")
    module = Controlled(found, controls, per_example=False, require=lambda value, *_: value)
    given = {"cap": torch.tensor(7.0), "k_hi": torch.tensor(9)}
    y = [module(block[1], budget=torch.tensor(budget), **given) for budget in (-1.0, 0.2, 1.0, 3.0)]
    assert_close(y[0], y[1])
    assert_close(y[2], y[3])
    assert not torch.equal(y[1], y[2])


@torch.no_grad()
@pytest.mark.slow
def test_it_runs_in_a_cpp_program(block, folder, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("the example is built by cmake")
    home = Path(torch.__file__).parent
    for command in (["-S", EXAMPLE, "-B", tmp_path, f"-DTORCH={home}"], ["--build", tmp_path]):
        subprocess.run(["cmake", *command], check=True, capture_output=True)
    program = [tmp_path / "run_package", folder, folder / "x.pt", tmp_path / "y.pt"]
    done = subprocess.run([*program, "0.2", "0.7"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model, x = block
    for budget, found in zip((0.2, 0.7), torch.load(tmp_path / "y.pt"), strict=True):
        acm.set_budget(model, budget)
        assert_close(found, model(x))
    failed = subprocess.run([*program, "0.1"], check=False, capture_output=True, text=True)
    assert failed.returncode == 1 and "budget must be from 0.2 to 1, got 0.1" in failed.stderr
    torch.save(x[..., :-1].contiguous(), folder / "narrow.pt")
    narrow = [program[0], folder, folder / "narrow.pt", program[-1], "0.7"]
    failed = subprocess.run(narrow, check=False, capture_output=True, text=True)
    assert failed.returncode == 1 and "unmatched dim value" in failed.stderr


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("case", ["torchvision_vit", "fused_qkv", "swiglu", "shared"])
def test_models_of_other_kinds(case, tmp_path):
    _, x, model = rewritten(ALL[case])
    give_budgets(model)
    package = torch._inductor.aoti_load_package(str(acm.export(model, tmp_path / "out", x, "aoti")))
    wider = torch.cat([x, x.flip(0)])
    for budget in BUDGETS:
        acm.set_budget(model, budget)
        assert_close(package(wider, budget=torch.tensor(budget)), model(wider))


@torch.no_grad()
@pytest.mark.slow
def test_texts_of_any_length_and_budgets_of_examples_with_bounds(tmp_path):
    _, x, model = rewritten(PUBLISHED["hf_llama"])
    give_budgets(model)
    inputs = {"input_ids": x[:1], "attention_mask": torch.ones_like(x[:1])}
    options = {"per_example": True, "controls": ("cap", "k_lo", "k_hi")}
    package = torch._inductor.aoti_load_package(str(acm.export(model, tmp_path / "out", inputs, "aoti", **options)))
    free = {"cap": torch.tensor(1.0), "k_lo": torch.tensor(0), "k_hi": torch.tensor(4)}
    for shape in ((1, 5), (3, 11)):
        ids, budgets = torch.randint(0, 50, shape), torch.tensor([0.2, 0.5, 1.0])[: shape[0]]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        with acm.batch(model, budgets=budgets):
            expected = model(**given).logits
        assert_close(package(**given, budget=budgets, **free)["logits"], expected)
    acm.set_k(model, 1)
    pinned = free | {"k_lo": torch.tensor(1), "k_hi": torch.tensor(1)}
    assert_close(package(**given, budget=budgets, **pinned)["logits"], model(**given).logits)
    for name, value in (("cap", 0.0), ("k_lo", -1), ("k_hi", 5)):
        with pytest.raises(RuntimeError, match=raised(f"{name} must be .*, got {value:g}")):
            package(**given, budget=budgets, **free | {name: torch.tensor(value)})


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (torch.full((2,), 0.5), r"budget must have the shape \[\], one number, got \[2\]"),
        (torch.tensor(0.5, dtype=torch.float64), "budget must be float32, got Double"),
    ],
)
def test_a_budget_of_another_shape_or_type_is_refused_in_words(block, package, budget, reason):
    with pytest.raises(RuntimeError, match=raised(reason)):
        package(block[1], budget=budget)


def test_one_budget_for_a_package_that_takes_one_per_example_is_refused_in_words():
    """A package computes the condition as if there were a value for each example."""
    with pytest.raises(RuntimeError, match=r"budget must have the shape \[3\], one value per example, got \[\]"):
        aoti.required(torch.tensor(0.5), torch.tensor([True, True, False]), "budget must be from 0.2 to 1")


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_weights_of_other_types(block, kind, tmp_path):
    _, x = block
    model = learned(Block().eval(), x)
    if kind == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    else:
        acm.quantize(model, kind)
    package = torch._inductor.aoti_load_package(str(acm.export(model, tmp_path / "out", x, "aoti")))
    for budget in BUDGETS:
        acm.set_budget(model, budget)
        found, expected = package(x, budget=torch.tensor(budget)), model(x)
        assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()
