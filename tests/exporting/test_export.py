"""Exported programs: the budget is an input, outputs are the live model's, and what cannot be is refused in words."""

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.errors import AcmError, FixedBudget, StorageError, UsageError, VerificationFailed
from acm_compiler.exporting.calls import copied_tensors, free_axes, plain_output, tensors_alone
from acm_compiler.exporting.controls import check_controls
from acm_compiler.exporting.traced import Traced, check_answers, refusing
from acm_compiler.passes.rewrite.conversion import BudgetTable, conversion
from tests.helpers.decoders import gated
from tests.helpers.models import WIDTH, Flattened, Mlp, Residual
from tests.helpers.rewrite_cases import ALL, PUBLISHED, assert_close, give_budgets, rewritten

BUDGETS = (0.2, 0.35, 0.5, 0.7, 1.0)


@pytest.fixture(scope="module")
def vision():
    """A converted vision transformer with a budget table, and an input of two images."""
    _, x, model = rewritten(PUBLISHED["torchvision_vit"], sites="mlp")
    give_budgets(model)
    return model, x


@pytest.fixture(scope="module")
def program(vision, tmp_path_factory):
    """The program exported of it, loaded."""
    model, x = vision
    return torch.export.load(acm.export(model, tmp_path_factory.mktemp("pt2") / "out", x)).module()


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_program_gives_the_live_models_outputs_at_every_budget(vision, program, budget, batch):
    model, x = vision
    x = torch.randn(batch, *x.shape[1:])
    acm.set_budget(model, budget)
    assert_close(program(x, budget=torch.tensor(budget)), model(x))


@torch.no_grad()
def test_budgets_change_what_runs(vision, program):
    _, x = vision
    low, high = (program(x, budget=torch.tensor(budget)) for budget in (0.2, 1.0))
    assert (low - high).abs().max() > 1e-3


@pytest.mark.parametrize("budget", [0.19, 1.01, -1.0, float("nan"), float("inf")])
def test_a_program_refuses_budgets_out_of_range(vision, program, budget):
    with pytest.raises(RuntimeError, match=r"budget must be from 0\.2 to 1"):
        program(vision[1], budget=torch.tensor(budget))


@torch.no_grad()
def test_budgets_of_examples(vision, tmp_path):
    model, x = vision
    program = torch.export.load(acm.export(model, tmp_path / "out", x, per_example=True)).module()
    x = torch.randn(3, *x.shape[1:])
    budgets = torch.tensor([0.2, 0.5, 1.0])
    with acm.batch(model, budgets=budgets):
        expected = model(x)
    assert_close(program(x, budget=budgets), expected)
    with pytest.raises(RuntimeError, match="budget must be"):
        program(x, budget=torch.tensor([0.2, 0.5, 1.1]))


@torch.no_grad()
def test_budgets_of_examples_whose_tokens_lie_along_the_batch(tmp_path):
    x = torch.randn(2, 5, WIDTH)
    model = gated(Flattened(Mlp()).eval(), x, torch.randn(4, 5, WIDTH))
    file = acm.export(model, tmp_path / "out", x, per_example=True, dynamic={"x": 1})
    x, budgets = torch.randn(3, 7, WIDTH), torch.tensor([0.3, 0.6, 1.0])
    with acm.batch(model, mask=torch.ones(3, 7), budgets=budgets):
        expected = model(x)
    assert_close(torch.export.load(file).module()(x, budget=budgets), expected)


@torch.no_grad()
def test_cap_and_bounds_of_k_are_inputs_too(vision, tmp_path):
    model, x = vision
    program = torch.export.load(acm.export(model, tmp_path / "out", x, controls=("cap", "k_lo", "k_hi"))).module()
    free = {"cap": torch.tensor(1.0), "k_lo": torch.tensor(0), "k_hi": torch.tensor(4)}
    for k in range(5):
        acm.set_k(model, k)
        assert_close(program(x, budget=torch.tensor(1.0), **free | {"k_hi": torch.tensor(k)}), model(x))
        pinned = {"k_lo": torch.tensor(k), "k_hi": torch.tensor(k)}
        assert_close(program(x, budget=torch.tensor(0.5), **free | pinned), model(x))
    acm.set_budget(model, 0.5, cap=0.5)
    assert_close(program(x, budget=torch.tensor(0.5), **free | {"cap": torch.tensor(0.5)}), model(x))
    acm.set_k(model, 2)
    above = {"k_lo": torch.tensor(3), "k_hi": torch.tensor(2)}  # the upper bound holds
    assert_close(program(x, budget=torch.tensor(0.5), **free | above), model(x))
    cap, k = "cap must be above 0 and at most 1", "must be from 0 to 4"
    for name, value, words in (
        ("cap", 0.0, cap),
        ("cap", 1.1, cap),
        ("k_lo", -1, f"k_lo {k}"),
        ("k_hi", 5, f"k_hi {k}"),
    ):
        with pytest.raises(RuntimeError, match=words):
            program(x, budget=torch.tensor(0.5), **free | {name: torch.tensor(value)})


@torch.no_grad()
def test_texts_of_any_length(tmp_path):
    _, x, model = rewritten(PUBLISHED["hf_llama"])
    give_budgets(model)
    file = acm.export(model, tmp_path / "out", {"input_ids": x[:1], "attention_mask": torch.ones_like(x[:1])})
    program = torch.export.load(file).module()
    for shape in ((1, 5), (3, 11)):
        ids = torch.randint(0, 50, shape)
        acm.set_budget(model, 0.5)
        mask = torch.ones_like(ids)
        found = program(input_ids=ids, attention_mask=mask, use_cache=False, budget=torch.tensor(0.5))
        assert_close(found["logits"], model(ids, attention_mask=mask).logits)
    assert json.loads((tmp_path / "out/export.json").read_text())["inputs"][0]["shape"] == ["batch", "length"]


def test_outputs_of_transformers_become_dicts_with_the_outputs_of_their_parts():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    tower = outputs.BaseModelOutputWithPast(last_hidden_state=torch.ones(2), past_key_values=object())
    found = plain_output(outputs.Seq2SeqLMOutput(logits=torch.zeros(1), encoder_last_hidden_state=tower))
    assert type(found) is dict and type(found["encoder_last_hidden_state"]) is dict
    assert [list(found), list(found["encoder_last_hidden_state"])] == [
        ["logits", "encoder_last_hidden_state"],
        ["last_hidden_state"],
    ]


_Named = namedtuple("_Named", "first second")


@dataclass
class _Described:
    logits: torch.Tensor
    hidden: list
    note: str = "free text"
    count: int = 3
    loss: torch.Tensor | None = None


def test_outputs_become_dicts_lists_and_tuples_that_no_library_is_needed_for():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    one = torch.ones(1)
    within = outputs.BaseModelOutput(last_hidden_state=one)
    assert plain_output(_Described(one, [one, within])) == {
        "logits": one,
        "hidden": [one, {"last_hidden_state": one}],
        "count": 3,
        "loss": None,
    }
    found = plain_output((within, _Named(one, (None, one)), _Described, {"a": within, "b": 2, "c": object()}))
    assert found == ({"last_hidden_state": one}, (one, (None, one)), None, {"a": {"last_hidden_state": one}, "b": 2})
    assert type(found[1]) is tuple
    partly = plain_output(outputs.BaseModelOutput(last_hidden_state=one, hidden_states=(None, one)))
    assert partly == {"last_hidden_state": one, "hidden_states": (None, one)}  # a tower that keeps its last alone
    assert tensors_alone({"a": one, "b": 2, "c": [0.5, within]}) == {
        "a": one,
        "b": None,
        "c": [None, {"last_hidden_state": one}],
    }
    copies = copied_tensors({"a": one, "b": 2})
    assert copies["a"] is not one and torch.equal(copies["a"], one) and copies["b"] is None


class _Drawing(nn.Module):
    """Outputs in classes of its own, one of them random."""

    def __init__(self):
        super().__init__()
        self.part = Residual(Mlp())

    def forward(self, x):
        y = self.part(x)
        return _Named(_Described(y, [x, y]), y + torch.rand_like(y))


@torch.no_grad()
def test_random_numbers_are_drawn_alike_and_outputs_have_no_class_of_the_models(tmp_path):
    x = torch.randn(2, 5, WIDTH)
    model = gated(_Drawing().eval(), x, x)
    program = torch.export.load(acm.export(model, tmp_path / "out", x)).module()
    acm.set_budget(model, 0.5)
    torch.manual_seed(7)
    described, drawn = program(x, budget=torch.tensor(0.5))
    torch.manual_seed(7)
    expected = model(x)
    assert_close(described["logits"], expected.first.logits)
    assert_close(drawn, expected.second)


class _ByRow(nn.Module):
    """One output for each example, by a loop over them."""

    def __init__(self):
        super().__init__()
        self.part = Residual(Mlp())

    def forward(self, x):
        return [row.mean(0) for row in self.part(x)]


@torch.no_grad()
def test_a_program_takes_the_one_example_it_was_made_with_where_the_model_fixes_their_number(tmp_path):
    x = torch.randn(1, 5, WIDTH)
    model = gated(_ByRow().eval(), x, x)
    file = acm.export(model, tmp_path / "out", x)
    acm.set_budget(model, 0.5)
    assert_close(torch.export.load(file).module()(x, budget=torch.tensor(0.5))[0], model(x)[0])
    assert json.loads((tmp_path / "out/export.json").read_text())["inputs"][0]["shape"] == [1, 5, WIDTH]


def test_every_text_of_a_call_has_a_free_length():
    call = ((), {"ids": torch.ones(2, 7, dtype=torch.long), "target_ids": torch.ones(2, 5, dtype=torch.long)})
    axes = free_axes(["ids", "target_ids"], call, None)
    assert list(axes["ids"]) == list(axes["target_ids"]) == [0, 1]


@torch.no_grad()
def test_a_mixture_of_experts_needs_no_operator_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings |= {"num_key_value_heads": 2, "vocab_size": 20, "num_local_experts": 2, "num_experts_per_tok": 1}
    ids = {"input_ids": torch.randint(0, 20, (2, 5))}
    original = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings)).eval()
    model = gated(original, ids, ids, sites="attn.o")
    program = torch.export.load(acm.export(model, tmp_path / "out", ids))
    assert "torch.ops.transformers" not in program.graph_module.code
    acm.set_budget(model, 0.5)
    assert_close(program.module()(**ids, use_cache=False, budget=torch.tensor(0.5))["logits"], model(**ids).logits)
    refused(model, tmp_path / "package", ids, r"written in Python.*grouped_mm.*\n.*batched_mm", format="aoti")


class _Pair(nn.Module):
    """Two sequences of any lengths, and a class that is never predicted."""

    def __init__(self):
        super().__init__()
        self.part = Residual(Mlp())

    def forward(self, a, b):
        scores = self.part(a) + self.part(b).mean(1, keepdim=True)
        return nn.functional.pad(scores, (0, 1), value=-torch.inf)


@torch.no_grad()
def test_lengths_of_their_own_have_names_of_their_own_and_outputs_may_be_infinite(tmp_path):
    dense, x = _Pair().eval(), (torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH))
    model = acm.rewrite(dense, acm.plan(dense, x, sites="mlp", init="random"))
    give_budgets(model)
    program = torch.export.load(acm.export(model, tmp_path / "out", x, dynamic={"a": 1, "b": 1})).module()
    shapes = [i["shape"] for i in json.loads((tmp_path / "out/export.json").read_text())["inputs"]]
    assert shapes == [["batch", "length", WIDTH], ["batch", "b_1", WIDTH], []]
    acm.set_budget(model, 0.5)
    other = (torch.randn(3, 4, WIDTH), torch.randn(3, 9, WIDTH))
    torch.testing.assert_close(program(*other, budget=torch.tensor(0.5)), model(*other))


@torch.no_grad()
@pytest.mark.parametrize("case", ["encoder", "fused_qkv", "swiglu", "shared"])
def test_models_of_other_kinds(case, tmp_path):
    _, x, model = rewritten(ALL[case])
    give_budgets(model)
    program = torch.export.load(acm.export(model, tmp_path / "out", x)).module()
    for budget in BUDGETS:
        acm.set_budget(model, budget)
        assert_close(program(x, budget=torch.tensor(budget)), model(x))


@torch.no_grad()
def test_further_axes_by_name(tmp_path):
    _, x, model = rewritten(ALL["swiglu"])
    give_budgets(model)
    program = torch.export.load(acm.export(model, tmp_path / "out", x, dynamic={"x": 1})).module()
    acm.set_budget(model, 0.5)
    longer = torch.randn(3, 9, x.shape[-1])
    assert_close(program(longer, budget=torch.tensor(0.5)), model(longer))
    refused(model, tmp_path / "two", x, "no input of that name is a tensor", dynamic={"y": 1})
    refused(model, tmp_path / "two", x, "no such axis", dynamic={"x": 7})
    refused(model, tmp_path / "two", x, "torch.export makes no program", dynamic={"x": (1, 2)})


def test_the_model_is_left_as_it_was(vision, tmp_path):
    model, x = vision
    acm.set_budget(model, 0.35)
    model.train()
    try:
        before = {name: module.run_time() for name, module in acm.sites(model).items()}
        dense = {name: module.dense for name, module in acm.sites(model).items()}
        acm.export(model, tmp_path / "out", x)
        assert model.training and acm.status(model).budget == 0.35
        assert before == {name: module.run_time() for name, module in acm.sites(model).items()}
        assert dense == {name: module.dense for name, module in acm.sites(model).items()}
        assert None not in dense.values()
    finally:
        model.eval()


def test_the_folder_says_budgets_versions_and_how_it_is_loaded(vision, tmp_path):
    model, x = vision
    acm.export(model, tmp_path / "out", x)
    facts = json.loads((tmp_path / "out/export.json").read_text())
    assert facts["budgets"]["range"] == [0.2, 1.0] and len(facts["budgets"]["table"]) == 3
    assert facts["versions"]["torch"] and facts["files"] == ["program.pt2", "export.json"]
    assert [tensor["name"] for tensor in facts["inputs"]] == ["x", "budget"]
    torch.save(x, tmp_path / "out/x.pt")
    code = f"import torch; x = torch.load('x.pt'); {facts['usage']}; assert model is not None"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "out", check=True)


def test_an_earlier_export_is_replaced_and_files_of_others_are_not(vision, tmp_path):
    model, x = vision
    acm.export(model, tmp_path / "out", x)
    acm.export(model, tmp_path / "out", x)
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"files that no export wrote.*notes\.txt"):
        acm.export(model, tmp_path / "out", x)
    with pytest.raises(UsageError, match="a file, not a folder"):
        acm.export(model, tmp_path / "out/notes.txt", x)
    (tmp_path / "out/export.json").write_text("{}")
    with pytest.raises(StorageError, match="not a description of an export"):
        acm.export(model, tmp_path / "out", x)


def test_outputs_that_are_not_the_models_are_refused():
    expected, infinite = torch.tensor([1.0, 2.0]), torch.tensor([float("inf"), 2.0])
    assert (
        check_answers(expected + 1e-5, expected, where="pt2")
        < 1e-5
        < check_answers(expected + 2e-2, expected, where="pt2", quantized=True)
    )
    for found, wanted in ((expected + 2e-2, expected), (expected, infinite), (expected * float("nan"), expected)):
        with pytest.raises(VerificationFailed, match="pt2: what was exported gives other outputs than the model"):
            check_answers(found, wanted, where="pt2")


def test_what_is_no_number_in_either_output_is_no_difference():
    nan = torch.tensor([1.0, float("nan")])
    assert check_answers(nan, nan, where="pt2") == 0
    for found, expected in ((nan, torch.ones(2)), (torch.ones(2), nan), (2 * nan, nan)):
        with pytest.raises(VerificationFailed):
            check_answers(found, expected, where="pt2")


@pytest.mark.parametrize("masked", [torch.finfo(torch.float32).min, -1e9, -1e4, float("-inf")])
def test_masked_outputs_are_no_measure_of_the_others(masked):
    expected = torch.tensor([[1.0, masked, -2.0], [masked, 0.5, masked]])
    wrong = expected.where(expected == masked, expected * 1.1)
    assert check_answers(expected, expected, where="pt2") == 0
    near = check_answers(expected.where(expected != -2, -2.00001), expected, where="pt2")
    assert near == pytest.approx(5e-6, rel=0.1)
    for found in (wrong, expected.where(expected != masked, 1.0)):
        with pytest.raises(VerificationFailed):
            check_answers(found, expected, where="pt2")


def test_an_input_of_the_models_own_is_no_control():
    with pytest.raises(UsageError, match="the model has an input of that name itself"):
        check_controls("cap", inputs=["x", "cap"])


def refused(model, path, x, match, **options):
    with pytest.raises(AcmError, match=match) as caught:
        acm.export(model, path, x, **options)
    assert caught.value.exit_code == 2
    assert not path.exists()


@pytest.mark.parametrize("axes", ["1", None, True, 1.5, (1, "2")])
def test_axes_that_are_no_numbers_are_refused(axes):
    with pytest.raises(UsageError, match="no such axis"):
        free_axes(["x"], ((torch.zeros(2, 3, 4),), {}), {"x": axes})


def test_other_objects_than_axes_and_controls_and_a_batch_of_none_are_refused(vision, tmp_path):
    model, x = vision
    refused(model, tmp_path / "out", x, "dynamic must be a mapping", dynamic=["x"])
    refused(model, tmp_path / "out", x, "no such control", controls=5)
    refused(model, tmp_path / "out", x[:0], "hold no example")  # the program would be for none alone


def test_what_cannot_be_is_refused_and_nothing_written(vision, tmp_path):
    model, x = vision
    refused(model, tmp_path / "out", x, "did you mean 'pt2'", format="pt")
    refused(model, tmp_path / "out", x, "did you mean 'cap'", controls="caps")
    refused(model, tmp_path / "out", torch.randn(2, 7), "does not run on the example inputs")
    refused(model, tmp_path / "out", {}, "no tensor")
    owner = conversion(model)
    table, owner.table = owner.table, None
    try:
        refused(model, tmp_path / "out", x, "no budget can be an input")
    finally:
        owner.table = table


def test_a_refusal_of_torch_onnx_names_the_operator_and_gives_no_advice_about_converters():
    failed = type("ConversionError", (Exception,), {"__module__": "torch.onnx"})
    with pytest.raises(UsageError, match=r"no graph: KeyError: 'aten\.svd'"), refusing("no graph"):
        raise failed("- Implement it") from KeyError("aten.svd")


def test_the_printed_call_shows_constants_and_names_of_tensors():
    pair = [torch.ones(2), torch.ones(2)]
    call = ((pair, None, 0.5), {"flag": True, "extra": {"a": torch.ones(2)}, "budget": torch.ones(2)})
    names = ("pair", "mask", "scale", *call[1])
    program = Traced(program=None, call=call, names=names, answer=None, low=0.2, quantized=False)
    assert program.words == ["pair", "None", "0.5", "flag=True", "extra=extra", "budget=torch.full((batch,), 0.4)"]


class Deciding(nn.Module):
    """An MLP beside a bypass, and a decision on the values of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x) if x.sum() > 0 else x - self.mlp(x)


def test_a_model_that_decides_by_values_is_refused_with_torchs_reason_alone(tmp_path, capsys):
    x = torch.rand(2, 5, 8)
    original = Deciding().eval()
    model = acm.rewrite(original, acm.plan(original, x))
    give_budgets(model)
    refused(model, tmp_path / "out", x, "torch.export makes no program of this model: .*data-dependent")
    assert "torch.ops.aten" not in capsys.readouterr().err  # the graph, which torch prints


def test_a_program_names_acm_export_where_a_budget_is_set_on_it(program):
    with pytest.raises(FixedBudget, match="budget=torch"):
        acm.set_budget(program, 0.4)


def test_a_table_with_jumps(tmp_path):
    _, x, model = rewritten(ALL["swiglu"])
    owner = give_budgets(model)
    owner.table = BudgetTable(rule="damage", points=owner.table.points, examples=64, jumps=(0.2,))
    program = torch.export.load(acm.export(model, tmp_path / "out", x)).module()
    with torch.no_grad():
        for budget in (0.2, 0.4, 0.5975, 0.599, 0.6, 0.8):
            acm.set_budget(model, budget)
            assert_close(program(x, budget=torch.tensor(budget)), model(x))


def test_the_verb_needs_no_data_where_the_recipe_says_the_shape(tmp_path):
    """The folder of images of the recipe is not there."""
    _, _, model = rewritten(PUBLISHED["hf_vit"])
    give_budgets(model)
    lost = f"{{kind: imagefolder, root: {tmp_path / 'lost'}}}"
    recipe = f"acm: 1\nname: lost\nmodel: {{source: hf, name: {tmp_path / 'gone'}}}\ninput: {{image: [3, 16, 16]}}\n"
    recipe += f"task: {{kind: classify}}\ndata: {{train: {lost}, eval: {lost}}}\n"
    acm.save(model, tmp_path / "saved", extra={"recipe.yaml": recipe})
    done = CliRunner().invoke(app, ["export", str(tmp_path / "saved")])
    assert done.exit_code == 0 and "example of the recipe's shape" in done.stderr, done.output
    for words in (["--format", "onnx", "--budget", "0.5"], ["--data", lost]):
        done = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), *words])
        assert done.exit_code == 1 and "lost" in done.stderr, done.output


def test_the_verb(tmp_path):
    _, _, model = rewritten(PUBLISHED["hf_llama"])
    give_budgets(model)
    acm.save(model, tmp_path / "saved")
    words = ["export", str(tmp_path / "saved"), "--format", "pt2", "--input", "1x7:int"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["kind"] == "pt2"
    assert (tmp_path / "saved/export/pt2/program.pt2").is_file()
    acm.save(model, tmp_path / "saved")  # an export within is no file of others
    for more in (["--format", "pt3"], ["--dynamic", "x"], ["--controls", "k"], ["--input", "ax"]):
        failed = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "new"), *more])
        assert failed.exit_code == 2 and not (tmp_path / "new").exists(), failed.output
    for given, said in ([*words, "--budget", "0.5"], "formats onnx and checkpoint"), (words[:4], "--input 2x128:int"):
        failed = CliRunner().invoke(app, given)
        assert failed.exit_code == 2 and said in failed.stderr, failed.output
