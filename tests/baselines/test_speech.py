"""Methods on audio: what is refused, and that padding of clips counts nowhere."""

import pytest
import torch

import acm_compiler as acm
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.methods import METHODS, choose
from acm_compiler.baselines.site_method import Dense
from acm_compiler.baselines.trained import experts
from acm_compiler.data.loading import BatchStream
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.tasks.ctc import Ctc
from acm_compiler.training.job import Job
from tests.helpers.models import hf_wav2vec2

SAMPLES = (900, 500, 700, 900)
BUDGETS = (0.85, 0.95)  # the MLPs are a quarter of the whole


class Clips(torch.utils.data.Dataset):
    """Noise of four lengths, padded with zeros to the longest, each with a transcript of three letters."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        real = torch.arange(max(SAMPLES)) < SAMPLES[index % 4]
        audio = torch.randn(max(SAMPLES), generator=torch.Generator().manual_seed(index)) * real
        labels = torch.tensor([1 + index % 5, 7, 9])
        return {"input_values": audio, "attention_mask": real.long(), "labels": labels}


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    """A small wav2vec2 with CTC on such clips, whose MLPs are the sites."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    dense, folder = hf_wav2vec2()[0].eval(), tmp_path_factory.mktemp("speech")
    task = Ctc(
        vocabulary=[*"-abcdefghijklmnopqrstuvwxyz|'."],
        blank=0,
        frames=dense._get_feat_extract_output_lengths,
        masked=True,
    )
    plan = acm.plan(dense, {"input_values": torch.zeros(1, 900)}, sites="mlp", learners=2)

    def job(name):
        def data(**sizes):
            return BatchStream(dataset=Clips(), shuffle=True, drop_last=True, **sizes)

        return Job(task=task, data=data, run=RunConfig(seed=1), directory=folder / name, budget=0.5, teacher=dense)

    def batches():
        return BatchStream(dataset=Clips(), batch=4).epoch()

    return Subject(dense=dense, plan=plan, task=task, fit=batches, held_out=batches, steps=2, job=job)


def test_what_acts_on_images_or_gated_mlps_is_left_out_and_all_else_is_fitted(speech):
    chosen = choose(speech.dense, speech.plan, names=["all"], budgets=None, usual=(0.5, 0.95))
    refused = {"cmoe", "tome", "ztw", "avit"}
    assert refused <= chosen.left_out.keys() and set(chosen.budgets) == METHODS.keys() - refused
    assert all(budgets == (0.95,) for budgets in chosen.budgets.values())
    assert "VisionTransformer" in chosen.left_out["avit"] and "gated MLPs" in chosen.left_out["cmoe"]


@pytest.mark.parametrize("name", ["teal", "svd", "flap", "thin", "moefication", "d2dmoe"])
def test_a_clip_costs_what_it_costs_without_padding_and_all_clips_meet_the_budget(speech, name, monkeypatch):
    monkeypatch.setattr(experts, "_ROUTER_STEPS", 20)
    torch.manual_seed(0)
    method = METHODS[name](speech)
    method.convert(BUDGETS, print)
    batch, dense = next(speech.held_out()), Dense(speech)
    assert method.score(speech.dense(**speech.task.inputs(batch)), batch).shape == (4,)
    alone = {key: batch[key][1:2, : SAMPLES[1]] for key in ("input_values", "attention_mask", "labels")}
    for budget in BUDGETS:
        ran, whole = (part.run(batch, b).macs_B for part, b in ((method, budget), (dense, 1.0)))
        least = method.run(alone, budget).macs_B
        assert ran[1] == pytest.approx(float(least), rel=0.02) and ran[1] < ran[2] < ran[0]
        assert float(ran.sum() / whole.sum()) == pytest.approx(budget, abs=0.05)
