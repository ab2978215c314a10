"""Recipes: what they may say, what is refused and where, overrides, variables, writing back."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from acm_compiler.errors import RecipeError
from acm_compiler.recipe import (
    ModelConfig,
    Recipe,
    decisions,
    differences,
    expand_paths,
    load_recipe,
    recipe_hash,
    resolved_yaml,
    shipped_recipes,
    unset_variables,
)
from acm_compiler.recipe.fields import Every, parse_every
from acm_compiler.recipe.models import AUTO_CLASSES, SOURCES, InputConfig
from acm_compiler.recipe.phases import DistillPhase, FinetunePhase, GatePhase
from acm_compiler.recipe.resolved import recipe_json_schema
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.recipe.tasks import AUDIO_RATES
from tests.helpers import golden

SMALL = """\
acm: 1
name: small
model: {source: torchvision, name: vit_b_16}
"""
TRAINED = """\
acm: 1
name: trained
model: {source: shipped, name: digits_vit}
task: {kind: classify}
data:
  train: {kind: imagefolder, root: "${PICTURES}/train"}
  eval: {kind: cluttered_digits, split: eval}
schedule:
  - {phase: distill, epochs: 2}
  - {phase: gate, steps: 10}
  - {phase: finetune, epochs: 1}
"""


@pytest.fixture
def recipe_file(tmp_path):
    """Writes a recipe and says where it is."""

    def write(text: str) -> Path:
        path = tmp_path / "r.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems_of(path, overrides=()) -> list[str]:
    """Faults of a recipe, without the folder it lies in."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return [problem.replace(f"{Path(path).parent}/", "") for problem in caught.value.problems]


def test_a_short_recipe_gets_every_default(recipe_file):
    recipe = load_recipe(recipe_file(SMALL))
    assert [(rule.match, rule.learners, rule.k_min) for rule in recipe.sites] == [
        (("mlp",), 4, "auto"),
        (("attn",), 4, "auto"),
    ]
    assert recipe.budgets.report == (0.25, 0.4, 0.6, 0.75, 1.0)
    assert recipe.run.save_every == Every(amount=600, unit="second")
    assert recipe.schedule == ()


def test_the_papers_recipe_says_the_papers_numbers():
    recipe = load_recipe("vit_b16_imagenet")
    distill, gate, finetune = recipe.schedule
    assert isinstance(distill, DistillPhase) and isinstance(gate, GatePhase) and isinstance(finetune, FinetunePhase)
    assert [(p.epochs, p.batch, p.lr) for p in (distill, gate, finetune)] == [
        (2, 64, 1e-3),
        (1, 64, 1e-2),
        (97, 512, 1e-4),
    ]
    for phase in recipe.schedule:
        assert (phase.optimizer, phase.schedule, phase.lr_min, phase.clip_norm) == ("adam", "cosine", 1e-6, 1.0)
    assert (gate.labels.rule, gate.labels.tau, gate.temperature) == ("relative_improvement", 1.2, 0.8)
    assert (finetune.temperature, finetune.budget, finetune.entropy, finetune.diversity) == (0.8, 0.1, 0.05, 0.05)
    assert [(r.match, r.learners, r.k_min, r.activation) for r in recipe.sites] == [
        (("mlp",), 4, 0, "gelu"),
        (("attn",), 4, 1, "gelu"),
    ]
    train = recipe.data.train
    assert (train.augment, train.mixup, train.cutmix, recipe.task.label_smoothing) == ("three_augment", 0.8, 0.8, 0.1)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_hold_and_are_named_after_their_file(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description


def test_all_problems_are_told_at_once_with_their_places():
    path = golden.FOLDER / "bad_recipe.yaml"
    golden.check("bad_recipe.txt", "\n".join(problems_of(path)) + "\n")


def test_an_unknown_key_is_named_as_documented(recipe_file):
    text = SMALL + "schedule:\n  - phase: gate\n    epohcs: 1\n"
    assert "r.yaml:6:5: unknown key 'epohcs' in schedule[0] (did you mean 'epochs'?)" in problems_of(recipe_file(text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "r.yaml:1:1: the recipe is empty: it must begin with `acm: 1` and have a `model:`"),
        ("- 1\n", "r.yaml:1:1: expected a mapping of keys such as `name:` and `model:`"),
        ("name: a\nname: b\n", "r.yaml:2:1: key 'name' appears twice in one mapping"),
        ("a: [1\n", "r.yaml:2:1: not valid YAML: while parsing a flow sequence, expected ',' or ']'"),
        ("a: b: c\n", "r.yaml:1:5: not valid YAML: mapping values are not allowed here"),
        ("a: *x\n", "r.yaml:1:4: not valid YAML: found undefined alias 'x'"),
        ("a: " + "[" * 5000, "r.yaml:1:53: not valid YAML: nested more than 50 deep"),
        ("\n".join(" " * i + "a:" for i in range(3000)), "r.yaml:50:50: not valid YAML: nested more than 50 deep"),
        (
            "".join(f"a{i}: &a{i} {'[' * 40}{f'*a{i - 1}' if i else ''}{']' * 40}\n" for i in range(99)),
            "r.yaml:1:19: nested more than 50 deep, by aliases",
        ),
        ("a: &a [*a]\n", "r.yaml:1:4: an alias that contains itself"),
        ("a: !!python/object:os.system {}\n", "r.yaml:1:4: unknown tag '!!python/object:os.system'"),
        ("a: !!int zz\n", "r.yaml:1:4: not a value of type int: 'zz'"),
        (
            "a: {b: ${X}/y}\n",
            "r.yaml:1:9: not valid YAML: while parsing a flow mapping, expected ',' or '}', but got '{' (q",
        ),
        ("1: a\n", "r.yaml:1:1: a key must be text"),
        ("<<: 3\n", "r.yaml:1:5: << takes other mappings"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1: not valid YAML: expected a single document in the stream"),
    ],
)
def test_text_that_is_no_recipe_is_refused_at_its_place(recipe_file, text, problem):
    assert problems_of(recipe_file(text))[0].startswith(problem)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert problems_of(tmp_path / "latin.yaml") == ["latin.yaml: must be UTF-8 text, got another byte at 9"]
    assert problems_of(tmp_path / "none.yaml") == ["none.yaml: no such file"]
    assert problems_of(tmp_path / "sub")[0].endswith("sub: no such file")
    assert problems_of("digits_vit_papr")[0].startswith(
        "no recipe 'digits_vit_papr' (did you mean 'digits_vit_paper'?)"
    )


def test_more_values_than_any_recipe_has_are_refused(recipe_file):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for before, after in zip("abcde", "bcdef", strict=True):
        bomb += f"{after}: &{after} [{', '.join([f'*{before}'] * 10)}]\n"
    assert "this is not a recipe" in problems_of(recipe_file(bomb))[0]


def test_a_newer_format_is_refused_as_such(recipe_file):
    text = SMALL.replace("acm: 1", "acm: 2") + "newer: yes\n"
    assert problems_of(recipe_file(text)) == [
        "r.yaml:1:6: recipe format 2 is newer than this acm_compiler, which reads format 1"
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("schedule: [{phase: distill, epochs: 1}]", "r.yaml:4:1: a schedule needs task and data"),
        ("input: {tokens: 3, shape: [2]}", "r.yaml:4:1: input: exactly one of image, tokens, audio_seconds and shape"),
        ("sites: [{match: mlp, k_min: 5}]", "r.yaml:4:22: sites[0]: k_min must be at most learners, 4, got 5"),
        (
            "sites: [{match: mlp, form: svd}]",
            "r.yaml:4:22: sites[0]: form is for projections, and match mlp means none",
        ),
        (
            "sites: [{match: [attn.q, attn.k], second_layer: per_k}]",
            "r.yaml:4:35: sites[0]: second_layer is for MLPs, and match attn.q, attn.k means none",
        ),
        (
            "sites: [{match: mlp, lossless: true, second_layer: shared}]",
            "r.yaml:4:38: sites[0]: second_layer shared is not exact",
        ),
        (
            "sites: [{match: mlp, lossless: true, init: random}]",
            "r.yaml:4:22: sites[0]: a random start is not lossless",
        ),
        (
            "schedule: [{phase: finetune, steps: 1, budget_range: [0.8, 0.4]}]",
            "r.yaml:4:40: schedule[0]: budget_range must rise: [low, high]",
        ),
        ("sites: [{match: mlp}, {match: []}]", "r.yaml:4:1: sites[1].match must name what to convert, such as mlp"),
        (
            "sites: [{match: 're:('}]",
            "r.yaml:4:17: sites[0].match[0]: what follows re: must be a regular expression, got",
        ),
        ("sites: []", "r.yaml:4:8: wrong value for sites (found a list of 0, expected at least 1)"),
        ("budgets: {train: 0}", "r.yaml:4:18: wrong value for budgets.train (found 0, expected above 0)"),
        ("budgets: {train: true}", "r.yaml:4:18: wrong value for budgets.train (found true, expected a number)"),
        ("gate: 5", "r.yaml:4:7: wrong value for gate (found 5, expected a mapping)"),
        ("task: {kind: masked_lm, share: 1}", "r.yaml:4:32: wrong value for task.share (found 1, expected below 1)"),
        ("task: {kind: python:x}", "r.yaml:4:14: wrong value for task.kind (found 'python:x', expected python:module:"),
        ("task: 3", "r.yaml:4:7: wrong value for task (found 3, expected a mapping with the key 'kind')"),
        ("task: {label_smoothing: 0.1}", "r.yaml:4:7: missing key 'kind' in task"),
        ("expect: {at_least: 0.5}", "r.yaml:4:1: expect needs task and data"),
        ("expect: {metric: 0.5}", "r.yaml:4:1: expect: metric needs within"),
        ("expect: {at_least: 1, metric: 0.5, within: 0}", "r.yaml:4:1: expect: either metric and within, or at_least"),
        ("expect: {}", "r.yaml:4:1: expect: either metric and within, or at_least"),
        (
            "expect: {at_least: 0.5, at_most: 0.1}",
            "r.yaml:4:10: expect: at_least must be at most at_most, 0.1, got 0.5",
        ),
        ("description: 5", "r.yaml:4:14: wrong value for description (found 5, expected text)"),
        ("run: {device: 'cuda:x'}", "r.yaml:4:7: run.device: unknown device 'cuda:x'"),
        ("run: {device: 'auto:1'}", "r.yaml:4:7: run.device: unknown device 'auto:1'"),
        ("run: {threads: -1}", "r.yaml:4:16: wrong value for run.threads (found -1, expected at least 1)"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_its_place(recipe_file, change, problem):
    (found,) = problems_of(recipe_file(SMALL + change + "\n"))
    assert found.startswith(problem)


@pytest.mark.parametrize("name", ["..", "../up", "/tmp/x", "a/b", r"a\b", r"'a\0b'"])
def test_a_name_that_is_no_folders_is_refused_but_read_again_where_a_run_has_saved_it(recipe_file, name):
    text = SMALL.replace("name: small", f"name: {name}")
    assert text != SMALL
    (found,) = problems_of(recipe_file(text))
    assert found.startswith("r.yaml:2:1: name must be the name of a folder, got ")
    load_recipe(recipe_file(f"{text}resolved: {{recipe: r.yaml, hash: x}}\n"))


AUDIO = "kind: common_voice, root: x, vocabulary: y"
SPOKEN = "kind: spoken_digits, split: train"
TEXTS = "kind: texts, tokenizer: x, split: train"
ROWS = "kind: text_rows, rows: 'python:a:b', tokenizer: x"
DIGITS = "kind: cluttered_digits, split: train"
WHAT_DOES_NOT_FIT = [
    ("classify", AUDIO, "", "common_voice gives audio with transcripts, for task ctc"),
    ("causal_lm", SPOKEN, "", "spoken_digits gives audio with transcripts, for task ctc"),
    ("ctc", DIGITS, "", "cluttered_digits gives images with classes, for task classify"),
    (
        "classify",
        TEXTS,
        "",
        "texts gives texts, for task causal_lm or masked_lm or embed; `classes:` names the folders",
    ),
    ("classify", ROWS, "", "for task causal_lm or masked_lm or embed; `label:` names the rows' key"),
    ("ctc", f"{ROWS}, label: y", "", "texts with classes, for task causal_lm or masked_lm or embed or classify"),
    (
        "masked_lm",
        TEXTS,
        "ForCausalLM",
        "AutoModelForCausalLM does not fit task masked_lm, which needs AutoModelForMask",
    ),
    (
        "causal_lm",
        TEXTS,
        "ForMaskedLM",
        "AutoModelForMaskedLM does not fit task causal_lm, which needs AutoModelForCaus",
    ),
    ("embed", TEXTS, "ForMaskedLM", "AutoModelForMaskedLM does not fit task embed, which needs AutoModel"),
    ("ctc", AUDIO, "", "model of AutoModel does not fit task ctc, which needs AutoModelForCTC"),
    ("classify", f"{TEXTS}, classes: [a, b]", "ForCausalLM", "which needs AutoModelForSequenceClassification"),
    ("classify", DIGITS, "ForSequenceClassification", "which needs AutoModelForImageClassification"),
    ("classify", "kind: 'python:a:b'", "ForCTC", "needs AutoModelForImageClassification or AutoModelForSequenceClass"),
]


def fitting(task: str, data: str, head: str) -> str:
    return f"""acm: 1
name: x
model: {{source: hf, name: y, auto_class: AutoModel{head}}}
task: {{kind: {task}}}
data:
  train: {{{data}}}
  eval: {{{data}}}
"""


@pytest.mark.parametrize(("task", "data", "head", "problem"), WHAT_DOES_NOT_FIT)
def test_a_task_that_does_not_fit_data_or_model_is_refused_before_anything_is_opened(
    recipe_file, task, data, head, problem
):
    (found,) = problems_of(recipe_file(fitting(task, data, head)))
    line = 4 if "does not fit data." in found else 3
    assert found.startswith(f"r.yaml:{line}:1: ") and problem in found


@pytest.mark.parametrize(
    ("data", "example", "problem"),
    [
        (AUDIO, "audio_seconds: 1, sample_rate: 8000", "is 8000, but data.train, common_voice, gives 16000 samples"),
        (SPOKEN, "audio_seconds: 1", "is 16000, but data.train, spoken_digits, gives 8000 samples"),
        (AUDIO, "audio_seconds: 1", None),
        (SPOKEN, "shape: [8000]", None),
    ],
)
def test_a_model_of_another_sampling_rate_than_the_data_s_is_refused(recipe_file, data, example, problem):
    recipe = recipe_file(fitting("ctc", data, "ForCTC") + f"input: {{{example}}}\n")
    if problem is None:
        assert load_recipe(recipe).input is not None
    else:
        (found,) = problems_of(recipe)
        assert found.startswith("r.yaml:8:1: input.sample_rate ") and problem in found


def test_how_many_broken_clips_are_taken_is_no_decision_about_the_model(recipe_file):
    recipe = recipe_file(fitting("ctc", AUDIO, "ForCTC"))
    plain, more, other = (
        recipe_hash(load_recipe(recipe, overrides))
        for overrides in ([], ["data.train.max_broken=7", "data.eval.max_broken=9"], ["data.train.max_seconds=7"])
    )
    assert plain == more != other


def test_the_rates_of_audio_are_those_of_the_data_sets():
    from acm_compiler.data import common_voice
    from acm_compiler.data import spoken_digits as spoken_words

    assert AUDIO_RATES == {"common_voice": common_voice.RATE, "spoken_digits": spoken_words.RATE}


@pytest.mark.parametrize(
    ("task", "data", "head"),
    [
        ("ctc", AUDIO, "ForCTC"),
        ("masked_lm", TEXTS, "ForMaskedLM"),
        ("causal_lm", f"{ROWS}, label: y", "ForCausalLM"),
        ("embed", f"{TEXTS}, classes: [a, b]", ""),
        ("classify", f"{TEXTS}, classes: [a, b]", "ForSequenceClassification"),
        ("classify", "kind: 'python:a:b'", "ForAudioClassification"),
        ("python:a:b", AUDIO, "ForAudioClassification"),
    ],
)
def test_a_task_that_fits_data_and_model_is_taken(recipe_file, task, data, head):
    assert load_recipe(recipe_file(fitting(task, data, head))).task.kind == task


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("{rst: true}", "unknown key 'rst' in run.quantize (did you mean 'rest'?)"),
        ("{rest: 3}", "wrong value for run.quantize.rest (found 3, expected true or false)"),
        ("int7", "wrong value for run.quantize (found 'int7', expected 'int8'"),
        ("{include: [x]}", "include and exclude are about the rest"),
    ],
)
def test_a_word_or_a_mapping_with_a_fault_is_one_problem(recipe_file, value, problem):
    (found,) = problems_of(recipe_file(f"{TRAINED}run: {{quantize: {value}}}\n"))
    assert problem in found


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("epochs: 2}", "epochs: 2, steps: 3}", "r.yaml:9:33: schedule[0]: epochs and steps are both given"),
        ("epochs: 2}", "lr: 0.1}", "r.yaml:9:5: schedule[0]: epochs or steps must give the length"),
        ("epochs: 2}", "epochs: 2, accumulate: 5}", "r.yaml:9:33: schedule[0]: accumulate must divide batch, "),
        ("epochs: 2}", "epochs: 2, lr: 1e-7}", "r.yaml:9:5: schedule[0]: lr_min must be at most lr, 1e-07, got 1e-06"),
        ("task: {kind: classify}\n", "", "r.yaml:7:1: a schedule needs task"),
        (
            "split: eval}",
            "split: eval}\n  test: {}",
            "r.yaml:8:3: unknown key 'test' in data (known: train, eval)",
        ),
        (
            "{kind: cluttered_digits, split: eval}",
            "{kind: imagefolder, root: x, mixup: 0.8}",
            "r.yaml:7:3: data: data.eval is measured as it is",
        ),
        ("root: ", "zzz: 1, root: ", "r.yaml:6:30: unknown key 'zzz' in data.train (known: kind, root, image"),
        ("name: trained", "name: a${HOME}", "r.yaml:2:7: name: 'a${HOME}': ${VAR} may be used in paths only"),
        (
            "${PICTURES}",
            "${PICTURES",
            "r.yaml:6:36: data.train.root: '${PICTURES/train': a variable is written ${NAME}",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_at_its_place(recipe_file, before, after, problem):
    text = TRAINED.replace(before, after, 1)
    assert problems_of(recipe_file(text))[0].startswith(problem)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("{source: python, name: my_model}", "r.yaml:3:25: model: name must be package.module:function"),
        (
            "{source: timm, name: x, auto_class: AutoModel}",
            "r.yaml:3:32: model: auto_class must be left out unless source is hf",
        ),
        (
            "{source: hf, name: x, auto_class: AutoModelForCTCs}",
            "r.yaml:3:30: model: unknown auto_class 'AutoModelForCTCs' (did you mean 'AutoModelForCTC'?)",
        ),
        ("{source: hf}", "r.yaml:3:8: missing key 'name' in model"),
    ],
)
def test_a_model_that_cannot_be_meant_is_refused_at_its_place(recipe_file, model, problem):
    text = SMALL.replace("{source: torchvision, name: vit_b_16}", model)
    assert problems_of(recipe_file(text)) == [problem]


def test_anchors_and_merges_keep_the_place_of_the_original(recipe_file):
    text = SMALL + "sites:\n  - &first {match: mlp, learners: 8}\n  - {<<: *first, match: attn, learnres: 2}\n"
    assert problems_of(recipe_file(text)) == [
        "r.yaml:6:31: unknown key 'learnres' in sites[1] (did you mean 'learners'?)"
    ]
    recipe = load_recipe(recipe_file(text.replace(", learnres: 2", "")))
    assert [(rule.match, rule.learners) for rule in recipe.sites] == [(("mlp",), 8), (("attn",), 8)]


def test_a_mappings_own_keys_go_before_those_that_it_merges_however_deep(recipe_file):
    text = "sites:\n  - &a {match: mlp, learners: 8}\n  - &b {<<: *a, learners: 2}\n  - {<<: *b, match: attn}\n"
    recipe = load_recipe(recipe_file(SMALL + text))
    assert [rule.learners for rule in recipe.sites] == [8, 2, 2]


def test_a_user_may_name_functions_as_tasks_and_data(recipe_file):
    text = TRAINED.replace("{kind: classify}", '{kind: "python:my.tasks:count", args: {classes: 3}}').replace(
        "{kind: cluttered_digits, split: eval}", "{kind: python:my.data:make}"
    )
    recipe = load_recipe(recipe_file(text))
    assert (recipe.task.kind, recipe.task.args) == ("python:my.tasks:count", {"classes": 3})
    assert recipe.data.eval.kind == "python:my.data:make"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("schedule[0].lr=1e-4", lambda r: r.schedule[0].lr == 1e-4),
        ("budgets.train=0.5", lambda r: r.budgets.train == 0.5),
        ("budgets.report=[.5, 1]", lambda r: r.budgets.report == (0.5, 1.0)),
        ("schedule[1].clip_norm=null", lambda r: r.schedule[1].clip_norm is None),
        ("data.train.root=/pictures", lambda r: r.data.train.root == "/pictures"),
        ("data.train={kind: cluttered_digits, split: train}", lambda r: r.data.train.kind == "cluttered_digits"),
        ("model.args.num_classes=10", lambda r: r.model.args == {"num_classes": 10}),
        ("run.save_every=30s", lambda r: r.run.save_every == Every(amount=30, unit="second")),
        ("sites=[{match: mlp}]", lambda r: len(r.sites) == 1),
        ("description=a=b", lambda r: r.description == "a=b"),
    ],
)
def test_set_changes_one_value_of_its_type(recipe_file, override, read):
    path = recipe_file(TRAINED)
    assert not read(load_recipe(path))
    assert read(load_recipe(path, [override]))


def test_set_gives_a_phase_another_length_instead_of_a_second_one(recipe_file):
    recipe = load_recipe(recipe_file(TRAINED), ["schedule[0].steps=3", "schedule[1].epochs=1"])
    assert [(p.epochs, p.steps) for p in recipe.schedule] == [(None, 3), (1, None), (1, None)]
    both = problems_of(recipe_file(TRAINED), ["schedule[0].steps=3", "schedule[0].epochs=1"])
    assert "epochs and steps are both given" in both[0]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("schedule[0].lrr=1", "unknown key 'lrr' in schedule[0] (did you mean 'lr'?)"),
        ("schedule[0].lr=fast", "wrong value for schedule[0].lr (found 'fast', expected a number)"),
        ("budgts.train=0.5", "unknown key 'budgts' in the recipe (did you mean 'budgets'?)"),
        ("schedul[0].lr=1", "the recipe has no list schedul (did you mean 'schedule'?)"),
        ("sites[0].learners=2", "the recipe has no list sites; set it as a whole: sites=[...]"),
        ("schedule[9].lr=1", "schedule has 3 entries, the last is [2]"),
        ("schedule.lr=1", "schedule is a list of 3, which has no key 'lr'"),
        ("name.first=x", "name is 'trained', which has no key 'first'"),
        ("model[0]=x", "model is a mapping, which has no entry [0]"),
        ("budgets.train", "expected key.path=value, such as schedule[0].lr=1e-4"),
        ("a..b=1", "'a..b' is not a path of keys"),
        ("[0]=1", "'[0]' is not a path of keys"),
        ("run.seed=[", "not valid YAML: while parsing a flow node"),
        ("run.seed=!x 1", "unknown tag '!x'"),
    ],
)
def test_a_set_that_cannot_be_meant_is_refused_with_its_text(recipe_file, override, problem):
    (found,) = problems_of(recipe_file(TRAINED), [override])
    assert found.startswith(f"--set {override}: {problem}")


def test_unset_variables_are_told_with_their_place_and_stop_only_those_who_need_them(recipe_file, monkeypatch):
    recipe = load_recipe(recipe_file(TRAINED))
    monkeypatch.delenv("PICTURES", raising=False)
    (note,) = unset_variables(recipe)
    assert str(note).endswith("r.yaml:6:36: ${PICTURES} is not set (data.train.root = '${PICTURES}/train')")
    monkeypatch.setenv("PICTURES", "")
    with pytest.raises(RecipeError, match=r"(?s)r\.yaml:6:36: \$\{PICTURES\} is not set.*export PICTURES=…"):
        expand_paths(recipe)
    monkeypatch.setenv("PICTURES", "/data")
    expanded = expand_paths(recipe)
    assert expanded.data.train.root == "/data/train"
    assert recipe.data.train.root == "${PICTURES}/train"


def test_variables_and_the_home_folder_are_replaced_in_paths_of_any_depth(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("A", "/a")
    model = ModelConfig(source="python", name="m:f", args={"files": ["${A}/x", "~/y", 3], "deep": {"z": "${A}${A}"}})
    recipe = Recipe(acm=1, name="x", model=model)
    assert expand_paths(recipe).model.args == {"files": ["/a/x", "/home/me/y", 3], "deep": {"z": "/a/a"}}


def test_a_resolved_recipe_loads_again_and_says_the_same(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file(TRAINED), ["schedule[0].lr=2e-3"])
    text = resolved_yaml(recipe)
    (tmp_path / "recipe.yaml").write_text(text)
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again.resolved.overrides == ("schedule[0].lr=2e-3",)
    assert again.resolved.hash == recipe_hash(recipe) == recipe_hash(again)
    assert {"python", "acm_compiler", "torch"} <= set(again.resolved.versions)
    assert again.model_dump(exclude={"resolved"}) == recipe.model_dump(exclude={"resolved"})


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_recipe_that_a_run_keeps_loads_again(name, tmp_path):
    recipe = load_recipe(shipped_recipes()[name])
    (tmp_path / "recipe.yaml").write_text(resolved_yaml(recipe))
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again.model_dump(exclude={"resolved"}) == recipe.model_dump(exclude={"resolved"})


def test_the_hash_tells_settings_apart_and_not_spellings(recipe_file):
    recipe = load_recipe(recipe_file(SMALL))
    assert recipe_hash(load_recipe(recipe_file(SMALL), ["gate.share=0.01", "run.save_every=600s"])) == recipe_hash(
        recipe
    )
    assert recipe_hash(load_recipe(recipe_file(SMALL), ["gate.share=0.02"])) != recipe_hash(recipe)


@given(
    st.one_of(st.integers(1, 10**6).map(str), st.sampled_from(["0.5", "1.25", "90"])),
    st.sampled_from(["s", "min", "h"]),
)
def test_intervals_of_time_survive_writing(number, unit):
    every = parse_every(f"{number}{unit}")
    assert parse_every(str(every)).amount == every.amount


@pytest.mark.parametrize(
    ("text", "every", "written"),
    [
        ("10min", Every(amount=600, unit="second"), "10min"),
        ("90s", Every(amount=90, unit="second"), "90s"),
        ("2h", Every(amount=7200, unit="second"), "2h"),
        ("1epoch", Every(amount=1, unit="epoch"), "1epoch"),
        ("500 steps", Every(amount=500, unit="step"), "500steps"),
    ],
)
def test_intervals_are_read_and_written_as_recipes_do(text, every, written):
    assert parse_every(text) == RunConfig(save_every=every).save_every == every
    assert str(every) == written


@pytest.mark.parametrize("text", ["0min", "0.5steps", "10", "min", "10 years", "-1s", 10])
def test_intervals_without_meaning_are_refused(text):
    with pytest.raises(ValidationError):
        Recipe.model_validate(
            {"acm": 1, "name": "x", "model": {"source": "hf", "name": "y"}, "run": {"save_every": text}}
        )


def test_the_size_of_pictures_is_that_of_the_input():
    recipe = Recipe(acm=1, name="x", model=ModelConfig(source="hf", name="y"), input=InputConfig(image=(3, 30, 40)))
    assert recipe.image_size == (30, 40)
    assert recipe.model_copy(update={"input": None}).image_size is None


def test_a_recipe_cannot_be_changed():
    recipe = load_recipe("digits_vit_paper")
    with pytest.raises(ValidationError, match="frozen"):
        recipe.name = "other"


def test_the_json_schema_writes_defaults_as_recipes_do():
    schema = json.loads(json.dumps(recipe_json_schema()))
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["RunConfig"]["properties"]["save_every"]["default"] == "10min"
    assert schema["$defs"]["SiteRule"]["properties"]["learners"]["default"] == 4
    assert {"distill", "gate", "finetune", "calibrate"} == set(
        schema["properties"]["schedule"]["items"]["discriminator"]["mapping"]
    )


def test_names_written_twice_agree():
    assert set(SOURCES) == set(ModelConfig.model_json_schema()["properties"]["source"]["enum"])


def test_auto_classes_are_transformers_own():
    transformers = pytest.importorskip("transformers")
    assert all(hasattr(getattr(transformers, name), "_model_mapping") for name in AUTO_CLASSES)


def test_every_key_is_explained():
    schema = recipe_json_schema()
    sections = [schema, *schema["$defs"].values()]
    assert all(re.search(r"\w", section.get("description", "")) for section in sections)


def test_what_differs_between_two_recipes_is_told_by_key(recipe_file):
    def plain(*overrides):
        return decisions(load_recipe(recipe_file(SMALL), overrides))

    assert differences(plain(), plain("run.save_every=1h", "run.workers=3", "run.eval_batch=4")) == []
    told = differences(plain(), plain("gate.share=0.02", "run.seed=9"))
    assert told == ["gate.share: 0.01 -> 0.02", "run.seed: 0 -> 9"]
    assert differences({"a": [{"phase": "gate"}]}, {"a": [], "b": 1}) == ["a: [gate] -> []", "b: nothing -> 1"]


def test_a_key_that_an_earlier_version_did_not_know_is_null_there():
    assert differences({"a": [{}], "c": None}, {"a": [{"b": None}]}) == []
