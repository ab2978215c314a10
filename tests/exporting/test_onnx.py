"""ONNX files: the live model's outputs in ONNX Runtime, at every budget and with one k, for other lengths."""

import copy
import json
import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.errors import PackageMissing, UsageError
from acm_compiler.exporting import onnx as writing
from tests.helpers.models import WIDTH, Mlp, Residual
from tests.helpers.rewrite_cases import ALL, PUBLISHED, answer, assert_close, give_budgets, rewritten

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package)
KINDS = ["swiglu", *(pytest.param(case, marks=pytest.mark.slow) for case in ("encoder", "fused_qkv", "shared"))]
BUDGETS = (0.2, 0.35, 0.5, 0.7, 1.0)


def learned(case, **options):
    _, x, model = rewritten(case, **options)
    give_budgets(model)
    return model, x


@pytest.fixture(scope="module")
def vision():
    return learned(PUBLISHED["torchvision_vit"], sites="mlp")


@pytest.fixture(scope="module")
def folder(vision, tmp_path_factory):
    model, x = vision
    return acm.export(model, tmp_path_factory.mktemp("onnx") / "out", x, format="onnx").parent


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_budget_and_batch(vision, folder, budget, batch):
    model, x = vision
    x = torch.randn(batch, *x.shape[1:])
    acm.set_budget(model, budget)
    assert_close(writing.runner(folder)(x, torch.tensor(budget))[0], model(x))


def test_budgets_change_what_counts_and_those_out_of_range_are_clamped(vision, folder):
    _, x = vision
    low, high, below, above = (writing.runner(folder)(x, torch.tensor(budget))[0] for budget in (0.2, 1.0, -3.0, 1.5))
    assert (low - high).abs().max() > 1e-3
    assert torch.equal(low, below) and torch.equal(high, above)


def test_each_weight_is_in_the_file_once_and_in_a_shape_that_quantisers_take(vision, folder):
    import onnx

    model, _ = vision
    graph = onnx.load(folder / "model.onnx").graph
    weights = {value.name for value in graph.initializer}
    products = [node for node in graph.node if node.op_type == "Gemm"]
    assert len(products) > 8 and all(node.input[1] in weights for node in products)
    size = sum(len(value.raw_data) for value in graph.initializer)
    total = sum(tensor.numel() * 4 for tensor in model.parameters()) - sum(
        tensor.numel() * 4
        for module in acm.sites(model).values()
        if module.dense
        for tensor in module.dense.parameters()
    )
    assert size < 1.1 * total + 10_000
    assert not any(node.metadata_props or node.doc_string for node in graph.node)  # paths of this machine


@torch.no_grad()
def test_dynamic_quantisation_by_onnx_runtime(vision, folder, tmp_path, monkeypatch):
    import onnx

    monkeypatch.setattr(sys, "path", list(sys.path))  # onnxruntime adds a folder of its own
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model, x = vision
    nodes = onnx.load(folder / "model.onnx").graph.node
    gates = [node.name for node in nodes if any(".gate." in name for name in node.input)]
    assert len(gates) == 2 * len(acm.sites(model))
    options = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(
        folder / "model.onnx",
        tmp_path / "model.onnx",
        weight_type=QuantType.QInt8,
        nodes_to_exclude=gates,
        extra_options=options,
    )
    small = onnx.load(tmp_path / "model.onnx").graph
    assert sum(node.op_type == "MatMulInteger" for node in small.node) > 8
    for budget in (0.2, 0.5, 1.0):
        acm.set_budget(model, budget)
        found, expected = writing.runner(tmp_path)(x, torch.tensor(budget))[0], model(x)
        assert (found - expected).norm() < 0.1 * expected.norm()


class Stages(nn.Module):
    """All hidden states, the first of which is the input itself, and a number."""

    def __init__(self):
        super().__init__()
        self.part = Residual(Mlp())

    def forward(self, x):
        return {"hidden": (x, self.part(x)), "layers": 1}


@torch.no_grad()
def test_an_output_that_is_the_input_leaves_the_input_its_name(tmp_path):
    x = torch.randn(2, 5, WIDTH)
    model = acm.rewrite(Stages().eval(), acm.plan(Stages().eval(), x, init="random"))
    give_budgets(model)
    acm.export(model, tmp_path / "out", x, format="onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "out/model.onnx")
    assert [value.name for value in session.get_inputs()] == ["x", "budget"]
    assert [value.name for value in session.get_outputs()] == ["hidden_0", "hidden_1"]
    acm.set_budget(model, 0.5)
    first, last = writing.runner(tmp_path / "out")(x, torch.tensor(0.5))
    assert torch.equal(first, x)
    assert_close(last, model(x)["hidden"][1])


def test_operators_are_those_of_the_standard_and_names_are_kept(folder):
    import onnx
    import onnxruntime

    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"} and not model.functions
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    facts = json.loads((folder / "export.json").read_text())
    assert facts["kind"] == "onnx" and facts["budgets"]["out_of_range"] == "clamped"
    assert [(value.name, value.shape) for value in session.get_inputs()] == [
        (tensor["name"], tensor["shape"]) for tensor in facts["inputs"]
    ]
    assert facts["inputs"][0]["shape"][0] == "batch"
    assert [(value.name, value.shape) for value in session.get_outputs()] == [("output", ["batch", 10])]


def test_the_printed_code_runs(vision, folder, monkeypatch):
    model, x = vision
    monkeypatch.chdir(folder)
    names = {"x": x.numpy()}
    code = json.loads((folder / "export.json").read_text())["usage"].replace("model.run", "y = model.run")
    exec(code, names)
    acm.set_budget(model, 0.4)
    with torch.no_grad():
        assert_close(torch.from_numpy(names["y"][0]), model(x))


@torch.no_grad()
@pytest.mark.parametrize("case", KINDS)
def test_models_of_other_kinds(case, tmp_path):
    model, x = learned(ALL[case])
    run = writing.runner(acm.export(model, tmp_path / "out", x, format="onnx").parent)
    for budget in BUDGETS:
        acm.set_budget(model, budget)
        assert_close(run(x, torch.tensor(budget))[0], answer(model, x))


@torch.no_grad()
@pytest.mark.slow
def test_texts_of_any_length_and_budgets_of_examples_with_bounds(tmp_path):
    model, x = learned(PUBLISHED["hf_bert"])
    inputs = {"input_ids": x[:1], "attention_mask": torch.ones_like(x[:1])}
    path = acm.export(
        model, tmp_path / "out", inputs, format="onnx", per_example=True, controls=("cap", "k_lo", "k_hi")
    )
    run = writing.runner(path.parent)
    free = (torch.tensor(1.0), torch.tensor(0), torch.tensor(4))
    for shape in ((1, 5), (3, 11)):
        ids, budgets = torch.randint(0, 50, shape), torch.tensor([0.2, 0.5, 1.0])[: shape[0]]
        mask = torch.ones_like(ids)
        with acm.batch(model, budgets=budgets):
            expected = model(input_ids=ids, attention_mask=mask)
        assert_close(run(ids, mask, budgets, *free)[0], expected[0])
    acm.set_k(model, 1)
    pinned = (torch.tensor(1.0), torch.tensor(1), torch.tensor(1))
    assert_close(run(ids, mask, budgets, *pinned)[0], model(input_ids=ids, attention_mask=mask)[0])


@torch.no_grad()
@pytest.mark.parametrize("case", KINDS)
def test_one_k_of_any_model(case, tmp_path):
    model, x = learned(ALL[case])
    wider = torch.cat([x, x.flip(0)])
    for k in (1, 2, 4):
        folder = acm.export(model, tmp_path / "out", x, format="onnx", fixed_k=k).parent
        acm.set_k(model, k)
        assert_close(writing.runner(folder)(wider)[0], answer(model, wider))
    facts = json.loads((folder / "export.json").read_text())
    assert set(facts["k"].values()) == {4} and "budget" not in [tensor["name"] for tensor in facts["inputs"]]


def test_one_k_holds_fewer_weights_and_the_live_model_is_left_as_it_was(vision, tmp_path):
    import onnx

    model, x = vision
    acm.set_budget(model, 0.35)
    dense = {id(module.dense): module.dense for module in acm.sites(model).values()}
    sizes = []
    for k in (1, 4):
        path = acm.export(model, tmp_path / "out", x, format="onnx", fixed_k=k)
        operators = {node.op_type for node in onnx.load(path).graph.node}
        sizes.append(path.stat().st_size)
    hidden = sum(3 * module.learners.w_in[0].numel() * 2 for module in acm.sites(model).values())
    assert sizes[1] - sizes[0] > 0.9 * 4 * hidden
    assert not operators & {"ArgMax", "Where", "CumSum"}
    assert acm.status(model).budget == 0.35
    assert {module.state for module in acm.sites(model).values()} == {"learners"}
    assert {id(module.dense): module.dense for module in acm.sites(model).values()} == dense


@pytest.mark.slow
def test_weights_too_large_for_one_file_have_their_own(vision, tmp_path, monkeypatch):
    model, x = vision
    monkeypatch.setattr(writing, "_ONE_FILE", 0)
    acm.export(model, tmp_path / "out", x, format="onnx", fixed_k=2)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "export.json",
        "model.onnx",
        "model.onnx.data",
    ]
    monkeypatch.undo()
    acm.export(model, tmp_path / "out", x, format="onnx", fixed_k=2)
    assert not (tmp_path / "out/model.onnx.data").exists()


def test_what_cannot_be_is_refused_and_nothing_written(vision, tmp_path, monkeypatch):
    model, x = vision
    out = tmp_path / "out"
    for k in (0, 5, True):
        with pytest.raises(UsageError, match="this export needs one k"):
            acm.export(model, out, x, format="onnx", fixed_k=k)
    half, y = learned(ALL["swiglu"])
    with pytest.raises(UsageError, match="no kernels of bfloat16"):
        acm.export(half.bfloat16(), out, y.bfloat16(), format="onnx")
    small, y = learned(ALL["swiglu"])
    for to in ("int8", "int4"):
        quantised = acm.quantize(copy.deepcopy(small), to)
        for options in ({}, {"fixed_k": 1}):
            with pytest.raises(UsageError, match=f"no operator for this package's {to} weights"):
                acm.export(quantised, out, y, format="onnx", **options)
    _, y, unfitted = rewritten(ALL["swiglu"])
    with pytest.raises(UsageError, match="have not been measured"):
        acm.export(unfitted, out, y, format="onnx")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(PackageMissing, match="ONNX needs onnxscript"):
        acm.export(model, out, x, format="onnx")
    assert not out.exists()


def test_the_verb(tmp_path):
    model, _ = learned(PUBLISHED["hf_bert"])
    acm.save(model, tmp_path / "saved")
    words = ["export", str(tmp_path / "saved"), "--format", "onnx", "--input", "1x7:int", "--json"]
    for more in ([], ["--fixed-k", "2"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["kind"] == "onnx"
    assert (tmp_path / "saved/export/onnx/model.onnx").is_file()
