"""The original's answers, computed once: those of every step, in files that belong to one model and one data set."""

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from acm_compiler.data import BatchStream
from acm_compiler.errors import RunInterrupted, StorageError, UsageError
from acm_compiler.passes.rewrite.conversion import sites
from acm_compiler.runtime.measure_budgets import measure_budgets
from acm_compiler.tasks.language import CausalLM
from acm_compiler.training import answers
from acm_compiler.training.machine import open_machine
from acm_compiler.training.schedule import run_schedule
from acm_compiler.training.state import discard_state
from acm_compiler.training.teacher import Teacher
from tests.helpers.training_process import Signalling, weights
from tests.helpers.training_runs import examples, finetune, fitted, job_in, metrics
from tests.helpers.training_tiny import Points, Task, make_model, make_teacher

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS, WIDTH = 50, 6


class Counted(nn.Module):
    """A model that counts its calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.model(*args, **kwargs)


class Language(nn.Module):
    """[B, S] -> logits [B, S, words]; its head may give them to something else that it does."""

    def __init__(self, *, cap: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.cap = cap

    def forward(self, input_ids, attention_mask):
        logits = self.head(self.mix(self.embed(input_ids)).cumsum(1))
        return {"logits": logits.tanh() if self.cap else logits}


class Words(Dataset):
    """Texts of 2 to 6 tokens, padded to the longest of a batch."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index):
        ids = torch.randint(WORDS, (2 + index % 5,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def collate(self, items):
        return {name: nn.utils.rnn.pad_sequence([item[name] for item in items], batch_first=True) for name in items[0]}


def learner() -> nn.Module:
    """A converted model whose budgets are known."""
    model = fitted(make_model())
    measure_budgets(model, [(examples(8)["x"], None)])
    return model


def healing(**changes):
    """The learners follow kept answers: two epochs of six batches."""
    return finetune(
        **{
            "update": "learners",
            "objective": "distillation",
            "cache_answers": True,
            "steps": 12,
            "budget_range": (0.4, 1),
        }
        | changes
    )


class Plain(Words):
    """A data set that could mix its examples, and does not."""

    mix = None


def words(**changes) -> BatchStream:
    return BatchStream(**{"dataset": Plain(), "batch": 4, "seed": 7, "shuffle": True, "drop_last": True} | changes)


def kept(tmp_path, model, *, precision="fp32", most=99, stream=None) -> Teacher:
    found = Teacher(model=Counted(model), task=CausalLM(), machine=open_machine(precision), wanted=True)
    found.keep(stream or words(), most=most, job=job_in(tmp_path))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cap", [False, True])
def test_kept_answers_are_those_of_every_step(cap, precision, tmp_path):
    model = Language(cap=cap)
    once, live = (
        kept(tmp_path, model, precision=precision),
        Teacher(model=model, task=CausalLM(), machine=open_machine(precision), wanted=True),
    )
    calls = once.model.calls
    for epoch in (0, 1, 5):
        for batch in words().epoch(epoch):
            found, wanted = once.teach(batch)[1], live.teach(batch)[1]
            assert found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted)
    assert once.model.calls == calls
    (file,) = (tmp_path / "state" / "answers").glob("*.safetensors")
    wide = WORDS if cap else WIDTH
    numbers = sum(len(Words()[i]["input_ids"]) for i in range(22)) * wide
    assert once.kept.store.rows(0, once.kept.store._places[0][3]).shape == (2, wide)
    assert file.stat().st_size < numbers * (4 if precision == "fp32" else 2) + 22 * 40 + 500


def test_heads_are_run_to_find_them_and_not_to_keep_what_they_read(tmp_path):
    model, runs = Language(), []
    model.head.register_forward_hook(lambda *_: runs.append(1))
    kept(tmp_path, model)
    assert len(runs) == 1


def test_of_a_head_that_runs_twice_the_logits_are_kept(tmp_path):
    class Twice(Language):
        def forward(self, input_ids, attention_mask):
            return super().forward(input_ids.flip(1), attention_mask) and super().forward(input_ids, attention_mask)

    model = Twice()
    once = kept(tmp_path, model)
    batch = next(words().epoch(0))
    wanted = Teacher(model=model, task=CausalLM(), machine=open_machine("fp32"), wanted=True).teach(batch)[1]
    torch.testing.assert_close(once.teach(batch)[1], wanted)


def test_only_what_will_be_read_is_answered(tmp_path):
    once = kept(tmp_path, Language(), most=2)
    assert len(once.kept.store._places) == 8
    calls = once.model.calls
    batches = list(words().epoch(0))
    once.teach(batches[1])
    assert once.model.calls == calls
    once.teach(batches[2])
    assert once.model.calls == calls + 1


def test_answers_to_more_than_is_asked_for_are_used(tmp_path):
    kept(tmp_path, Language())
    again = kept(tmp_path, Language(), most=2)
    assert again.model.calls == 2  # to look at a batch


def test_a_phase_learns_the_same_from_kept_answers(tmp_path):
    live, once = learner(), learner()
    run_schedule(live, [healing(cache_answers=False)], job_in(tmp_path / "live", teacher=make_teacher()))
    teacher = Counted(make_teacher())
    run_schedule(once, [healing()], job_in(tmp_path / "once", teacher=teacher))
    assert teacher.calls == 2 + 6  # to look at a batch, and the epoch
    found, expected = weights(once), weights(live)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert [line["loss"] for line in metrics(tmp_path / "once") if "loss" in line] == pytest.approx(
        [line["loss"] for line in metrics(tmp_path / "live") if "loss" in line], rel=1e-4
    )


def test_a_resumed_run_reads_them_and_ends_alike(tmp_path):
    whole, stopped = learner(), learner()
    run_schedule(whole, [healing()], job_in(tmp_path / "whole", teacher=make_teacher()))
    job = functools.partial(job_in, tmp_path / "stopped")
    # the original reads 8 batches and one example of two epochs, and each answer is looked up by its inputs
    with pytest.raises(RunInterrupted, match="after step"):
        run_schedule(stopped, [healing()], job(teacher=make_teacher(), task=Signalling(35)))
    teacher, resumed = Counted(make_teacher()), learner()
    run_schedule(resumed, [healing()], job(teacher=teacher, task=Signalling()), resume=True)
    assert teacher.calls == 2
    found, expected = weights(resumed), weights(whole)
    assert all(value.equal(found[name]) for name, value in expected.items())
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    discard_state(tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "state").exists()


def test_stopping_while_the_original_answers_keeps_whole_files(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "_FILE_BYTES", 1)
    job = functools.partial(job_in, tmp_path)
    with pytest.raises(RunInterrupted, match="before the first step of phase finetune"):
        run_schedule(learner(), [healing()], job(teacher=make_teacher(), task=Signalling(11)))
    folder = tmp_path / "state" / "answers"
    names = sorted(path.name for path in folder.iterdir())
    assert names[-1] == "facts.json" and 1 < len(names) < 7 and all(name[0] != "." for name in names)
    teacher = Counted(make_teacher())
    run_schedule(learner(), [healing()], job(teacher=teacher, task=Signalling()), resume=True)
    assert teacher.calls == 2 + 6 - (len(names) - 1)


def test_a_fresh_start_forgets_them(tmp_path):
    teacher = Counted(make_teacher())
    for _ in range(2):
        run_schedule(learner(), [healing()], job_in(tmp_path, teacher=teacher))
    assert teacher.calls == 2 * (2 + 6)


def test_answers_of_another_model_or_to_other_data_are_refused(tmp_path):
    class Others(Points):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return {**item, "x": item["x"] + 1}

    run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher()))
    (tmp_path / "state" / "1-0").rename(tmp_path / "done")
    with pytest.raises(UsageError, match="of another model") as caught:
        run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher(seed=1)), resume=True)
    assert "remove that folder" in str(caught.value)
    with pytest.raises(UsageError, match="of another precision"):
        run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher(), precision="bf16"), resume=True)
    data = functools.partial(BatchStream, dataset=Others(), shuffle=True, drop_last=True)
    with pytest.raises(UsageError, match="is not the one that the original has answered"):
        run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher(), data=data), resume=True)


def test_damaged_answers_are_refused(tmp_path):
    run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher()))
    (tmp_path / "state" / "1-0").rename(tmp_path / "done")
    (file,) = (tmp_path / "state" / "answers").glob("*.safetensors")
    for damaged, content in ((file, file.read_bytes()[:100]), (file.with_name("facts.json"), b"[")):
        damaged.write_bytes(content)
        with pytest.raises(StorageError, match="answers that were kept are damaged"):
            run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher()), resume=True)


def test_data_that_are_others_in_every_epoch_are_refused(tmp_path):
    class Noisy(Points):
        def __getitem__(self, index):
            item = super().__getitem__(index)
            return {**item, "x": item["x"] + torch.randn_like(item["x"])}

    class Mixed(Points):
        def mix(self, batch):
            return batch

    for dataset in (Noisy(), Mixed()):
        data = functools.partial(BatchStream, dataset=dataset, shuffle=True, drop_last=True)
        with pytest.raises(UsageError, match="belong to examples that stay what they are"):
            run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher(), data=data))
    assert not (tmp_path / "state").exists()


def test_a_disk_without_room_is_told_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=99))
    with pytest.raises(StorageError, match="do not fit on the disk") as caught:
        run_schedule(learner(), [healing()], job_in(tmp_path, teacher=make_teacher()))
    assert "48 examples" in str(caught.value)


def test_few_tokens_with_gradients_are_computed_in_one_go_and_give_what_single_products_do(monkeypatch):
    from acm_compiler.acm import ops

    model = learner()
    acm = next(acm for acm in sites(model).values() if acm.learners.weights().is_nested)
    weights_, x = acm.learners.weights(), torch.randn(30, acm.d_in, requires_grad=True)
    k = torch.arange(30, dtype=torch.int32) % (acm.count + 1)

    def run():
        y = ops.learners(x, k, weights_)
        return y, *torch.autograd.grad(F.silu(y).sum(), [x, weights_.w_in, weights_.w_out, weights_.b_out])

    few = run()
    monkeypatch.setattr(ops, "_FEW_BYTES", 0)
    for found, expected in zip(few, run(), strict=True):
        torch.testing.assert_close(found, expected)


def test_keeping_answers_needs_an_objective_that_reads_them():
    with pytest.raises(ValueError, match="objective: distillation"):
        finetune(cache_answers=True)
    assert Task().logits(torch.zeros(2, 3)) is None
