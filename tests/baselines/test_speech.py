"""Methods on audio: what is refused, and that padding of clips counts nowhere."""

import copy
import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import acm_compiler as acm
from acm_compiler.baselines.choose_methods import METHODS, choose
from acm_compiler.baselines.method import Subject
from acm_compiler.baselines.site_method import Dense
from acm_compiler.baselines.trained import experts
from acm_compiler.baselines.trained.block_kinds import SpeechBlocks
from acm_compiler.baselines.trained.early_exit import Exits
from acm_compiler.data.loading import BatchStream
from acm_compiler.recipe.schema import RunConfig
from acm_compiler.tasks.ctc import Ctc
from acm_compiler.training.phase import Job
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
    refused = {"cmoe", "tome", "avit"}
    assert refused <= chosen.left_out.keys() and set(chosen.budgets) == METHODS.keys() - refused
    assert all(budgets == (0.95,) for budgets in chosen.budgets.values())
    assert all("every frame" in chosen.left_out[name] for name in ("avit", "tome"))
    assert "gated MLPs" in chosen.left_out["cmoe"]


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
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
            least = method.run(alone, budget).macs_B
        if name in ("svd", "thin", "moefication", "d2dmoe"):  # the others run all of a layer and count a part
            assert float(least) == flops.get_total_flops() / 2
        assert ran[1] == pytest.approx(float(least), rel=0.02) and ran[1] < ran[2] < ran[0]
        assert float(ran.sum() / whole.sum()) == pytest.approx(budget, abs=0.05)


@pytest.mark.parametrize("post_norm", [False, True])
def test_a_model_run_a_block_at_a_time_answers_and_costs_as_the_whole(speech, post_norm):
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    torch.manual_seed(3)
    config = Wav2Vec2Config.from_dict({**speech.dense.config.to_dict(), "do_stable_layer_norm": not post_norm})
    dense = Wav2Vec2ForCTC(config).eval()
    plan = acm.plan(dense, {"input_values": torch.zeros(1, 900)}, sites="mlp", learners=2)
    subject = dataclasses.replace(speech, dense=dense, plan=plan)
    steps, batch = SpeechBlocks(dense), next(speech.held_out())
    with torch.no_grad():
        tokens = steps.embed(batch, speech.task)
        for place in range(len(steps.blocks)):
            tokens = steps.advance(place, tokens)
        found, wanted = steps.answer(tokens), dense(**speech.task.inputs(batch)).logits
    torch.testing.assert_close(found, wanted)
    method = METHODS["ztw"](subject)
    method.exits = Exits(len(steps.blocks), tokens.x_BSD.shape[-1], found.shape[-1])
    costs, whole = method._exits(batch)[1], Dense(subject).run(batch, 1.0).macs_B
    torch.testing.assert_close(costs[:, -1], whole)
    assert (costs[:, :-1].diff(dim=1) > 0).all() and (costs[:, 0] < whole).all()
    assert METHODS["ztw"].floor(dense, plan) < float((costs[:, 0] / whole)[0])


def test_clips_leave_early_where_the_mean_frame_is_sure_and_keep_their_own_answers(speech):
    torch.manual_seed(0)
    method, batch = METHODS["ztw"](speech), next(speech.held_out())
    method.exits = Exits(len(method.steps.blocks), 32, 30)
    with torch.no_grad():
        (tokens, *_, last) = after = method._after(batch)
        logits = method._logits(after, method.steps.answer(last))
        sure = method.steps.confidence(logits[0], tokens)
        wanted = [method.exits.together(place, logits[: place + 1]) for place in range(2)]
    method.thresholds[0.9] = float(sure.median()) + 1e-6
    given = []
    method.score = lambda output, batch: given.append(output) or torch.zeros(4)
    macs = method.run(batch, 0.9).macs_B
    early = method.steps.confidence(wanted[0], tokens) >= method.thresholds[0.9]
    assert early.any() and not early.all()
    torch.testing.assert_close(given[0], torch.where(early[:, None, None], *wanted))
    costs = method._exits(batch)[1]
    torch.testing.assert_close(macs, torch.where(early, costs[:, 0], costs[:, 1]))


def test_models_with_an_adapter_after_their_blocks_are_no_such_models(speech):
    dense = copy.deepcopy(speech.dense)
    assert METHODS["ztw"].refuses(dense, speech.plan) is None
    dense.config.add_adapter = True
    assert "a block at a time" in METHODS["ztw"].refuses(dense, speech.plan)
