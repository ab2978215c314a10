"""A saved folder is complete, says what it is, and becomes the same model again."""

import copy
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import fx, nn

import acm_compiler as acm
from acm_compiler.checkpoint import check_own_folder
from acm_compiler.checkpoint.source import source_of
from acm_compiler.errors import ModelSourceError, NoDenseRegion, NotRewritten, PlanMismatch, StorageError, UsageError
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, EvaluatedBudget, conversion
from acm_compiler.recipe import load_recipe
from acm_compiler.runs.pipeline import convert
from tests.helpers import ROOT, models, tour_model
from tests.helpers.rewrite_cases import ALL, answer, give_budgets, planned, rewritten, state_of, trained

FILES = ["budgets.json", "model.json", "model.safetensors", "plan.json"]


def shaken(model: nn.Module) -> nn.Module:
    """A copy of the same structure with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return other


def rewrite_json(path: Path, **changes) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def saved(tmp_path):
    """(model before the rewrite, input, rewritten model, folder it is saved in)."""
    model, x, copied = rewritten(ALL["parallel"])
    acm.save(copied, tmp_path / "out")
    return model, x, copied, tmp_path / "out"


@pytest.mark.parametrize("name", ["hf_vit", "hf_bert", "hf_wav2vec2", "hf_gpt2", "hf_llama"])
def test_a_model_of_a_known_library_comes_back_bit_for_bit_by_itself(name, tmp_path):
    _, x, model = rewritten(ALL[name], init="random")
    acm.set_k(model, 4)
    acm.save(model, tmp_path / "out")
    of_transformers = {"README.md", "config.json"} | ({"generation_config.json"} if model.can_generate() else set())
    assert set(os.listdir(tmp_path / "out")) == {*FILES, *of_transformers}
    loaded = acm.load(tmp_path / "out")
    assert type(loaded) is type(model) and not loaded.training
    assert torch.equal(answer(loaded, x), answer(model, x))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
    assert all(module.dense is None for module in acm.sites(loaded).values())


def test_a_shipped_model_of_a_known_library_is_saved_as_one_of_the_library():
    _, model = convert(load_recipe("llama_docs"), lambda _: None)
    plan = conversion(model).plan
    assert plan.model.source["source"] == "shipped"
    found = source_of(model, plan)
    assert (found["source"], found["auto_class"]) == ("hf", "AutoModelForCausalLM")


@pytest.mark.parametrize("name", ["hf_llama", "hf_gpt2"])
def test_a_loaded_language_model_generates_the_same(name, tmp_path):
    _, x, model = rewritten(ALL[name])
    acm.save(model, tmp_path / "out")
    loaded = acm.load(tmp_path / "out")
    expected = model.generate(x, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(loaded.generate(x, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


def test_a_registered_torchvision_model_says_itself_how_it_is_built(tmp_path, monkeypatch):
    from torchvision.models import swin_transformer

    whole = swin_transformer._swin_transformer  # of which half the stages are enough, of every model of this kind
    monkeypatch.setattr(swin_transformer, "_swin_transformer", lambda **o: whole(**o | {"depths": o["depths"][:2]}))
    model, x, copied = rewritten(
        lambda: (swin_transformer.swin_t(num_classes=5), torch.randn(1, 3, 32, 32)), sites="features.1.*"
    )
    acm.save(copied, tmp_path / "out")
    assert torch.equal(acm.load(tmp_path / "out")(x), copied(x))
    # the same parameters, but another model
    copied.features[3][0].attn.attention_dropout = 0.3
    acm.save(copied, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "model.json").read_text())["source"] is None
    with pytest.raises(StorageError, match="base_model="):
        acm.load(tmp_path / "out")
    assert torch.equal(acm.load(tmp_path / "out", base_model=model)(x), copied(x))


@pytest.mark.parametrize(
    "name", ["torchvision_vit", "encoder", "einsum", "functional", "chunked_glu", "shared", "parallel"]
)
def test_a_class_of_the_users_comes_back_with_its_base_model(name, tmp_path):
    model, x, copied = rewritten(ALL[name])
    acm.save(copied, tmp_path / "out")
    before, expected = state_of(model), answer(copied, x)
    loaded = acm.load(tmp_path / "out", base_model=model)
    assert torch.equal(answer(loaded, x), expected)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(answer(acm.revert(loaded), x), answer(model, x))


def test_a_model_loaded_in_inference_mode_has_ordinary_tensors(saved):
    model, _, _, folder = saved
    with torch.inference_mode():
        loaded = acm.load(folder, base_model=model)
    assert not any(tensor.is_inference() for tensor in (*loaded.parameters(), *loaded.buffers()))
    acm.set_k(loaded, 4)


def test_a_base_model_with_other_weights_gives_structure_only(saved, caplog):
    model, x, copied, folder = saved
    loaded = acm.load(folder, base_model=shaken(model))
    assert torch.equal(answer(loaded, x), answer(copied, x))
    assert "base_model has other weights" in caplog.text
    with pytest.raises(NoDenseRegion):
        acm.revert(loaded)
    # sites that still answer by their dense region have brought it along
    assert {m.dense is not None for m in acm.sites(loaded).values() if m.state == "dense"} == {True}


def test_a_base_model_with_another_activation_gives_structure_only(saved, caplog):
    model, x, copied, folder = saved
    other = copy.deepcopy(model)
    other.blocks[0].mlp.act = nn.ReLU()
    loaded = acm.load(folder, base_model=other)
    assert torch.equal(answer(loaded, x), answer(copied, x))
    assert "base_model computes something else at blocks.0.mlp: blocks.0.mlp.act: ReLU()" in caplog.text
    with pytest.raises(NoDenseRegion):
        acm.revert(loaded)


def test_a_base_model_of_another_structure_is_refused(saved):
    *_, folder = saved
    with pytest.raises(PlanMismatch, match="build it as that model was built") as caught:
        acm.load(folder, base_model=trained(ALL["swiglu"])[0])
    assert "plan again" not in str(caught.value)


class Renamed(tour_model.Classifier):
    """The same parameters under another class."""


def deeper(model):
    model.blocks.append(tour_model.Block())


def narrower(model):
    model.blocks[1].mlp = torch.nn.Sequential(torch.nn.Linear(32, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))


def with_more_classes(model):
    model.head = torch.nn.Linear(32, 5)


def without_a_norm(model):
    model.blocks[0].norm_2 = torch.nn.Identity()


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        (deeper, "blocks.2.norm_1.weight [32]", "nothing of that name"),
        (narrower, "blocks.1.mlp [(96, 32), (32, 96)]", "[(128, 32), (32, 128)]"),
        (with_more_classes, "head.weight [5, 32]", "head.weight [4, 32]"),
        (without_a_norm, "no blocks.0.norm_2.bias", "blocks.0.norm_2.bias [32]"),
    ],
)
def test_the_first_thing_in_which_a_base_model_differs_is_named(tmp_path, change, found, expected):
    model, example = tour_model.model()
    acm.save(acm.rewrite(model, acm.plan(model, example)), tmp_path / "out")
    change(model)
    with pytest.raises(PlanMismatch) as caught:
        acm.load(tmp_path / "out", base_model=model)
    assert f"(found {found}, expected {expected})" in str(caught.value)


@pytest.mark.parametrize("module", ["__main__", "tests.checkpoint.test_checkpoint"])
def test_a_class_that_was_renamed_or_moved_is_warned_of(tmp_path, caplog, module, monkeypatch):
    model, example = tour_model.model()
    monkeypatch.setattr(tour_model.Classifier, "__module__", module)
    plan = acm.plan(model, example)
    acm.save(acm.rewrite(model, plan), tmp_path / "out")
    monkeypatch.undo()
    caplog.clear()
    model.__class__ = Renamed
    loaded = acm.load(tmp_path / "out", base_model=model)
    (told,) = [record.message for record in caplog.records]
    assert f"{module}.Classifier" in told and "tests.checkpoint.test_checkpoint.Renamed" in told
    assert torch.equal(answer(loaded, example), answer(model, example))
    assert torch.equal(answer(acm.rewrite(model, plan), example), answer(model, example))
    assert len(caplog.records) == 2


def test_what_was_resized_after_the_rewrite_loads_into_a_model_of_the_new_size(tmp_path):
    model, example = tour_model.model()
    copied = acm.rewrite(model, acm.plan(model, example))
    with_more_classes(copied)
    acm.save(copied, tmp_path / "out")
    with pytest.raises(StorageError, match=r"do not fit at head\.weight \(found \(5, 32\), expected \(4, 32\)\)"):
        acm.load(tmp_path / "out", base_model=model)
    with_more_classes(model)
    assert torch.equal(answer(acm.load(tmp_path / "out", base_model=model), example), answer(copied, example))


def test_saving_tells_whether_the_model_can_be_built_again(tmp_path, caplog):
    for name in ("parallel", "hf_vit"):
        acm.save(rewritten(ALL[name])[2], tmp_path / name)
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "this Stack is built again" in told.message and f"acm.load('{tmp_path}/parallel', base_model=" in told.message
    )


def test_a_class_that_nothing_can_build_is_asked_for(saved):
    *_, folder = saved
    with pytest.raises(StorageError, match=r"tests\.helpers\.models\.Stack[\s\S]*base_model=model"):
        acm.load(folder)


def test_a_graph_module_needs_the_same_graph(tmp_path):
    model, x = trained(ALL["parallel"])
    traced = fx.symbolic_trace(model)
    copied = acm.rewrite(traced, acm.plan(traced, x))
    acm.save(copied, tmp_path / "out")
    assert torch.equal(acm.load(tmp_path / "out", base_model=traced)(x), copied(x))
    doubled = copy.deepcopy(traced)
    (output,) = [node for node in doubled.graph.nodes if node.op == "output"]
    with doubled.graph.inserting_before(output):
        output.args = (doubled.graph.call_function(torch.neg, output.args),)
    doubled.recompile()
    with pytest.raises(PlanMismatch, match="graph"):
        acm.load(tmp_path / "out", base_model=doubled)


def test_a_function_named_in_the_folder_runs_only_when_allowed(tmp_path):
    model, x = trained(ALL["swiglu"])
    record = {"source": "python", "name": "tests.checkpoint.test_checkpoint:build_swiglu"}
    acm.save(acm.rewrite(model, acm.plan(model, x, source=record)), tmp_path / "out")
    with pytest.raises(ModelSourceError, match="allow_code=True"):
        acm.load(tmp_path / "out")
    torch.testing.assert_close(acm.load(tmp_path / "out", allow_code=True)(x), model(x))


def build_swiglu() -> nn.Module:
    """A model as a recipe's `python:` names it, with a tensor that is neither parameter nor buffer."""
    model = models.Stack(models.SwiGlu())
    model.table = torch.arange(3)
    return model


def test_states_budgets_and_rules_come_back(saved):
    model, x, copied, folder = saved
    owner = give_budgets(copied)
    acm.save(copied, folder)
    loaded = acm.load(folder, base_model=model)
    again = conversion(loaded)
    assert (again.table, again.default_budget, again.damage) == (owner.table, 0.6, owner.damage)
    assert again.budget == 0.6 and again.teacher == owner.teacher  # the recipe's own, where none was set
    acm.set_budget(copied, 0.6)
    for name, module in acm.sites(loaded).items():
        assert (module.state, module.gate.rule) == ("learners", "damage")
        assert module.knob_value == acm.sites(copied)[name].knob_value
    assert {site.state for site in again.plan.sites} == {"learners"}
    assert torch.equal(answer(loaded, x), answer(copied, x))


SET = {
    "a budget": (lambda m: acm.set_budget(m, 0.2), "budget: 0.200"),
    "a capped budget": (lambda m: acm.set_budget(m, 1.0, cap=0.5), "budget: 1.000, every k at most 0.5 N"),
    "budgets of phases": (
        lambda m: acm.set_budget(m, {"prefill": 0.8, "decode": 0.4}),
        "budget: prefill 0.800, decode 0.400",
    ),
    "a fixed k": (lambda m: acm.set_k(m, 1), "budget: none set; 5 of 5 sites run a fixed k"),
    "a fixed k of a part": (
        lambda m: (acm.set_budget(m, 0.4), acm.set_k(next(iter(acm.sites(m).values())), 2)),
        "budget: 0.400; 1 of 5 sites run a fixed k",
    ),
    "the gates alone": (lambda m: acm.set_k(m, None), "budget: none set"),
    "nothing": (lambda m: None, "no budget was set, every token runs all learners"),
}


UNMEASURED = ("a fixed k", "the gates alone", "nothing")


@pytest.mark.parametrize(
    ("name", "measured"), [*((name, True) for name in SET), *((name, False) for name in UNMEASURED)]
)
def test_what_was_set_is_saved_and_comes_back(saved, name, measured, caplog):
    model, x, copied, folder = saved
    choose, told = SET[name]
    owner = give_budgets(copied)
    owner.table, owner.default_budget = owner.table if measured else None, None
    choose(copied)
    acm.save(copied, folder)
    with caplog.at_level("INFO", logger="acm_compiler.checkpoint.load"):
        loaded = acm.load(folder, base_model=model)
    assert caplog.messages[-1] == f"{folder}: {told}"
    assert states_of(loaded) == states_of(copied)
    again = conversion(loaded)
    assert (again.budget, again.cap) == (owner.budget, owner.cap)
    assert acm.status(loaded).choice == acm.status(copied).choice
    assert torch.equal(answer(loaded, x), answer(copied, x))


def states_of(model):
    return {name: site.run_time() for name, site in acm.sites(model).items()}


def test_what_was_set_wins_over_the_recipes_budget(saved):
    model, _, copied, folder = saved
    give_budgets(copied)
    acm.set_budget(copied, 0.2)
    acm.save(copied, folder)
    loaded = acm.load(folder, base_model=model)
    assert conversion(loaded).budget == 0.2 and acm.set_budget(loaded, None) == 0.6


def test_what_a_run_reached_is_kept_beside_its_knobs(saved):
    model, _, copied, folder = saved
    owner = conversion(copied)
    points = tuple(BudgetPoint(share=s, knob=knob, k_lo=0) for s, knob in ((0.2, 1.5), (1.0, -9.0)))
    reached = (EvaluatedBudget(asked=0.5, knob=0.7, reached=0.51, metric=0.93),)
    owner.table = BudgetTable(rule="damage", points=points, examples=64, evaluated=reached)
    acm.save(copied, folder)
    document = json.loads((folder / "budgets.json").read_text())
    assert document["budgets"] == [{"asked": 0.5, "knob": 0.7, "reached": 0.51, "metric": 0.93}]
    assert conversion(acm.load(folder, base_model=model)).table == owner.table


def test_saved_files_can_be_read_by_whom_other_files_can(saved):
    *_, copied, folder = saved
    acm.save(copied, folder)
    (folder.parent / "other").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder.parent / "other").stat().st_mode}


def test_a_path_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="this is a file, not a folder"):
        acm.load(tmp_path / "file")
    with pytest.raises(StorageError, match=r"no saved model here .*\n  name a folder that acm.save"):
        acm.load(tmp_path / "nowhere")
    (tmp_path / "run" / "state").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"found the state of an unfinished run.*\n  continue it: acmc"):
        acm.load(tmp_path / "run")


def test_each_storage_is_written_once_and_tied_again(tmp_path):
    _, x, model = rewritten(ALL["hf_gpt2"])
    acm.save(model, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    assert json.loads(metadata["aliases"]) == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in names
    loaded = acm.load(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    # untied by the user: both are stored
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    acm.save(model, tmp_path / "out")
    loaded = acm.load(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, loaded.transformer.wte.weight * 2)
    assert torch.equal(answer(loaded, x), answer(model, x))


def test_the_type_is_the_files(tmp_path):
    _, x, model = rewritten(ALL["hf_vit"])
    acm.save(model.to(torch.bfloat16), tmp_path / "out")
    loaded = acm.load(tmp_path / "out")
    assert torch.equal(answer(loaded, x.bfloat16()), answer(model, x.bfloat16()))


@pytest.mark.parametrize("second_layer", ["shared", "shared_top", "per_k", "original"])
def test_every_form_of_learners_comes_back(second_layer, tmp_path):
    model, x, plan = planned(ALL["parallel"], lossless=second_layer == "shared_top")
    sites = tuple(dataclasses.replace(s, second_layer=second_layer) if s.last else s for s in plan.sites)
    copied = acm.rewrite(model, dataclasses.replace(plan, sites=sites))
    for module in acm.sites(copied).values():
        module.state = "learners"
        with torch.no_grad():
            for parameter in module.learners.parameters():
                parameter.normal_(0, 0.1)
    acm.save(copied, tmp_path / "out")
    loaded = acm.load(tmp_path / "out", base_model=model)
    for k in range(5):
        acm.set_k(copied, k)
        acm.set_k(loaded, k)
        assert torch.equal(answer(loaded, x), answer(copied, x))


def test_equal_models_make_equal_files_but_for_the_name_of_the_save(saved, tmp_path):
    *_, copied, folder = saved
    again = tmp_path / "again"
    acm.save(copy.deepcopy(copied), again)
    names = [json.loads((path / "model.json").read_text())["save"] for path in (folder, again)]
    assert names[0] != names[1]  # files of two saves are told apart
    # the file of the weights holds the save's name, too
    weights = [
        json.loads((path / "model.json").read_text())["digests"]["model.safetensors"] for path in (folder, again)
    ]
    for name in ("budgets.json", "model.json", "plan.json"):
        there = (folder / name).read_text().replace(names[0], names[1]).replace(weights[0], weights[1])
        assert there == (again / name).read_text()
    # the library writes the entries of the header in any order
    with safe_open(folder / "model.safetensors", "pt") as one, safe_open(again / "model.safetensors", "pt") as other:
        facts = {key: value.replace(names[0], names[1]) for key, value in one.metadata().items()}
        assert facts == other.metadata() and sorted(one.keys()) == sorted(other.keys())
        assert all(torch.equal(one.get_tensor(key), other.get_tensor(key)) for key in one.keys())  # noqa: SIM118


def test_wrappers_are_looked_through(saved):
    model, x, copied, folder = saved
    acm.save(nn.ModuleDict({"module": copied}), folder)
    assert torch.equal(answer(acm.load(folder, base_model=model), x), answer(copied, x))


def test_a_part_that_was_compiled_keeps_its_name(saved):
    model, x, copied, _ = saved
    folder = saved[3].parent / "other"
    eager = copy.deepcopy(copied)
    name = next(name for name, child in copied.named_children() if any(True for _ in child.parameters()))
    setattr(copied, name, torch.compile(getattr(copied, name), backend="eager"))
    acm.save(copied, folder)
    assert torch.equal(answer(acm.load(folder, base_model=model), x), answer(eager, x))


def test_a_part_of_a_rewritten_model_is_refused(saved, caplog):
    copied = saved[2]
    with pytest.raises(UsageError, match="part of a rewritten model"):
        acm.save(next(iter(acm.sites(copied).values())), saved[3].parent / "part")
    assert not (saved[3].parent / "part").exists() and not caplog.records


def test_dense_regions_are_left_out_but_where_they_answer(saved):
    *_, copied, folder = saved
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        dense = {name.partition(".dense.")[0] for name in file.keys() if ".dense." in name}  # noqa: SIM118
    assert dense == {name for name, module in acm.sites(copied).items() if module.state == "dense"} != set()


# the folder


def test_a_second_save_replaces_ours_and_keeps_what_a_run_left(saved):
    model, x, copied, folder = saved
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "state").mkdir()
    (folder / "state" / "step").write_text("7")
    with torch.no_grad():
        copied.head.bias.add_(1)
    acm.save(copied, folder, extra={"recipe.yaml": "acm: 1\n", "notes.bin": b"\0"})
    assert sorted(os.listdir(folder)) == sorted([*FILES, "metrics.jsonl", "notes.bin", "recipe.yaml", "state"])
    assert (folder / "state" / "step").read_text() == "7"
    assert torch.equal(answer(acm.load(folder, base_model=model), x), answer(copied, x))
    acm.save(copied, folder)  # notes.bin is known as ours
    assert os.listdir(folder.parent) == ["out"]


def test_a_folder_with_files_of_others_is_refused_untouched(saved, tmp_path):
    *_, copied, _ = saved
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    for attempt in (lambda: acm.save(copied, folder), lambda: check_own_folder(folder)):
        with pytest.raises(StorageError, match=r"home: .*thesis\.tex"):
            attempt()
    assert os.listdir(folder) == ["thesis.tex"]


def test_a_place_that_cannot_be_written_is_refused(saved, tmp_path):
    *_, copied, _ = saved
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "out"):
        for attempt in (acm.save, lambda _, place: check_own_folder(place)):
            with pytest.raises(StorageError):
                attempt(copied, place)
    check_own_folder(tmp_path / "new" / "deep")
    assert sorted(os.listdir(tmp_path)) == ["file", "out"]


@pytest.mark.parametrize("name", ["plan.json", "../x", "a/b", ""])
def test_extra_files_have_plain_names_of_their_own(saved, name):
    *_, copied, folder = saved
    with pytest.raises(UsageError):
        acm.save(copied, folder, extra={name: "text"})


def test_only_rewritten_models_with_values_are_saved(tmp_path):
    model, _, copied = rewritten(ALL["swiglu"])
    with pytest.raises(NotRewritten):
        acm.save(model, tmp_path / "out")
    with pytest.raises(StorageError, match="meta"):
        acm.save(copied.to("meta"), tmp_path / "out")
    assert os.listdir(tmp_path) == []


_CHILD = """
import os, resource, signal, sys
import torch
import acm_compiler as acm
from acm_compiler.errors import StorageError
from tests.helpers.rewrite_cases import ALL, rewritten

how, folder = sys.argv[1:]
_, _, model = rewritten(ALL["parallel"])
with torch.no_grad():
    model.head.bias.add_(1)
if how == "kill":
    write = os.fsync
    def fsync(file):
        write(file)
        os.kill(os.getpid(), signal.SIGKILL)
    os.fsync = fsync
else:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    acm.save(model, folder)
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("how", ["kill", "full"])
def test_a_save_that_does_not_finish_leaves_the_old_one(saved, how):
    model, x, copied, folder = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = [sys.executable, "-c", _CHILD, how, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if how == "kill":
        assert done.returncode == -signal.SIGKILL
    else:
        assert "the folder cannot be written" in done.stdout and str(folder) in done.stdout
        assert os.listdir(folder.parent) == ["out"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    acm.save(copied, folder)
    assert os.listdir(folder.parent) == ["out"]
    assert torch.equal(answer(acm.load(folder, base_model=model), x), answer(copied, x))


def test_too_little_room_is_seen_before_anything_is_written(saved, monkeypatch):
    *_, copied, folder = saved
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StorageError, match=r"too little room .*0 bytes free"):
        acm.save(copied, folder)
    assert sorted(os.listdir(folder)) == FILES


# damage


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(StorageError, match=r"no saved model here .*model\.json"):
        acm.load(tmp_path)


def test_a_newer_format_names_the_version_that_reads_it(saved):
    model, _, _, folder = saved
    description = json.loads((folder / "model.json").read_text())
    rewrite_json(folder / "model.json", format=5, versions=description["versions"] | {"acm_compiler": "9.1"})
    with pytest.raises(StorageError, match=r"format 5, written by acm_compiler 9\.1[\s\S]*acm_compiler>=9\.1"):
        acm.load(folder, base_model=model)


@pytest.mark.parametrize("name", FILES)
def test_files_of_different_saves_are_not_mixed(saved, tmp_path, name):
    model, _, copied, folder = saved
    with torch.no_grad():
        copied.head.bias.add_(1)
    conversion(copied).default_budget = 0.5
    owner = conversion(copied)
    renamed = dataclasses.replace(owner.plan, skipped=owner.plan.skipped[:-1])
    owner.plan = renamed
    acm.save(copied, tmp_path / "later")
    (tmp_path / "later" / name).replace(folder / name)
    with pytest.raises(StorageError, match="not of one save"):
        acm.load(folder, base_model=model)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(saved, name):
    model, _, _, folder = saved
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(StorageError, match=str(folder)):
        acm.load(folder, base_model=model)


def test_weights_with_other_bytes_are_refused(saved):
    model, _, _, folder = saved
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last tensor: sizes, names and header are as they were
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()[:16]
    with pytest.raises(StorageError, match=rf"model\.safetensors: .*damaged.* \(found SHA-256 {digest}….*model\.json"):
        acm.load(folder, base_model=model)


def test_a_folder_that_was_written_before_weights_had_a_digest_loads(saved):
    model, x, copied, folder = saved
    forget_digest(folder)
    assert torch.equal(answer(acm.load(folder, base_model=model), x), answer(copied, x))


def forget_digest(folder: Path) -> None:
    """Make model.json say nothing of the weights' bytes."""
    digests = json.loads((folder / "model.json").read_text())["digests"]
    del digests["model.safetensors"]
    rewrite_json(folder / "model.json", digests=digests)


def test_weights_that_do_not_fit_are_refused(saved):
    from safetensors.torch import load_file, save_file

    model, _, _, folder = saved
    forget_digest(folder)
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for change, found in (
        ({"head.bias": None}, r"missing: head\.bias; unknown: none"),
        ({"tail.bias": torch.zeros(1)}, r"missing: none; unknown: tail\.bias"),
        ({"head.bias": torch.zeros(4)}, r"do not fit at head\.bias \(found \(4,\), expected \(3,\)\)"),
    ):
        changed = {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}
        save_file(changed, path, metadata=metadata)
        with pytest.raises(StorageError, match=found):
            acm.load(folder, base_model=model)


# what the JSON says


def seal(folder, name):
    """Let model.json name the file as it is now."""
    if name != "model.json":
        description = json.loads((folder / "model.json").read_text())
        digests = description["digests"] | {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()}
        rewrite_json(folder / "model.json", digests=digests)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("budgets.json", {"default_budget": "half"}, "default_budget"),
        ("budgets.json", {"default_budget": -1}, "default_budget"),
        ("budgets.json", {"rules": {"gone": "damage"}}, "rules"),
        ("budgets.json", {"rules": None}, "rules"),
        ("budgets.json", {"damage": {"blocks.0.mlp": ["x"]}}, r"damage\.blocks\.0\.mlp\[0\]"),
        ("budgets.json", {"damage": {"gone": [1.0]}}, "damage"),
        ("budgets.json", {"table": {"rule": "damage", "points": [], "examples": 3}}, r"table\.points"),
        ("budgets.json", {"table": {"rule": "x", "points": [], "examples": 3}}, r"table\.rule"),
        ("budgets.json", {"choices": {"budget": 0.5, "cap": None, "sites": {"gone": {}}}}, r"choices\.sites"),
        ("budgets.json", {"widht": 3}, "widht"),
        ("model.json", {"source": 3}, "source"),
        ("model.json", {"class": None}, "class"),
        ("model.json", {"widht": 3}, "widht"),
        ("plan.json", {"sites": 3}, "sites"),
    ],
)
def test_json_is_checked_as_values_before_anything_is_built(name, changes, key, saved):
    model, *_, folder = saved
    rewrite_json(folder / name, **changes)
    seal(folder, name)
    with pytest.raises(StorageError, match=key):
        acm.load(folder, base_model=model)


@pytest.mark.parametrize("name", ["plan.json", "budgets.json", "model.json"])
def test_json_that_nests_too_deeply_is_refused(name, saved):
    model, *_, folder = saved
    (folder / name).write_text("[" * 100_000)
    seal(folder, name)
    with pytest.raises(StorageError, match=r"nested too deeply|recursion limit"):
        acm.load(folder, base_model=model)
