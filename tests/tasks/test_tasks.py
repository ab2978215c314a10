"""Tasks on batches and on models' outputs."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from acm_compiler.errors import DataError, FunctionFailed, UsageError
from acm_compiler.recipe.tasks import CausalLMTask, ClassifyTask, CtcTask, EmbedTask, MaskedLMTask, PythonTask
from acm_compiler.tasks import Task, open_task
from acm_compiler.tasks.base import as_task
from acm_compiler.tasks.classify import Classify
from acm_compiler.tasks.ctc import Ctc
from acm_compiler.tasks.distance import _AT_A_TIME, distance
from acm_compiler.tasks.language import CausalLM, MaskedLM

LOGITS = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 1.0]])


def make_task(classes: int) -> Classify:
    return Classify(classes=classes)


def make_no_task() -> object:
    return SimpleNamespace(metric="accuracy", loss=len)


def test_classify_is_a_task() -> None:
    assert isinstance(open_task(ClassifyTask(kind="classify")), Task)


def test_the_loss_is_the_mean_cross_entropy() -> None:
    loss = Classify().loss(LOGITS, {"label": torch.tensor([0, 1])})
    first = math.log(math.exp(2) + 2) - 2
    second = math.log(math.exp(1) + 2)
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-6)


def test_labels_of_another_number_of_examples_are_refused() -> None:
    for method in (Classify().loss, Classify().score):
        with pytest.raises(DataError, match=r"one per example.* labels \[1\] for the logits of 2"):
            method(LOGITS, {"label": torch.tensor([0])})


@pytest.mark.parametrize("label", [torch.tensor([0.0, 1.0]), torch.zeros(2, dtype=torch.complex64), torch.tensor(1)])
def test_labels_that_are_no_class_numbers_are_refused(label) -> None:
    for method in (Classify().loss, Classify().score):
        with pytest.raises(DataError, match="labels must be whole numbers, one per example"):
            method(LOGITS, {"label": label})
    with pytest.raises(DataError, match="labels must be whole numbers, one per example"):
        Classify().units({"label": label})


def test_whole_numbers_of_every_type_are_labels() -> None:
    for dtype in (torch.int32, torch.uint8, torch.bool):
        label = torch.tensor([0, 1]).to(dtype)
        assert Classify().loss(LOGITS, {"label": label}) == Classify().loss(LOGITS, {"label": torch.tensor([0, 1])})
    one_hot = torch.tensor([[1, 0, 0], [0, 1, 0]])
    assert Classify().loss(LOGITS, {"label": one_hot}) == Classify().loss(LOGITS, {"label": torch.tensor([0, 1])})
    assert Classify().score(LOGITS, {"label": one_hot}).tolist() == [1, 0]


def test_shares_of_other_classes_are_refused_by_loss_and_score() -> None:
    for method in (Classify().loss, Classify().score):
        with pytest.raises(UsageError, match="classes"):
            method(LOGITS, {"label": torch.tensor([[0], [1]])})


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_that_count_nowhere_have_no_part_in_loss_and_gradient(smoothing) -> None:
    task, logits = Classify(label_smoothing=smoothing), torch.randn(4, 3, requires_grad=True)
    task.loss(logits, {"label": torch.tensor([0, -100, 2, -100])}).backward()
    assert logits.grad.isfinite().all() and not logits.grad[1::2].any() and logits.grad[::2].all()
    logits.grad = None
    loss = task.loss(logits, {"label": torch.full((4,), -100)})
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros(4, 3))


@pytest.mark.parametrize("task", [CausalLM(), MaskedLM(share=0.5, seed=0, mask_id=3, marks=frozenset())])
def test_texts_of_padding_alone_have_no_loss_and_a_gradient_of_zero(task) -> None:
    batch = {name: torch.zeros(2, 5, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    logits = torch.randn(2, 5, 7, requires_grad=True)
    loss = task.loss(logits, batch | {"index": torch.arange(2)})
    loss.backward()
    assert loss == 0 and torch.equal(logits.grad, torch.zeros(2, 5, 7))


def test_label_smoothing_spreads_the_label() -> None:
    loss = Classify(label_smoothing=0.3).loss(LOGITS, {"label": torch.tensor([0, 1])})
    smoothed = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    assert loss.item() == pytest.approx(-(smoothed * LOGITS.log_softmax(1)).sum(1).mean().item(), rel=1e-6)


def test_mixed_labels_count_by_their_shares() -> None:
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.0, 1.0]])
    batch = {"label": shares}
    expected = -(shares * LOGITS.log_softmax(1)).sum(1).mean()
    assert torch.allclose(Classify().loss(LOGITS, batch), expected)
    assert Classify().score(LOGITS, batch).tolist() == [1.0, 1.0]


def test_the_loss_of_bf16_logits_is_taken_in_fp32() -> None:
    logits = LOGITS.bfloat16().requires_grad_()
    loss = Classify().loss(logits, {"label": torch.tensor([0, 1])})
    assert loss.dtype == torch.float32
    assert torch.equal(loss, F.cross_entropy(logits.float(), torch.tensor([0, 1])))
    assert Classify().loss(LOGITS.double(), {"label": torch.eye(3)[:2]}).dtype == torch.float64


def test_the_score_is_one_where_the_best_class_is_the_label() -> None:
    assert Classify().score(LOGITS, {"label": torch.tensor([0, 1])}).tolist() == [1.0, 0.0]
    assert Classify().metric == "accuracy"


@pytest.mark.parametrize("output", [LOGITS, {"logits": LOGITS}, SimpleNamespace(logits=LOGITS)])
def test_logits_are_found_in_every_usual_output(output: object) -> None:
    assert Classify().logits(output) is LOGITS
    assert torch.equal(Classify().answer(output), LOGITS - LOGITS.mean(1, keepdim=True))


def test_calibration_judges_by_the_answer_unless_a_task_knows_better() -> None:
    assert torch.equal(Classify().judged_by(LOGITS, None), Classify().answer(LOGITS))
    logits = LOGITS[None]
    ctc = Ctc(vocabulary=["", "|", "a"], blank=0, frames=lambda samples: samples, masked=True)
    for task in (CausalLM(), ctc):
        torch.testing.assert_close(task.judged_by(logits, None).square(), 4 * logits.softmax(-1))
        assert not task.judged_by(logits, torch.zeros(1, 2)).any()


@pytest.mark.parametrize(
    "output", [torch.zeros(2, 5, 8), {"last_hidden_state": LOGITS}, SimpleNamespace(hidden=LOGITS), None]
)
def test_an_output_without_logits_is_refused(output: object) -> None:
    with pytest.raises(UsageError, match="no logits"):
        Classify().answer(output)


def test_numbers_of_classes_that_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="2 in the data, 3 in the model"):
        Classify(classes=2).score(LOGITS, {"label": torch.tensor([0, 1])})
    with pytest.raises(UsageError, match="5 in the data"):
        Classify().loss(LOGITS, {"label": torch.full((2, 5), 0.2)})


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(DataError, match="'label'"):
        Classify().loss(LOGITS, {"image": torch.zeros(2)})


def test_a_picture_is_the_only_input_and_has_no_padding() -> None:
    batch = {"image": torch.zeros(2, 3, 4, 4), "label": torch.zeros(2), "foreground": torch.zeros(2)}
    assert Classify().inputs(batch) is batch["image"]
    assert Classify().mask(batch) is None


def test_a_text_is_given_by_name_and_its_mask_is_found() -> None:
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask, "label": torch.zeros(2), "index": torch.arange(2)}
    inputs = Classify().inputs(batch)
    assert isinstance(inputs, dict) and set(inputs) == {"input_ids", "attention_mask"}
    assert torch.equal(Classify().mask(batch), mask == 1)


@pytest.mark.parametrize("label", [[0, 3], [-1, 2], [7, -100]])
def test_labels_of_no_class_are_refused(label: list[int]) -> None:
    task = open_task(ClassifyTask(kind="classify"), SimpleNamespace())  # type: ignore[arg-type]
    for measure in (task.score, task.loss):
        with pytest.raises(
            DataError, match=r"SimpleNamespace: a label is none .*found label (3|-1|7), expected 0 to 2"
        ):
            measure(LOGITS, {"label": torch.tensor(label)})


def test_an_example_without_a_label_counts_nowhere() -> None:
    batch = {"label": torch.tensor([0, -100])}
    score, units = Classify().score(LOGITS, batch), Classify().units(batch)
    assert Classify().value(score, units) == 1.0


def test_the_recipes_task_knows_the_data_sets_classes() -> None:
    task = open_task(
        ClassifyTask(kind="classify", label_smoothing=0.1),
        SimpleNamespace(classes=["cat", "dog"]),  # type: ignore[arg-type]
    )
    assert task == Classify(label_smoothing=0.1, classes=2)


@pytest.mark.parametrize(
    ("config", "name", "words"),
    [
        (MaskedLMTask(kind="masked_lm"), "LlamaForCausalLM", "task causal_lm, or.*auto_class AutoModelForMaskedLM"),
        (CausalLMTask(kind="causal_lm"), "BertForMaskedLM", "task masked_lm, or.*auto_class AutoModelForCausalLM"),
        (CausalLMTask(kind="causal_lm"), "Wav2Vec2ForCTC", "task ctc, or"),
        (EmbedTask(kind="embed"), "GPT2LMHeadModel", "task causal_lm, or .*auto_class AutoModel\\)"),
        (
            ClassifyTask(kind="classify"),
            "GPT2LMHeadModel",
            "task causal_lm, or .*AutoModelForSequenceClassification\\)",
        ),
        (CtcTask(kind="ctc"), "WavLMForAudioClassification", "task classify, or .*auto_class AutoModelForCTC"),
    ],
)
def test_a_model_for_another_task_is_refused_by_its_class(config, name, words) -> None:
    dataset = SimpleNamespace(classes=["a", "b"], pieces=list, mask_id=1, marks=[], vocabulary=["", "a"])
    with pytest.raises(UsageError, match=rf"(?s)^{name}: the model is not for task {config.kind} .*use {words}"):
        open_task(config, dataset, type(name, (torch.nn.Module,), {})())  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["XLMWithLMHeadModel", "MyLanguageModel"])
def test_models_whose_class_does_not_tell_are_taken(name) -> None:
    model = type(name, (torch.nn.Module,), {})()
    dataset = SimpleNamespace(mask_id=1, marks=[])
    for config in (CausalLMTask(kind="causal_lm"), MaskedLMTask(kind="masked_lm")):
        open_task(config, dataset, model)  # type: ignore[arg-type]


def test_an_answer_without_classes_is_told_the_class_that_fits_the_data() -> None:
    for dataset, fits in ((SimpleNamespace(pieces=list), "AutoModelForSequence"), (None, "AutoModelForImage")):
        task = open_task(ClassifyTask(kind="classify"), dataset)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=rf"hf: auto_class {fits}Classification"):
            task.answer(torch.zeros(2, 5, 8))


def test_a_users_function_gives_the_task() -> None:
    assert open_task(PythonTask(kind=f"python:{__name__}:make_task", args={"classes": 3})) == Classify(classes=3)
    with pytest.raises(UsageError, match="without inputs, mask, score, answer"):
        open_task(PythonTask(kind=f"python:{__name__}:make_no_task"))


class BrokenTask:
    metric, lower_is_better = "error", True

    def inputs(self, batch):
        raise KeyError("image")

    def mask(self, batch):
        return None

    def answer(self, output, mask=None):
        return output

    loss = score = lambda self, output, batch: 1 / 0


def test_a_users_task_that_raises_shows_its_own_lines() -> None:
    reference = f"python:{__name__}:BrokenTask"
    task = open_task(PythonTask(kind=reference))
    assert isinstance(task, Task) and task.lower_is_better and task.likeness is None
    assert task.answer(LOGITS, mask=None) is LOGITS and copy.deepcopy(task).mask({}) is None
    with pytest.raises(FunctionFailed) as caught:
        task.inputs({})
    what, frame, line = str(caught.value).splitlines()
    assert what == f"{reference}: inputs: the task raised KeyError: 'image'"
    assert frame.startswith(f'  File "{__file__}", line ') and frame.endswith(", in inputs")
    assert line == '    raise KeyError("image")'
    for method in (task.loss, task.score):
        with pytest.raises(FunctionFailed, match="the task raised ZeroDivisionError"):
            method(LOGITS, {})


@pytest.mark.parametrize(("scores", "found"), [(torch.tensor(1.0), r"a tensor \[\]"), ([1.0, 0.0], "list")])
def test_a_users_scores_are_one_number_per_example(scores: Any, found: str) -> None:
    task = as_task(SimpleNamespace(score=lambda output, batch: scores))
    with pytest.raises(UsageError, match=rf"one number per example \(found {found}, expected a tensor \[2\]"):
        task.score(LOGITS, {"x": torch.ones(2, 3)})


@pytest.mark.parametrize(
    ("facts", "share"),
    [({"metric": "word error rate"}, True), ({"metric": "F1"}, False), ({"metric": "F1", "is_share": True}, True)],
)
def test_a_users_metric_is_a_share_if_it_says_so_or_by_its_name(facts: dict[str, Any], share: bool) -> None:
    task = as_task(SimpleNamespace(**facts))
    assert task.is_share is share and not task.lower_is_better and task.likeness is None
    assert task.value(torch.tensor([1.0, 0.0]), task.units({"x": torch.ones(2, 3)})) == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_distance_of_logits_is_their_divergence_however_many_are_turned_at_a_time(dtype, monkeypatch):
    class Logits(Task):
        answers_logits = True

    torch.manual_seed(0)
    wanted = (3 * torch.randn(2, 5, 7)).to(dtype)
    answer = (3 * torch.randn(2, 5, 7)).to(dtype)
    wanted[1, 3:] = answer[1, 3:] = 0.0  # padding
    answer.requires_grad_()
    plain = F.kl_div(answer.float().log_softmax(-1), wanted.float().log_softmax(-1), log_target=True, reduction="sum")
    (slope,) = torch.autograd.grad(2**10 * plain / 8, answer)
    for numbers in (1, 21, 2**18):
        monkeypatch.setitem(_AT_A_TIME, "cpu", numbers)
        found = distance(Logits(), answer, wanted)
        torch.testing.assert_close(found, plain / 8)
        (mine,) = torch.autograd.grad(2**10 * found, answer)
        torch.testing.assert_close(mine, slope, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-4)
