"""A comparison from end to end: its rows and controls, its folder, its refusals, and how it goes on when stopped."""

import json
import shutil
import signal

import pytest
import torch
from typer.testing import CliRunner

from acm_compiler.baselines import compare as compared
from acm_compiler.baselines.choose_methods import METHODS
from acm_compiler.baselines.compare import Options, compare
from acm_compiler.cli import app
from acm_compiler.errors import RunInterrupted, UsageError
from acm_compiler.evaluation.comparison import comparison_table, load_comparison
from acm_compiler.recipe import load_recipe
from acm_compiler.training.loop import PhaseLoop

SMALL = ["data.train.count=100", "data.eval.count=48", "schedule[0].tokens=3000", "expect=null", "run.eval_batch=48"]
SMALL += ["sites=[{match: mlp, learners: 2}]", "budgets.report=[0.25, 0.5, 1.0]", "budgets.train=0.5"]
NAMES = ("acm", "random", "width", "teal", "tome")


def small():
    pytest.importorskip("sklearn")
    return load_recipe("digits_vit", SMALL)


def acmc(*words):
    changes = [word for change in SMALL for word in ("--set", change)]
    return CliRunner().invoke(app, ["compare", "--recipe", "digits_vit", *changes, *words])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A comparison that was never stopped: its folder, and what it found."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, compare(small(), Options(directory=folder, methods=NAMES, budgets=(0.6, 0.75)), say=print)


def test_every_method_has_a_row_at_every_budget_beside_the_dense_model_and_ours(whole):
    folder, found = whole
    assert [method.name for method in found.methods] == list(NAMES)
    assert load_comparison(folder) == found
    assert (found.n, found.budgets) == (48, [0.6, 0.75])
    for method in found.methods:
        assert [row.budget for row in method.rows] == [0.6, 0.75]
        assert all(abs(row.cost.share - row.budget) < 0.03 for row in method.rows)
        assert all(row.difference.low <= row.difference.mean <= row.difference.high for row in method.rows)
    assert all(row.to_acm is None for row in found.methods[0].rows)
    assert (folder / "compare.txt").read_text() == f"{comparison_table(found)}\n"
    assert {path.name for path in folder.iterdir()} >= {"compare.json", "plan.json", "recipe.yaml"}


def test_random_runs_as_many_learners_as_the_gates_and_does_worse(whole):
    ours, dealt = whole[1].methods[:2]
    for a, b in zip(ours.rows, dealt.rows, strict=True):
        assert b.cost.macs == pytest.approx(a.cost.macs, rel=1e-6)
    assert dealt.rows[0].metric < ours.rows[0].metric
    assert dealt.rows[0].to_acm is None or dealt.rows[0].to_acm.mean < 0


def test_one_width_for_all_tokens_costs_what_the_budget_says_and_has_no_gate(whole):
    width = whole[1].methods[2]
    assert [row.cost.share for row in width.rows] == pytest.approx([0.6, 0.75], abs=1e-3)


def test_a_comparison_that_was_stopped_goes_on_with_the_next_method_to_the_same_table(whole, tmp_path, monkeypatch):
    options = Options(directory=tmp_path / "run", methods=NAMES, budgets=(0.6, 0.75), command="acmc compare …")
    shutil.copytree(whole[0], tmp_path / "run", ignore=shutil.ignore_patterns("compare*", "report"))
    fitted, measured = [], compared.measure

    def stopping(method, budgets, progress):
        if len(fitted) == 3:
            raise KeyboardInterrupt
        fitted.append(type(method))
        return measured(method, budgets, progress)

    monkeypatch.setattr(compared, "measure", stopping)
    with pytest.raises(RunInterrupted, match=r"acmc compare …"):
        compare(small(), options, say=print)
    assert not (tmp_path / "run/compare.json").exists()
    again = []
    monkeypatch.setattr(compared, "measure", lambda *given: again.append(type(given[0])) or measured(*given))
    found = compare(small(), options, say=print)
    assert again == [METHODS[name] for name in ("width", "teal", "tome")]
    assert str(found) == str(whole[1])
    more = compare(
        small(), Options(directory=tmp_path / "run", methods=(*NAMES, "svd"), budgets=(0.6, 0.75)), say=print
    )
    assert again[3:] == [METHODS["svd"]] and len(more.methods) == 6


def test_a_folder_with_another_runs_scores_is_refused_and_keeps_them(whole, tmp_path):
    folder, before = whole
    with pytest.raises(UsageError, match=r"another run[^$]*quick"):
        compare(small(), Options(directory=folder, methods=NAMES, budgets=(0.6, 0.75), quick=True), say=print)
    assert load_comparison(folder) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--methods", "toem"), "unknown method (did you mean 'tome'?)"),
        (("--methods", "acm,cmoe"), "cmoe cannot be applied to this model (found its experts are cut from gated MLPs"),
        (
            ("--methods", "flap", "--budgets", ".3,.6"),
            "below the floor of flap: its least on this model is 42",
        ),
        (
            ("--methods", "acm", "--budgets", "30%"),
            "below the floor of acm: its least on this model is 42",
        ),
        (("--methods", ","), "no method was named"),
        (("--ablate", ""), "no ablation was named"),
        (("--set", "schedule=[]", "--set", "data=null"), "a comparison needs data and a task"),
        (("--budgets", "40"), "40%?"),
        (("--budgets", "fast"), "shares of the dense model's MACs, such as .4 or 40%"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, words, said):
    pytest.importorskip("sklearn")
    done = acmc("--out", str(tmp_path / "run"), *words)
    assert done.exit_code == 2 and said in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_verb_prints_a_table_or_one_document_and_the_report_shows_it(whole):
    folder, found = whole
    words = ("--out", str(folder), "--methods", ",".join(NAMES), "--budgets", "60%,.75")
    done = acmc(*words)
    assert done.exit_code == 0 and comparison_table(found) in done.stdout
    document = json.loads(acmc(*words, "--json").stdout)
    assert document["schema"] == 1 and len(document["methods"]) == len(NAMES)
    pytest.importorskip("matplotlib")
    assert (folder / "compare.svg").is_file() and (folder / "compare.png").is_file()
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    page = (folder / "report/index.html").read_text()
    assert "Beside other methods" in page and "ToMe: tokens merged" in page
    assert (folder / "report/methods_over_cost.svg").is_file()


def test_what_does_not_fit_is_left_out_where_nobody_asked_for_it():
    from acm_compiler.baselines.choose_methods import choose
    from acm_compiler.runs.pipeline import plan_recipe

    built, plan, _ = plan_recipe(small())
    chosen = choose(built.model, plan, names=None, budgets=None, usual=(0.25, 0.5))
    assert "cmoe" not in chosen.budgets and "gated MLPs" in chosen.left_out["cmoe"]
    assert chosen.budgets["flap"] == (0.5,) and "above 25 %" in chosen.left_out["flap"]


def test_trained_acms_are_kept_with_their_steps_and_go_on_from_their_state(whole, tmp_path, monkeypatch):
    names = ("acm", "acm_distilled", "acm_paper")
    options = Options(directory=tmp_path / "run", methods=names, budgets=(0.6, 0.75), steps=4, command="acmc compare …")
    shutil.copytree(whole[0], tmp_path / "run", ignore=shutil.ignore_patterns("compare.*", "report"))
    trained, step = [], PhaseLoop._step

    def stopping(loop, number, feed):
        trained.append((loop.phase.name, number))
        if len(trained) == 6:
            loop.run.interrupts.received = signal.SIGINT
        return step(loop, number, feed)

    monkeypatch.setattr(PhaseLoop, "_step", stopping)
    with pytest.raises(RunInterrupted, match=r"acmc compare …"):
        compare(small(), options, say=print)
    found = compare(small(), options, say=print)
    distilled = [("finetune", number) for number in range(4)]
    assert trained == [*distilled, ("distill", 0), ("gate", 0), ("finetune", 0), ("finetune", 1)]
    assert [method.steps for method in found.methods] == [0, 4, 4]
    assert "trained by 4 steps on the dense model's outputs: acm_distilled, acm_paper" in comparison_table(found)
    assert all(abs(row.cost.share - row.budget) < 0.05 for method in found.methods for row in method.rows)
    trained.clear()
    assert str(compare(small(), options, say=print)) == str(found) and not trained


def test_methods_without_training_are_what_is_run_unless_asked_otherwise():
    from acm_compiler.baselines.choose_methods import choose
    from acm_compiler.runs.pipeline import plan_recipe

    built, plan, _ = plan_recipe(small())
    chosen = [
        set(choose(built.model, plan, names=names, budgets=None, usual=(0.6,)).budgets) for names in (None, ["all"])
    ]
    assert chosen[0] == {name for name, method in METHODS.items() if not method.trains} - {"cmoe"}
    assert chosen[1] == set(METHODS) - {"cmoe"}


def test_corrupted_images_are_measured_by_severity_kept_and_for_images_alone(whole, tmp_path, monkeypatch):
    monkeypatch.setattr("acm_compiler.baselines.measure.EXAMPLES", 4)
    monkeypatch.setattr("acm_compiler.baselines.measure.KINDS", ["noise", "blur"])
    shutil.copytree(whole[0], tmp_path / "run", ignore=shutil.ignore_patterns("compare.*", "report"))
    options = Options(directory=tmp_path / "run", methods=("acm", "tome"), budgets=(0.6, 0.75), corruptions=True)
    found = compare(small(), options, say=print)
    assert list(found.corrupted) == ["dense", "acm", "tome"] and found.corrupted_at == 0.75
    assert [row.severity for row in found.corrupted["acm"]] == [0, 1, 2, 3, 4, 5]
    assert [row.share for row in found.corrupted["dense"]] == pytest.approx([1.0] * 6)
    tome, acm = (found.corrupted[name] for name in ("tome", "acm"))
    assert len({row.share for row in tome}) == 1 and len({row.share for row in acm}) > 1
    assert load_comparison(tmp_path / "run") == found and "severity 5" in str(found)
    monkeypatch.setattr(compared, "measure", None)
    assert str(compare(small(), options, say=print)) == str(found)
    with pytest.raises(UsageError, match="corruptions are for images"):
        compared._refuse_no_images(
            load_recipe("digits_vit", ["data.eval={kind: 'python:tests.helpers.tour_model:data'}"])
        )


def test_scores_that_a_killed_process_left_half_written_are_measured_again(tmp_path):
    from acm_compiler.baselines.measure import Measured, Scores

    scores, one = Scores(directory=tmp_path, of={}), torch.ones(2)
    scores.begin(anew=False)
    scores.save("teal", Measured(units_E=one, groups_E=one, scores={0.5: one}, macs={0.5: one.double()}))
    assert torch.equal(scores.load("teal", (0.5,)).scores[0.5], one)
    assert scores.load("teal", (0.5, 0.6)) is None
    (tmp_path / "compare/teal.json").write_text('{"scores": {"0.5"')
    assert scores.load("teal", (0.5,)) is None


class Ragged(torch.utils.data.Dataset):
    """Texts of one to four tokens, or clips of one to four hundred samples, the last of them padded."""

    def __init__(self, audio=False):
        self.audio = audio

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if self.audio:
            return {"input_values": torch.zeros(100 * (index + 1)), "labels": torch.ones(1)}
        words = torch.ones(index + 1).long()
        padded = torch.nn.functional.pad(words, (0, 9))
        return {"input_ids": padded, "attention_mask": padded, "label": 0} if index == 3 else {"input_ids": words}


def test_budgets_are_shares_of_what_examples_of_their_usual_length_cost():
    data = f"python:{__name__}:Ragged"
    recipe = load_recipe("modernbert_packages", [f"data.train={{kind: '{data}'}}"])
    assert compared._with_typical_input(recipe).input.tokens == 3  # (1 + 4 + 9 + 16) / (1 + 2 + 3 + 4)
    clips = [f"data.{part}={{kind: '{data}', args: {{audio: true}}}}" for part in ("train", "eval")]
    spoken = compared._with_typical_input(load_recipe("wav2vec2_digits", [*clips, "input.sample_rate=1000"]))
    assert spoken.input.audio_seconds == pytest.approx(0.3)
    recipe = small()
    assert compared._with_typical_input(recipe) is recipe  # images are of one size
