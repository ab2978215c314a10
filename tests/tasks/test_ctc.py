"""Audio: clips on disk, the CTC task, padding, and a wav2vec2 converted by a recipe."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import acm_compiler as acm
from acm_compiler.cli import app
from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.data.audio import read_clip
from acm_compiler.data.batch import as_batch
from acm_compiler.errors import DataError, SelectionError, UsageError
from acm_compiler.recipe import load_recipe, shipped_recipe
from acm_compiler.recipe.datasets import CommonVoiceData
from acm_compiler.recipe.tasks import CtcTask
from acm_compiler.runs.pipeline import convert
from acm_compiler.runtime.masks import frame_mask
from acm_compiler.tasks import open_task
from acm_compiler.tasks.ctc import Ctc

pytestmark = pytest.mark.usefixtures("rough_budgets")

soundfile = pytest.importorskip("soundfile")
transformers = pytest.importorskip("transformers")

VOCABULARY = {"<pad>": 0, "|": 1, "a": 2, "b": 3, "ñ": 4, "<unk>": 5}
SENTENCES = ["Ab ba", "¡Ba, ña!", "a", "bab ab a", "ñ ñ", "abba"]
TINY = {
    "model_type": "wav2vec2",
    "architectures": ["Wav2Vec2ForCTC"],
    "vocab_size": len(VOCABULARY),
    "pad_token_id": 0,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": [8, 8],
    "conv_stride": [10, 8],
    "conv_kernel": [20, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "do_stable_layer_norm": True,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
    "mask_time_prob": 0.0,
    "layerdrop": 0.1,
}
RECIPE = """
acm: 1
name: speech
model: {{source: hf, name: "{0}/model", weights: null, args: {{layerdrop: 0.0}}, freeze: [wav2vec2.feature_extractor]}}
input: {{audio_seconds: 0.5}}
task: {{kind: ctc}}
data:
  train: {{kind: common_voice, root: "{0}/es", vocabulary: "{0}/model/vocab.json"}}
  eval: {{kind: common_voice, root: "{0}/es", split: test, vocabulary: "{0}/model/vocab.json"}}
sites: [{{match: mlp, learners: 2, init: random}}]
budgets: {{train: 0.6, report: [0.5, 1.0]}}
schedule:
  - {{phase: distill, steps: 3, batch: 3}}
  - {{phase: gate, steps: 2, batch: 3}}
  - {{phase: finetune, steps: 2, batch: 3}}
"""


@pytest.fixture
def release(tmp_path):
    """A small release of Common Voice, and a wav2vec2 without weights beside it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(TINY))
    (tmp_path / "model/vocab.json").write_text(json.dumps(VOCABULARY), encoding="utf-8")
    (tmp_path / "es/clips").mkdir(parents=True)
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        lines = ["client_id\tpath\tsentence\tup_votes"]
        for i, sentence in enumerate(SENTENCES):
            sound = 0.1 * draw.standard_normal(5000 + 700 * i)
            soundfile.write(tmp_path / f"es/clips/{split}{i}.wav", sound, 16_000)
            lines.append(f"x\t{split}{i}.wav\t{sentence}\t2")
        (tmp_path / f"es/{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def config(release, **changes) -> CommonVoiceData:
    facts = {"kind": "common_voice", "root": f"{release}/es", "vocabulary": f"{release}/model/vocab.json"}
    return CommonVoiceData(**facts | changes)


def model_of(release, **changes):
    torch.manual_seed(0)
    settings = transformers.Wav2Vec2Config(**{k: v for k, v in (TINY | changes).items() if k != "architectures"})
    return transformers.Wav2Vec2ForCTC(settings).eval()


def batch_of(release, size: int = 3):
    dataset = open_dataset(config(release))
    return next(BatchStream(dataset=dataset, batch=size).epoch()), dataset


def test_clips_and_transcripts_become_batches(release):
    batch, dataset = batch_of(release, 3)
    assert len(dataset) == len(SENTENCES)
    # like lengths together: the longest three first
    assert batch["index"].tolist() == [5, 4, 3]
    assert batch["input_values"].shape == batch["attention_mask"].shape == (3, 5000 + 700 * 5)
    assert batch["attention_mask"].sum(1).tolist() == [8500, 7800, 7100]
    written = ["".join(dataset.vocabulary[i] for i in row if i >= 0) for row in batch["labels"].tolist()]
    assert written == ["abba", "ñ|ñ", "bab|ab|a"]
    real = batch["input_values"][1, :7800]
    assert float(real.mean()) == pytest.approx(0, abs=1e-4) and float(real.std()) == pytest.approx(1, abs=1e-3)


def test_other_rates_channels_and_formats_are_read(tmp_path):
    sound = 0.3 * np.sin(np.arange(8000) / 8)
    soundfile.write(tmp_path / "slow.wav", np.stack([sound, sound], 1), 8000)
    soundfile.write(tmp_path / "slow.mp3", sound, 8000)
    for name in ("slow.wav", "slow.mp3"):
        clip = read_clip(str(tmp_path / name), rate=16_000, name=name)
        assert clip.dtype == np.float32 and clip.ndim == 1 and len(clip) == pytest.approx(16_000, rel=0.2)


def test_clips_of_no_use_are_named_and_counted_together_before_any_is_read(release, caplog):
    (release / "es/clips/train0.wav").write_bytes(b"no audio")
    soundfile.write(release / "es/clips/train1.wav", np.zeros(0), 16_000)
    soundfile.write(release / "es/clips/train2.wav", np.zeros(16_000 * 20), 16_000)
    (release / "es/clips/train3.wav").unlink()
    soundfile.write(release / "es/clips/train4.wav", np.zeros(700), 16_000)
    faults = ("unreadable", "empty", "too long", "missing", "too short")
    with caplog.at_level(logging.WARNING):
        dataset = open_dataset(config(release, max_broken=5))
    assert dataset.left_out == {fault: (f"train{i}.wav",) for i, fault in enumerate(faults)}
    assert len(dataset) == 1 and dataset[0]["labels"] and "train: excluded clips: 1 missing (train3.wav)" in caplog.text
    order = ((3, "missing"), (0, "unreadable"), (1, "empty"), (4, "too short"), (2, "too long"))
    found = ", ".join(rf"1 {fault} \(train{i}.wav\)" for i, fault in order)
    with pytest.raises(
        DataError, match=rf"too many clips.*found {found}, expected at most 4 together\)\s+repair.*max_seconds"
    ):
        open_dataset(config(release, max_broken=4))
    (release / "es/clips/train5.wav").unlink()
    with pytest.raises(DataError, match=r"the data set is empty.*no usable clip in train.tsv; 2 missing"):
        open_dataset(config(release))


def test_a_clip_with_values_that_are_no_numbers_is_one_of_no_use(release):
    soundfile.write(release / "es/clips/train3.wav", np.full(16_000, np.nan), 16_000, subtype="FLOAT")
    dataset = open_dataset(config(release))
    assert dataset[3] is None and dataset.left_out == {"unreadable": ("train3.wav",)}


def test_a_header_that_guesses_a_length_does_not_leave_a_clip_out(release, monkeypatch):
    monkeypatch.setattr("acm_compiler.data.common_voice.promised_seconds", lambda path: 99.0)
    assert len(open_dataset(config(release))) == len(SENTENCES)


@pytest.fixture
def unlooked(monkeypatch):
    """Releases so large that no header is read when they are opened, but the first."""
    monkeypatch.setattr("acm_compiler.data.common_voice._LOOKED_AT", 1)


def test_a_clip_that_turns_out_to_be_broken_counts_nowhere(release, unlooked):
    (release / "es/clips/train3.wav").write_bytes(b"no audio")
    dataset = open_dataset(config(release))
    assert len(dataset) == len(SENTENCES)
    batches = list(BatchStream(dataset=dataset, batch=1).epoch())
    assert [int(batch["index"]) for batch in batches] == [5, 4, 2, 1, 0]
    (full,) = BatchStream(dataset=dataset, batch=6, drop_last=True).epoch()
    assert full["index"].tolist() == [5, 4, 2, 1, 0, 4]  # an example of use in its place
    assert dataset.left_out == {"unreadable": ("train3.wav",)}


def test_workers_count_broken_clips_together_and_remember_them(release, unlooked):
    for i in (1, 5):
        (release / f"es/clips/train{i}.wav").write_bytes(b"no audio")
    stream = BatchStream(dataset=open_dataset(config(release, max_broken=2)), batch=1, workers=2)
    for epoch in range(2):
        assert len(list(stream.epoch(epoch))) == len(SENTENCES) - 2
        assert stream.dataset.left_out == {"unreadable": ("train1.wav", "train5.wav")}
    strict = BatchStream(dataset=open_dataset(config(release, max_broken=1)), batch=1, workers=2)
    with pytest.raises(DataError, match="too many clips cannot be used"):
        list(strict.epoch())


def test_missing_and_broken_clips_have_one_limit(release, unlooked):
    (release / "es/clips/train1.wav").unlink()
    (release / "es/clips/train5.wav").write_bytes(b"no audio")
    stream = BatchStream(dataset=open_dataset(config(release, max_broken=1)), batch=2)
    with pytest.raises(DataError, match=r"1 missing \(train1.wav\), 1 unreadable \(train5.wav\), expected at most 1"):
        list(stream.epoch())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_release_of_which_no_clip_can_be_read_is_told_in_one_message(release, unlooked, workers):
    for i in range(1, len(SENTENCES)):
        (release / f"es/clips/train{i}.wav").write_bytes(b"no audio")
    dataset = open_dataset(config(release))
    (release / "es/clips/train0.wav").write_bytes(b"no audio")
    with pytest.raises(DataError, match=r"the data set is empty.*6 unreadable \(train0.wav, .*, …\)"):
        list(BatchStream(dataset=dataset, batch=2, workers=workers).epoch())


def test_an_evaluation_names_the_clips_that_it_left_out(release, unlooked):
    (release / "speech.yaml").write_text(RECIPE.format(release).partition("schedule:")[0])
    runner, out = CliRunner(), release / "out"
    made = runner.invoke(app, ["rewrite", "--recipe", f"{release}/speech.yaml", "--out", str(out)])
    assert made.exit_code == 0, made.output
    whole = json.loads((out / "eval.json").read_text())
    assert whole["n"] == 6 and whole["left_out"] == {}
    with (release / "es/test.tsv").open("a", encoding="utf-8") as file:
        file.write("x\tgone.wav\tab\t2\nx\tbroken.wav\tab ab ab ab\t2\n")
    (release / "es/clips/broken.wav").write_bytes(b"no audio")
    again = runner.invoke(app, ["eval", str(out), "--json"])
    assert again.exit_code == 0, again.output
    found = json.loads(again.stdout)
    assert found["left_out"] == {"missing": ["gone.wav"], "unreadable": ["broken.wav"]} and found["n"] == 6
    for key in ("metric", "reached", "pooled", "macs_mean"):
        assert [b[key] for b in found["budgets"]] == [b[key] for b in whole["budgets"]], key
    shown = runner.invoke(app, ["eval", str(out)])
    assert "counted nowhere: 1 missing (gone.wav), 1 unreadable (broken.wav)" in shown.output


def test_silence_is_a_clip_like_others(release):
    soundfile.write(release / "es/clips/train0.wav", np.zeros(6000), 16_000)
    dataset = open_dataset(config(release))
    assert float(np.abs(dataset[0]["input_values"]).max()) == 0.0


def test_transcripts_without_a_letter_are_left_out(release, caplog):
    with (release / "es/train.tsv").open("a", encoding="utf-8") as file:
        file.write("x\ttrain0.wav\t¡¿…?!\t2\n")
    assert len(open_dataset(config(release))) == len(SENTENCES)
    assert "train: excluded clips: 1 without a letter (train0.wav)" in caplog.text
    assert len(open_dataset(config(release, max_broken=0))) == len(SENTENCES)


def test_a_vocabulary_that_lacks_letters_is_refused(release):
    letters = {"<pad>": 0, "|": 1, "a": 2, "b": 3}
    (release / "model/vocab.json").write_text(json.dumps(letters))
    with pytest.raises(DataError, match=r"lacks letters.*3 of 26 letters unknown: ñ"):
        open_dataset(config(release))
    assert len(open_dataset(config(release, max_unknown=0.2))) == 5  # "ñ ñ" has nothing left to say


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "tran"}, r"tran.tsv: the table of the split is missing \(found tables of train"),
        ({"root": "/nowhere"}, "the table of the split is missing"),
        ({"vocabulary": "/nowhere/vocab.json"}, "the vocabulary cannot be read"),
    ],
)
def test_what_is_not_there_is_named(changes, message, release):
    with pytest.raises(DataError, match=message):
        open_dataset(config(release, **changes))


def test_loss_and_frames_are_those_of_the_model(release):
    batch, dataset = batch_of(release)
    model = model_of(release)
    task = open_task(CtcTask(kind="ctc"), dataset, model)
    output = model(**task.inputs(batch), labels=batch["labels"])
    torch.testing.assert_close(task.loss(output, batch), output.loss)
    frames = model._get_feature_vector_attention_mask(output.logits.shape[1], batch["attention_mask"])
    assert torch.equal(task.mask(batch), frames.bool()) and not frames.bool().all()


def test_word_errors_are_counted_and_divided_by_words_spoken():
    task = Ctc(vocabulary=["", "|", "a", "b", "ñ", ""], blank=0, frames=lambda samples: samples, masked=True)
    # what is heard, frame by frame: "ab a", and padding after it that would add letters
    heard = torch.tensor([[2, 2, 0, 3, 1, 2, 4, 4], [0, 0, 0, 0, 0, 0, 0, 0]])
    logits = torch.nn.functional.one_hot(heard, 6).float()
    labels = torch.tensor([[2, 3, 1, 3, 1, 2, -100], [2, 2, 1, 3, -100, -100, -100]])
    mask = torch.tensor([[1] * 6 + [0] * 2, [1] * 8])
    batch = {"input_values": torch.zeros(2, 8), "attention_mask": mask, "labels": labels}
    assert task.decode(logits, batch) == ["ab a", ""]
    # "ab b a" heard as "ab a": one missing; "aa b" heard as nothing: two missing
    assert task.score(logits, batch).tolist() == [1.0, 2.0] and task.units(batch).tolist() == [3.0, 2.0]
    assert task.value(task.score(logits, batch), task.units(batch)) == pytest.approx(3 / 5)
    assert task.units(as_batch(batch)).tolist() == [3.0, 2.0]  # as acm.evaluate gives it
    letters = replace(task, unit="character")
    assert (task.metric, letters.metric) == ("word error rate", "character error rate")
    # "ab b a" heard as "ab a": two characters missing of six; "aa b" heard as nothing: four of four
    assert letters.score(logits, batch).tolist() == [2.0, 4.0] and letters.units(batch).tolist() == [6.0, 4.0]


def test_other_models_and_vocabularies_are_refused(release):
    batch, dataset = batch_of(release)
    with pytest.raises(UsageError, match="no facts on how this model makes frames"):
        open_task(CtcTask(kind="ctc"), dataset, torch.nn.Linear(2, 2))
    model = model_of(release, vocab_size=4)
    task = open_task(CtcTask(kind="ctc"), dataset, model)
    with pytest.raises(UsageError, match="different sizes"):
        task.loss(model(**task.inputs(batch)), batch)


def test_the_mask_of_a_call_becomes_frames_without_a_task(release):
    batch, dataset = batch_of(release)
    model = model_of(release)
    task = open_task(CtcTask(kind="ctc"), dataset, model)
    inputs = task.inputs(batch)
    plan = acm.plan(model, {"input_values": torch.zeros(2, 8000)}, sites="mlp", learners=2)
    converted = acm.rewrite(model, plan)
    with acm.record(converted) as usage:
        converted(**inputs)
    real = task.mask(batch)
    assert not real.all() and torch.equal(usage.load().isnan(), ~real)
    said: list[str] = []
    acm.calibrate(converted, [inputs] * 6, tokens=10_000, progress=said.append)
    assert any(f"{5 * int(real.sum()):,} tokens" in line for line in said)


def test_only_masks_of_audio_become_frames(release):
    (batch, _), model = batch_of(release), model_of(release)
    sound, mask = batch["input_values"], batch["attention_mask"].bool()
    for heard, other in ((None, model), (sound.long(), model), (sound[:, 1:], model), (sound, torch.nn.Linear(2, 2))):
        assert torch.equal(frame_mask(other, heard, mask), mask)
    assert frame_mask(model, sound, mask).shape[1] < mask.shape[1]


def test_padding_changes_no_real_frame_and_counts_nowhere(release):
    batch, dataset = batch_of(release)
    model = model_of(release)
    task = open_task(CtcTask(kind="ctc"), dataset, model)
    converted = acm.rewrite(model, acm.plan(model, {"input_values": torch.zeros(2, 8000)}, sites="mlp", init="random"))
    for site in acm.sites(converted).values():
        torch.nn.init.normal_(site.gate.outer.weight, std=5.0)
    acm.set_k(converted, None)
    mask = task.mask(batch)
    with torch.no_grad(), acm.batch(converted, mask=mask), acm.record(converted) as usage:
        together = converted(**task.inputs(batch)).logits
    for row, samples in enumerate(batch["attention_mask"].sum(1).tolist()):
        alone = {name: value[row : row + 1, :samples] for name, value in task.inputs(batch).items()}
        with torch.no_grad(), acm.record(converted) as single:
            logits = converted(**alone).logits[0]
        torch.testing.assert_close(together[row, : len(logits)], logits, rtol=1e-4, atol=1e-5)
        for name, k in usage.k.items():
            assert torch.equal(k[row, : len(logits)], single.k[name][0]) and (k[row, len(logits) :] == -1).all()
        assert float(usage.shares[row]) == pytest.approx(float(single.shares[0]), abs=1e-6)


def test_a_recipe_converts_a_wav2vec2_and_leaves_what_is_frozen(release):
    (release / "speech.yaml").write_text(RECIPE.format(release))
    runner, out = CliRunner(), release / "out"
    result = runner.invoke(app, ["rewrite", "--recipe", f"{release}/speech.yaml", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "eval.json").read_text())
    assert found["metric"]["name"] == "word error rate" and found["metric"]["lower_is_better"] and found["masked"]
    assert [round(b["asked"], 2) for b in found["budgets"]] == [0.5, 1.0]
    dense, _ = convert(load_recipe(release / "speech.yaml"), lambda text: None)
    loaded = acm.load(out)
    for name, value in dense.wav2vec2.feature_extractor.state_dict().items():
        assert torch.equal(value, loaded.wav2vec2.feature_extractor.state_dict()[name])
    assert not torch.equal(dense.lm_head.weight, loaded.lm_head.weight)
    again = runner.invoke(app, ["eval", str(out), "--budgets", "0.5", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["budgets"][0]["metric"] == pytest.approx(found["budgets"][0]["metric"])


def test_freezing_nothing_is_refused_with_the_nearest_name(release):
    text = RECIPE.format(release).replace("wav2vec2.feature_extractor", "wav2vec2.feature_extracter")
    (release / "speech.yaml").write_text(text)
    with pytest.raises(
        SelectionError, match=r"speech.yaml:4:\d+: no parameter matches.*did you mean 'wav2vec2.feature_e"
    ):
        convert(load_recipe(release / "speech.yaml"), lambda text: None)


@pytest.mark.parametrize("name", ["xlsr300m_calibrate", "xlsr300m_common_voice"])
def test_the_recipes_of_xlsr_say_what_they_read(name, tmp_path, monkeypatch):
    for variable in ("XLSR", "COMMON_VOICE"):
        monkeypatch.delenv(variable, raising=False)
    rewrite = ["rewrite", "--recipe", name, "--out", str(tmp_path / "out")]
    unset = CliRunner().invoke(app, rewrite)
    assert unset.exit_code == 2 and unset.stderr.splitlines()[-1].endswith("export XLSR=… COMMON_VOICE=…")
    assert f"XLSR=FOLDER COMMON_VOICE=FOLDER acmc rewrite --recipe {name}" in shipped_recipe(name).read_text()
    monkeypatch.setenv("XLSR", str(tmp_path))
    monkeypatch.setenv("COMMON_VOICE", str(tmp_path))
    empty = CliRunner().invoke(app, rewrite)
    assert empty.exit_code == 1 and "vocab.json that lies in the folder of the model" in empty.stderr
    (tmp_path / "vocab.json").write_text(json.dumps(VOCABULARY), encoding="utf-8")
    no_release = CliRunner().invoke(app, rewrite)
    assert no_release.exit_code == 1 and "train.tsv: the table of the split is missing" in no_release.stderr


@pytest.mark.parametrize("name", ["xlsr300m_calibrate", "xlsr300m_common_voice"])
def test_xlsr_costs_what_the_paper_says(name, tmp_path, monkeypatch):
    large = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "conv_dim": [512] * 7,
        "conv_stride": [5, 2, 2, 2, 2, 2, 2],
        "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
        "num_feat_extract_layers": 7,
        "num_conv_pos_embeddings": 128,
        "num_conv_pos_embedding_groups": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(TINY | large))
    monkeypatch.setenv("XLSR", str(tmp_path))
    monkeypatch.setenv("COMMON_VOICE", str(tmp_path))
    budgets = [word for b in (0.25, 0.4, 0.6, 0.75) for word in ("--budget", str(b))]
    result = CliRunner().invoke(app, ["plan", name, *budgets])
    assert result.exit_code == 0, result.output
    shares = next(line for line in result.output.splitlines() if line.startswith("share of the dense model"))
    assert shares.split()[-5:] == ["48%", "61%", "69%", "79%", "87%"]
