"""Clips of audio on their way into a model: over HTTP, from numbers and from files."""

import io

import numpy as np
import pytest
import torch

import acm_compiler as acm
from tests.helpers import served as small

pytest.importorskip("soundfile")
TestClient = pytest.importorskip("fastapi.testclient").TestClient
DATA = "{kind: spoken_digits, split: eval, count: 1}"  # which says the rate of files: 8000 samples per second


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    """A saved classifier of clips as a server opens it, with data that say the rate of files."""
    torch.manual_seed(0)
    small.save_audio(folder := tmp_path_factory.mktemp("audio"))
    return small.opened(folder, "classify", DATA), folder


@pytest.fixture(scope="module")
def client(audio):
    """A client of the app over it."""
    with TestClient(small.app_of(audio[0])[0]) as client:
        yield client


def refusal(client, path="/classify", **request):
    """The words of a refusal with status 400."""
    done = client.post(path, **request)
    assert done.status_code == 400, done.text
    return done.json()["error"]["message"]


def test_clips_of_any_length_get_the_classes_that_each_gets_alone(audio, client):
    clips = [torch.randn(samples) for samples in (400, 25, 403, 400)]
    document = {"audio": [clip.tolist() for clip in clips], "budget": 0.5, "top": 3}
    found = client.post("/classify", json=document).json()["predictions"]
    model = audio[0].model
    acm.set_budget(model, 0.5)
    with torch.no_grad():
        wanted = [model(clip[None]).logits[0].softmax(-1) for clip in clips]
    for row, prediction in zip(wanted, found, strict=True):
        assert prediction["class"] == int(row.argmax())
        assert [c["probability"] for c in prediction["classes"]] == pytest.approx(
            row.sort().values.tolist()[::-1], abs=1e-5
        )


def test_a_clip_has_as_many_cells_as_the_model_makes_frames(audio):
    reader, model = audio[0].reader, audio[0].model
    for samples in (20, 29, 30, 400, 411):
        example = {"input_values": torch.randn(samples)}
        assert reader.cells(example) == int(model._get_feat_extract_output_lengths(samples))
    assert [reader.cells(reader.sample(cells)) for cells in (1, 8)] == [1, 8]


@pytest.mark.parametrize(
    "given, words",
    [
        ([], "an empty list"),
        (3, "found int"),
        ([3], "audio[0]"),
        ([[0.1] * 50, [0.1] * 19], "audio[1]: the clip is too short (found 19 samples, expected 20 at least)"),
        ([[[0.1] * 50]], "other values than a list of numbers"),
        ([["a"] * 50], "other values than a list of numbers"),
        ([[1e300] * 50], "finite"),
    ],
)
def test_what_is_no_clip_is_refused(client, given, words):
    assert words in refusal(client, json={"audio": given})


def test_fields_of_other_models_are_refused(client):
    done = client.post("/classify", json={"images": [[0.1] * 50]})
    assert done.status_code == 422 and "audio: this model takes a list of clips" in done.json()["error"]["message"]


def test_files_are_resampled_and_standardised(client):
    import soundfile

    samples = np.sin(np.arange(800) / 20).astype(np.float32) * 0.2
    written = io.BytesIO()
    soundfile.write(written, samples, 8000, format="WAV", subtype="FLOAT")
    done = client.post(
        "/classify/files", files={"files": ("a.wav", written.getvalue())}, data={"top": "1", "budget": "0.5"}
    )
    assert done.status_code == 200, done.text
    clip = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    same = client.post("/classify", json={"audio": [clip.tolist()], "budget": 0.5, "top": 1}).json()
    assert done.json()["predictions"][0]["probability"] == pytest.approx(
        same["predictions"][0]["probability"], abs=1e-5
    )
    words = refusal(client, "/classify/files", files={"files": ("a.wav", b"no sound")})
    assert words.startswith("a.wav: the clip is unreadable (found ") and "object at" not in words


def test_files_are_refused_where_no_rate_is_known(audio):
    with TestClient(small.app_of(small.opened(audio[1], "classify"))[0]) as client:
        assert "send numbers as `audio`" in refusal(client, "/classify/files", files={"files": b"x"})
