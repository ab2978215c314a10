"""The command line: its verbs, its exit codes, what goes to which stream, and what wheels carry."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.cli.app import VERBS, ErrorBoundary
from acm_compiler.cli.options import JsonOption
from acm_compiler.cli.output import Output
from acm_compiler.cli.plan import read_what
from acm_compiler.cli.rewrite import resume_command
from acm_compiler.errors import AcmError, BudgetUnreachable, NothingToConvert, RunInterrupted, UsageError
from acm_compiler.recipe import ModelConfig, shipped_recipes
from acm_compiler.recipe.lookup import is_known
from tests.helpers import ROOT
from tests.helpers.rewrite_cases import ALL, rewritten

BAD = "acm: 1\nname: bad\nmodel: {source: hf, name: x}\nschedule:\n  - {phase: gate, epohcs: 1}\n"
MINIMAL = "acm: 1\nname: minimal\nmodel: {source: hf, name: x}\n"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def acmc(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as users start it."""
    command = [sys.executable, "-m", "acm_compiler", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_help_names_every_verb_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom acm_compiler.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'rich', 'pydantic'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)


def test_a_warning_of_ours_is_a_sentence():
    code = (
        "import warnings\nfrom acm_compiler.cli import output\noutput.say_warnings()\n"
        "for file in (output.__file__, '/theirs.py'):\n"
        "    exec(compile('warnings.warn(file[-9:])', file, 'exec'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    ours, theirs = done.stderr.splitlines()[:2]
    assert ours == "warning: output.py" and theirs == "/theirs.py:1: UserWarning: theirs.py"


def test_an_unknown_verb_is_refused_with_the_nearest():
    for words, nearest in ((["validte", "x"], "'validate'"), (["recipes", "shw"], "'show'")):
        result = run(*words)
        assert result.exit_code == 2
        assert f"Did you mean {nearest}" in result.stderr
        assert result.stdout == ""


def test_a_model_saved_without_a_recipe_is_told_what_needs_one(tmp_path):
    _, _, model = rewritten(ALL["hf_bert"], init="random")
    acm.save(model, tmp_path / "out")
    for verb, missing in (("explain", "acm.explain"), ("eval", "acm.evaluate"), ("bench", "--data")):
        done = run(verb, str(tmp_path / "out"))
        assert done.exit_code == 2 and missing in done.stderr and "recipe" in done.stderr, done.stderr


@pytest.mark.parametrize("verb", ["explain", "eval", "bench", "kernels", "report"])
def test_a_folder_that_is_not_there_is_a_usage_error(verb, tmp_path):
    result = run(verb, str(tmp_path / "nope"))
    assert result.exit_code == 2 and "nope: no such" in result.stderr


SAVED = ["explain", "eval", "bench", "kernels", "report", "export", "serve"]


@pytest.mark.parametrize("verb", SAVED)
def test_a_folder_without_a_model_and_none_at_all_have_the_same_codes_everywhere(verb, tmp_path):
    (tmp_path / "file").write_text("acm: 1")
    empty, file, missing = (run(verb, str(tmp_path / name)) for name in (".", "file", "missing"))
    assert empty.exit_code == 1 and missing.exit_code == 2, empty.stderr
    assert "no saved model here" in empty.stderr or "no plan can be read here" in empty.stderr
    if verb != "kernels":  # which takes the file of a plan
        assert file.exit_code == 2 and "no such folder (found a file)" in file.stderr


def test_an_unknown_option_is_a_usage_error():
    result = run("validate", "digits_vit_paper", "--jsno")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--json" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["eval", "x", "--examples", "0"], "'--examples': found '0', expected at least 1"),
        (["plan", "x", "--learners", "many"], "'--learners': found 'many', expected a whole number"),
        (["plan", "x", "--bduget", "3"], "--budget"),
        (["plan", "--recipe", "vit.yaml"], "No such option: --recipe; the recipe is an argument here: acmc plan WHAT"),
        (["validate", "--recipe", "vit.yaml"], "an argument here: acmc validate RECIPE"),
        (["plan", "shipped:digits_vit", "--learners", "0"], "'--learners': found '0', expected at least 1"),
        (["plan", "shipped:digits_vit", "--budget", ""], "--budget: no budgets given"),
    ],
)
def test_values_that_an_option_cannot_have_are_refused_in_our_words_and_as_json(words, told):
    result = run(*words, "--json")
    assert result.exit_code == 2
    assert told in result.stderr
    error = json.loads(result.stdout)["error"]
    assert told in error["message"] and error["exit_code"] == 2


def test_a_plan_that_is_refused_is_one_json_document_with_the_reason():
    for words, code in ((["--budget", "1%"], 4), (["--budget", "0.01"], 4), (["--sites", "mlp", "--budget", "2"], 4)):
        result = run("plan", "shipped:digits_vit", "--json", *words)
        assert result.exit_code == code, result.stderr
        document = json.loads(result.stdout)
        assert document["sites"] and document["error"]["kind"] == "BudgetUnreachable"
    result = run("plan", "torchvision:squeezenet1_1", "--json")
    assert result.exit_code == 3
    document = json.loads(result.stdout)
    assert document["sites"] == [] and document["skipped"] and document["error"]["kind"] == "NothingToConvert"


def test_a_plan_shows_times_that_a_gpu_is_expected_to_take():
    result = run("plan", "shipped:digits_vit", "--device", "h200")
    assert result.exit_code == 0, result.stderr
    assert "on H200, bfloat16; expected: by roofline, not measured" in result.stdout
    document = json.loads(run("plan", "shipped:digits_vit", "--device", "h200", "--json").stdout)
    assert len(document["times"]["sites"]) == len(document["sites"])
    assert not any(site["measured"] for site in document["times"]["sites"])
    refused = run("plan", "shipped:digits_vit", "--device", "h300")
    assert refused.exit_code == 2 and "a100 | h100 | h200" in refused.stderr


def test_a_plan_shows_the_budgets_asked_for_in_any_unit():
    result = run("plan", "shipped:digits_vit", "--budget", "50%", "--budget", "0.9,5 MMACs")
    assert result.exit_code == 0, result.stderr
    shares = next(line for line in result.stdout.splitlines() if line.startswith("share of the dense model"))
    assert shares.split()[6:] == ["50%", "96%", "60%"], shares


def test_validate_accepts_a_recipe_and_notes_what_is_not_set(monkeypatch):
    monkeypatch.delenv("IMAGENET", raising=False)
    result = run("validate", "vit_b16_imagenet")
    assert result.exit_code == 0
    assert result.stdout == "vit_b16_imagenet: valid (model torchvision:vit_b_16; phases: distill, gate, finetune)\n"
    assert result.stderr.splitlines()[0] == (
        "note: vit_b16_imagenet.yaml:9:36: ${IMAGENET} is not set (data.train.root = '${IMAGENET}/train')"
    )
    assert result.stderr.splitlines()[-1].endswith("export IMAGENET=…")


def test_validate_does_without_torch():
    code = (
        "import sys\nfrom acm_compiler.cli import app\n"
        "try:\n    app(['validate', 'vit_b16_imagenet'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_validate_refuses_with_the_place_and_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(BAD)
    result = run("validate", "bad.yaml")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: bad.yaml:5:19: unknown key 'epohcs' in schedule[0] (did you mean 'epochs'?)\n"
    Path("bad.yaml").write_text(BAD.replace("name: bad", "nmae: bad"))
    assert run("validate", "bad.yaml").stderr.splitlines() == [
        "error: 3 problems",
        "bad.yaml:1:1: missing key 'name' in the recipe",
        "bad.yaml:2:1: unknown key 'nmae' in the recipe (did you mean 'name'?)",
        "bad.yaml:5:19: unknown key 'epohcs' in schedule[0] (did you mean 'epochs'?)",
    ]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("torchvision:vit_b_61", "torchvision has no model 'vit_b_61' (did you mean 'vit_b_16'"),
        ("shipped:digits_vti", "no model 'digits_vti' is shipped (did you mean 'digits_vit'?)"),
        ("timm:vit_tiny_patch16_22", "timm has no model 'vit_tiny_patch16_22' (did you mean"),
        ("torchvision:swin_t", None),
        ("timm:vit_tiny_patch16_224", None),
        ("shipped:digits_vit", None),
    ],
)
def test_validate_looks_models_up_in_their_registries(reference, words):
    source, _, name = reference.partition(":")
    result = run("validate", "digits_vit_paper", "--set", f"model={{source: {source}, name: {name}}}")
    assert result.exit_code == (2 if words else 0), result.output
    assert words is None or words in result.stderr


def test_validate_looks_for_functions_without_running_what_defines_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise SystemExit")
    (tmp_path / "pack" / "parts.py").write_text("class Data:\n    pass\n\n\ndef model():\n    pass\n")
    (tmp_path / "ours.py").write_text("from os.path import join as data\n\nrows = 3\n")

    def told(*names: str) -> list[str]:
        model, train, evaluated = (f"python:{name}" for name in names)
        text = f"acm: 1\nname: own\nmodel: {{source: python, name: '{model}'}}\ntask: {{kind: classify}}\ndata:\n"
        text += f"  train: {{kind: '{train}'}}\n  eval: {{kind: '{evaluated}'}}\n"
        (tmp_path / "own.yaml").write_text(text)
        return [
            line.rpartition("own.yaml")[2] for line in run("validate", str(tmp_path / "own.yaml")).stderr.split("\n")
        ]

    assert told("pack.parts:model", "pack.parts:Data", "ours:data") == [""]
    assert told("ours:modle", "oars:data", "ours:rows")[1:4] == [
        ":3:31: python:ours:modle: module ours has no 'modle' (expected package.module:function)",
        ":6:17: python:oars:data: there is no module 'oars'",
        ":7:16: python:ours:rows: this is not a function (found int, expected a callable)",
    ]


def test_a_quick_look_finds_every_model_of_a_registry_or_asks_it():
    import torchvision.models

    names = torchvision.models.list_models(module=torchvision.models)
    found = [name for name in names if is_known(ModelConfig(source="torchvision", name=name))]
    assert len(found) > 60 and not is_known(ModelConfig(source="torchvision", name="_vision_transformer"))


def test_an_empty_section_is_told_at_its_own_line(tmp_path):
    (tmp_path / "bad.yaml").write_text(MINIMAL + "schedule:\n\n# more\nrun: {seed: 1}\n")
    result = run("validate", str(tmp_path / "bad.yaml"))
    assert result.exit_code == 2 and "bad.yaml:4:1: wrong value for schedule (found null" in result.stderr


@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written_is_no_traceback(buffered):
    full = f"{sys.executable} -m acm_compiler schema"
    environment = os.environ | {"PYTHONUNBUFFERED": buffered}
    for command, words in (
        (f"{full} > /dev/full", "error: the output cannot be written: No space left"),
        (f"{full} | true; exit ${{PIPESTATUS[0]}}", ""),
    ):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 1 and done.stderr.startswith(words)
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", ["--version", "--help", "schema", "recipes --json", "plan nothing:here"])
def test_a_closed_output_is_one_that_cannot_be_written(words):
    command = f"{sys.executable} -m acm_compiler {words} >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    refused = words.startswith("plan")  # prints no result
    assert done.returncode == (2 if refused else 1), done.stderr
    assert done.stderr.startswith("error: " if refused else "error: the output cannot be written: Bad file descriptor")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_a_closed_standard_error_is_no_fault():
    command = f"{sys.executable} -m acm_compiler recipes"
    done = subprocess.run(["bash", "-c", f"{command} 2>&-"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, run("recipes").stdout)
    refused = subprocess.run(["bash", "-c", f"{command} show x >&- 2>&-"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "")


def test_validate_notes_a_device_that_is_not_here():
    result = run("validate", "digits_vit_paper", "--set", "run.device=cuda:99")
    assert result.exit_code == 0
    assert "--set run.device=cuda:99: run.device: no such device here (found 'cuda:99'" in result.stderr


@pytest.mark.parametrize("error", [UsageError("no such thing"), AcmError("this process alone")])
def test_the_further_processes_of_a_launch_leave_it_to_the_first_to_report(error, monkeypatch):
    group = typer.Typer(cls=ErrorBoundary)
    group.callback()(lambda: None)

    @group.command()
    def fail(json: JsonOption = False):
        output = Output(json=json)
        output.say("say")
        output.progress("progress")
        output.note("note")
        output.document({})
        output.warn("warning of this process")
        raise error

    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, words in (("0", ["fail"]), ("1", ["fail"]), ("1", ["fail", "--json"])):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        done = CliRunner().invoke(group, words)
        assert done.exit_code == error.exit_code
        assert "warning of this process" in done.stderr
        assert all((word in done.output) == (rank == "0") for word in ("say", "progress", "note:"))
        assert ("error:" in done.stderr) == (rank == "0" or not isinstance(error, UsageError))
        assert not done.stdout or rank == "0" or '"this process alone"' in done.stdout
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of another machine
    done = CliRunner().invoke(group, ["fail"])
    assert "error:" in done.stderr and "progress" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        ({}, "acmc rewrite"),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}, "torchrun --nproc-per-node 4 -m acm_compiler rewrite"),
        ({"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, "torchrun … -m acm_compiler rewrite"),
        (
            {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "ACCELERATE_MIXED_PRECISION": "no"},
            "accelerate launch … -m acm_compiler rewrite",
        ),
    ],
)
def test_a_stopped_run_is_continued_as_it_was_started(environment, start, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = resume_command("my recipe.yaml", Path("out"), ["run.sharded=true"], force=False)
    assert found == f"{start} --recipe 'my recipe.yaml' --out out --set run.sharded=true --resume"


def test_validate_takes_overrides():
    assert run("validate", "digits_vit_paper", "--set", "schedule[0].lr=1e-4").exit_code == 0
    result = run("validate", "digits_vit_paper", "--set", "schedule[0].lr=fast", "--set", "rnu.seed=1")
    assert result.exit_code == 2
    assert "--set schedule[0].lr=fast: wrong value for schedule[0].lr" in result.stderr
    assert "unknown key 'rnu' in the recipe (did you mean 'run'?)" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["validate", "digits_vit_paper"],
        ["schema"],
        ["recipes"],
        ["recipes", "ls"],
        ["recipes", "show", "digits_vit_paper"],
        ["doctor"],
    ],
    ids=" ".join,
)
def test_json_is_one_document_with_a_schema_number(words):
    result = run(*words, "--json")
    assert json.loads(result.stdout)["schema"] == 1


def test_json_of_an_invalid_recipe_lists_its_problems(tmp_path):
    (tmp_path / "bad.yaml").write_text(BAD)
    result = run("validate", str(tmp_path / "bad.yaml"), "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["valid"]) == (2, False)
    assert any("unknown key 'epohcs'" in problem for problem in document["problems"])
    assert document["error"]["kind"] == "RecipeError" and document["error"]["exit_code"] == 2


def test_json_of_a_failure_says_why():
    result = run("recipes", "show", "digits", "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["kind"], error["exit_code"]) == (2, "RecipeError", 2)
    assert error["message"].startswith("no recipe 'digits'")


def test_schema_is_a_json_schema_that_editors_take():
    document = json.loads(run("schema").stdout)
    assert document["$schema"].startswith("https://json-schema.org/")
    assert {"acm", "model", "schedule", "sites"} <= set(document["properties"])


def test_recipes_are_listed_shown_and_copied(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("recipes").stdout == run("recipes", "ls").stdout
    assert [line.split()[0] for line in run("recipes").stdout.splitlines()] == list(shipped_recipes())
    text = shipped_recipes()["digits_vit_paper"].read_text()
    assert run("recipes", "show", "digits_vit_paper").stdout == text
    assert run("recipes", "copy", "digits_vit_paper").stdout == "wrote digits_vit_paper.yaml\n"
    assert Path("digits_vit_paper.yaml").read_text() == text
    assert run("validate", "digits_vit_paper.yaml").exit_code == 0


def test_copy_never_replaces_a_file_unasked(tmp_path):
    (tmp_path / "digits_vit_paper.yaml").write_text("mine")
    refused = run("recipes", "copy", "digits_vit_paper", str(tmp_path))
    assert refused.exit_code == 2
    assert "the file exists already" in refused.stderr
    assert (tmp_path / "digits_vit_paper.yaml").read_text() == "mine"
    assert run("recipes", "copy", "digits_vit_paper", str(tmp_path), "--force").exit_code == 0
    assert run("recipes", "copy", "digits_vit_paper", str(tmp_path / "no" / "such" / "x.yaml")).exit_code == 1


def test_an_unknown_recipe_is_refused_with_the_nearest():
    for verb in ("show", "copy"):
        result = run("recipes", verb, "digits_vit_papr")
        assert result.exit_code == 2
        assert "did you mean 'digits_vit_paper'?" in result.stderr


def test_doctor_says_what_is_there():
    document = json.loads(run("doctor", "--json").stdout)
    assert document["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert document["versions"]["torch"]
    assert document["devices"][0].startswith("cpu (")
    assert document["backend"]["visible"] is True
    assert document["recipes"] == list(shipped_recipes())


def test_doctor_names_the_compiler_that_inductor_takes(monkeypatch):
    import torch._inductor

    assert "g++" in json.loads(run("doctor", "--json").stdout)["compiler"]
    monkeypatch.setenv("CXX", "/nonexistent/g++")  # Inductor read it at its import; the CPU kernel looks further
    with torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/g++")}):
        document, shown = json.loads(run("doctor", "--json").stdout), run("doctor").stdout
    assert document["compiler"] is None and "g++" in document["kernel_compiler"]
    assert "none found (CXX=/nonexistent/g++): graphs run uncompiled" in shown


def test_doctor_fails_when_the_backend_cannot_be_loaded(monkeypatch):
    from acm_compiler.cli import doctor

    monkeypatch.setattr(doctor, "_BACKEND", "no_backend_of_this_name")
    result = run("doctor")
    assert result.exit_code == 1
    assert "no entry point is installed" in result.stderr


def failing_app(error: BaseException) -> typer.Typer:
    """An app with the product's border, whose one verb raises `error`."""
    failing = typer.Typer(cls=ErrorBoundary, rich_markup_mode=None)

    @failing.command("fail")
    def fail(json: JsonOption = False) -> None:
        raise error

    @failing.command("work")
    def work() -> None:
        Output().say("worked")

    return failing


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AcmError("failed"), 1),
        (UsageError("failed"), 2),
        (NothingToConvert("failed"), 3),
        (BudgetUnreachable("failed"), 4),
        (RunInterrupted("failed"), 130),
    ],
)
def test_errors_for_users_become_a_message_and_their_exit_code(error, code):
    result = CliRunner().invoke(failing_app(error), ["fail"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", "error: failed\n")
    result = CliRunner().invoke(failing_app(error), ["fail", "--json"])
    assert json.loads(result.stdout) == {
        "schema": 1,
        "error": {"kind": type(error).__name__, "message": "failed", "exit_code": code},
    }


def test_what_ends_a_job_is_an_interrupt():
    code = "import os, signal; from acm_compiler.cli import app, main\n"
    code += "app.command('end')(lambda: os.kill(os.getpid(), signal.SIGTERM)); main()"
    done = subprocess.run([sys.executable, "-c", code, "end"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")


def test_an_interrupt_is_130_and_a_bug_keeps_its_traceback():
    result = CliRunner().invoke(failing_app(KeyboardInterrupt()), ["fail"])
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")
    told = json.loads(CliRunner().invoke(failing_app(KeyboardInterrupt()), ["fail", "--json"]).stdout)
    assert told["error"] == {"kind": "RunInterrupted", "message": "interrupted", "exit_code": 130}
    assert isinstance(CliRunner().invoke(failing_app(ZeroDivisionError()), ["fail"]).exception, ZeroDivisionError)


def test_colour_is_for_terminals_that_want_it(monkeypatch):
    text = "\x1b["
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert text in CliRunner().invoke(failing_app(AcmError("x")), ["fail"], color=True).stderr
    assert text not in CliRunner().invoke(failing_app(AcmError("x")), ["fail"]).stderr
    monkeypatch.setenv("NO_COLOR", "1")
    assert text not in CliRunner().invoke(failing_app(AcmError("x")), ["fail"], color=True).stderr


def test_what_to_plan_is_a_recipe_or_a_model(tmp_path):
    assert read_what("digits_vit_paper", ["run.seed=7"]).run.seed == 7
    (tmp_path / "r.yaml").write_text(MINIMAL)
    assert read_what(str(tmp_path / "r.yaml")).name == "minimal"
    assert read_what("torchvision:vit_b_16") == ModelConfig(source="torchvision", name="vit_b_16")
    (tmp_path / "model.json").write_text("{}")
    assert read_what(str(tmp_path)).source == "directory"
    with pytest.raises(UsageError, match=r"neither a recipe nor a model reference \(did you mean 'vit_b16_imagenet'"):
        read_what("vit_b16_imagnet")
    with pytest.raises(UsageError, match="--set changes recipes"):
        read_what("torchvision:vit_b_16", ["run.seed=7"])


def test_the_plan_of_a_saved_model_is_the_one_it_was_converted_by(tmp_path):
    _, _, model = rewritten(ALL["torchvision_vit"], sites="mlp", learners=2)
    acm.save(model, tmp_path / "out")
    shown = run("plan", str(tmp_path / "out"), "--json")
    assert shown.exit_code == 0 and "whose plan this is" in shown.stderr
    facts = json.loads(shown.stdout)
    assert [site["learners"] for site in facts["sites"]] == [2, 2]
    assert facts["sites"] == json.loads((tmp_path / "out/plan.json").read_text())["sites"]
    assert "2 x " in run("plan", str(tmp_path / "out"), "--per-site").stdout


def test_the_model_of_a_folder_is_planned_anew_where_its_function_may_be_imported(tmp_path):
    named = {"source": "python", "name": "tests.helpers.tour_model:model", "weights": "default"}
    (tmp_path / "model.json").write_text(json.dumps({"source": named}))
    again = ("plan", str(tmp_path), "--sites", "mlp", "--learners", "2")
    refused = run(*again)
    assert refused.exit_code == 2 and "--allow-code" in refused.stderr
    assert "2 x " in run(*again, "--allow-code").stdout


def test_the_module_runs_as_the_command_does():
    done = acmc("validate", "digits_vit_papr")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no recipe 'digits_vit_papr' (did you mean 'digits_vit_paper'?)")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_wheel_carries_the_recipes_and_finds_them(tmp_path):
    copied = tmp_path / "tree"
    copied.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "recipes", "acm_compiler"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copied)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", str(copied), "--no-deps", "-q", "-w", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 5_000_000
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert sorted(path.stem for path in (installed / "acm_compiler" / "recipes").iterdir()) == sorted(shipped_recipes())
    assert len(list((ROOT / "acm_compiler").rglob("*.safetensors"))) == len(list(installed.rglob("*.safetensors")))
    assert (installed / "acm_compiler" / "py.typed").is_file()
    page = (installed / "acm_compiler" / "reporting").glob("page.*")
    assert {path.name for path in page} == {"page.html.j2", "page.css"}
    code = "from acm_compiler.recipe import *; import sys; print(shipped_recipe('digits_vit_paper'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, check=True, env=os.environ
    )
    assert Path(done.stdout.strip()).is_relative_to(installed)
