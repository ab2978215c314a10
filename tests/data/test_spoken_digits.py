"""Spoken digits: the synthesiser, what is made of its words, and what can be missing."""

import shutil

import numpy as np
import pytest

from acm_compiler.data import BatchStream, open_dataset
from acm_compiler.data.spoken_digits import PROGRAM, RATE, VOCABULARY, WORDS, speak_words, utterance, voices
from acm_compiler.errors import DataError, PackageMissing
from acm_compiler.recipe.datasets import SpokenDigitsData

pytest.importorskip("soundfile")
spoken = pytest.mark.skipif(
    shutil.which(PROGRAM) is None, reason="espeak-ng is not installed (apt-get install espeak-ng)"
)


@spoken
def test_every_take_of_every_voice_is_its_own_and_none_is_in_both_splits():
    train, held_out = voices("train"), voices("eval")
    said = [word.tobytes() for bank in (train, held_out) for voice in bank.takes for take in voice for word in take]
    assert len(set(said)) == len(said) == len(WORDS) * (2 * len(train.names) + len(held_out.names))
    lengths = [len(word) / RATE for voice in train.takes for take in voice for word in take]
    assert min(lengths) > 0.1 and max(lengths) < 1.5


@spoken
def test_an_utterance_is_a_function_of_split_seed_and_index():
    one, again = utterance("train", 7, seed=3), utterance("train", 7, seed=3)
    assert np.array_equal(one.samples, again.samples) and one.words == again.words
    others = [utterance("train", 8, seed=3), utterance("train", 7, seed=4), utterance("eval", 7, seed=3)]
    assert not any(np.array_equal(one.samples, other.samples) for other in others)


@spoken
def test_words_are_loud_pauses_are_only_noise_and_both_ends_are_pauses():
    for index in range(12):
        made = utterance("eval", index)
        assert made.samples.dtype == np.float32 and len(made.samples) == len(made.speech)
        assert not made.speech[: RATE // 10].any() and not made.speech[-RATE // 10 :].any()
        runs = int((np.diff(made.speech.astype(int)) == 1).sum())
        assert runs == len(made.words) and 1 <= runs <= 3
        power = [float(np.mean(made.samples[part] ** 2)) for part in (made.speech, ~made.speech)]
        assert power[0] > 10 * power[1] > 0
        text = "".join(VOCABULARY[label] for label in made.labels)
        assert text == "".join(f"|{WORDS[word]}" for word in made.words)


@spoken
def test_a_batch_is_padded_and_says_where_speech_is():
    dataset = open_dataset(SpokenDigitsData(kind="spoken_digits", split="eval", count=40))
    batch = next(BatchStream(dataset=dataset, batch=8).epoch())
    assert batch["input_values"].shape == batch["attention_mask"].shape == batch["foreground"].shape
    assert not batch["foreground"][~batch["attention_mask"].bool()].any()
    assert batch["source"].max() < len(voices("eval").names)
    # like lengths together: of five batches, the first has the most words
    assert all(row.count(VOCABULARY.index("|")) == 3 for row in batch["labels"].tolist())
    with pytest.raises(IndexError):
        dataset[40]


@spoken
def test_a_voice_that_is_not_there_is_named():
    with pytest.raises(DataError, match="voice nowhere"):
        speak_words(["one"], voice="nowhere", speed=150, pitch=50, rate=RATE)


def test_without_the_synthesiser_the_system_s_package_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    voices.cache_clear()
    for ask in (
        lambda: speak_words(["one"], voice="en-us", speed=150, pitch=50, rate=RATE),
        lambda: open_dataset(SpokenDigitsData(kind="spoken_digits", split="eval")),
    ):
        with pytest.raises(PackageMissing, match="apt-get install espeak-ng"):
            ask()
