"""The HTTP app in process: what is answered, and what is refused in words."""

import base64
import io
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import acm_compiler as acm
from acm_compiler.serving.batcher import Limits
from acm_compiler.sources.inputs import call_model
from tests.helpers import served as small


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    small.save_texts(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    small.save_images(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(texts):
    return small.opened(texts, "embed")


@pytest.fixture(scope="module")
def classifier(images):
    return small.opened(images, "classify")


@pytest.fixture(scope="module")
def embed(encoder):
    with TestClient(small.app_of(encoder)[0]) as client:
        yield client


@pytest.fixture(scope="module")
def classify(classifier):
    with TestClient(small.app_of(classifier)[0]) as client:
        yield client


def vectors(client, **asked):
    done = client.post("/v1/embeddings", json=asked)
    assert done.status_code == 200, done.text
    return torch.tensor([row["embedding"] for row in done.json()["data"]])


def refusal(client, status, path="/v1/embeddings", **request):
    done = client.post(path, **request)
    assert done.status_code == status, done.text
    return done.json()["error"]["message"]


def test_vectors_are_those_of_the_model_at_the_budget(embed, encoder):
    ids = torch.tensor([[2, 3, 4], [5, 6, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    for budget in (0.3, 1.0):
        found = vectors(embed, input=["a small text", "about nothing"], budget=budget)
        acm.set_budget(encoder.model, budget)
        with torch.no_grad():
            output = call_model(encoder.model, {"input_ids": ids, "attention_mask": mask})
            torch.testing.assert_close(found, encoder.task.answer(output, mask.bool()))


def test_budgets_of_requests_change_the_answer(embed):
    low, high = (vectors(embed, input="a small text", budget=budget) for budget in (0.2, "100%"))
    assert (low - high).abs().max() > 1e-4


@pytest.mark.parametrize("given", [[2, 3, 4], [[2, 3, 4]], ["a small text"], "a small text"])
def test_texts_come_in_openais_four_forms(embed, given):
    torch.testing.assert_close(vectors(embed, input=given), vectors(embed, input="a small text"))


def test_a_short_text_is_read_at_once_and_what_takes_long_in_a_thread(embed, encoder, monkeypatch):
    read, threads = encoder.reader.examples, []

    def noted(values):
        threads.append(threading.get_ident())
        return read(values)

    monkeypatch.setattr(encoder.reader, "examples", noted)
    for given in ("a small text", "a small text", ["a small text"]):
        vectors(embed, input=given)
    assert threads[0] == threads[1] != threads[2]


def test_the_answer_has_openais_form(embed):
    found = embed.post("/v1/embeddings", json={"input": ["a", "a small"], "model": "any", "user": "x"}).json()
    assert found["object"] == "list" and [row["index"] for row in found["data"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert embed.get("/v1/models").json()["data"][0]["id"] == found["model"]


def test_vectors_in_base64_are_little_endian_floats(embed):
    found = embed.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"}).json()
    vector = np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4")
    torch.testing.assert_close(torch.tensor(vector)[None], vectors(embed, input="a"))


REFUSED = [
    (400, {"content": b'{"input": "a'}, "not JSON, at character 10: Unterminated string"),
    (400, {"content": b"[" * 50_000}, ""),
    (422, {"json": [1, 2]}, "the body must be a mapping, got a list of 2"),
    (422, {"json": {}}, "input must be given, got nothing"),
    (400, {"json": {"input": []}}, "an empty list"),
    (400, {"json": {"input": [[]]}}, "no tokens"),
    (400, {"json": {"input": ""}}, "no tokens"),
    (400, {"json": {"input": {"a": 1}}}, "dict"),
    (400, {"json": {"input": ["a", 3]}}, "input: the input cannot be read (found a list of several kinds of values"),
    (400, {"json": {"input": [True]}}, "bool"),
    (400, {"json": {"input": [99]}}, "expected 0 to 49"),
    (400, {"json": {"input": [-1]}}, "token -1"),
    (400, {"json": {"input": [10**30]}}, "expected 0 to 49"),
    (400, {"json": {"input": "a " * 13}}, "too long"),
    (400, {"json": {"input": [[2] * 13]}}, "found 13 tokens"),
    (400, {"content": b'{"input": "\\ud800"}'}, "characters that are not text"),
    (413, {"json": {"input": ["a"] * 9}}, "at most 8"),
    (413, {"content": b" " * 100_001}, "too large: at most 100 kB"),
    (400, {"json": {"input": "a", "budget": 0.1}}, "0.200 to 1"),
    (400, {"json": {"input": [[5, 1.5]]}}, "input[0][1]: the input cannot be read (found float in place of a token id"),
    (400, {"json": {"input": "a", "budget": 1.5}}, "0.200 to 1"),
    (400, {"json": {"input": "a", "budget": "11"}}, "without a budget the server chooses"),
    (400, {"json": {"input": "a", "budget": "much"}}, "cannot be read"),
    (400, {"content": b'{"input": "a", "budget": NaN}'}, "found nan"),
    (
        422,
        {"json": {"input": "a", "budget": [0.4]}},
        "budget: must be a share such as 0.4, or a text such as '60%', got",
    ),
    (422, {"json": {"input": "a", "budget": True}}, "got True"),
    (422, {"json": {"input": "a", "model": 3}}, "model must be text, got 3"),
    (422, {"json": {"input": "a", "dimensions": 1e30}}, "dimensions must be a smaller whole number, got 1e+30"),
    (400, {"json": {"input": 3.5}}, "input: the input cannot be read (found float"),
    (400, {"json": {"input": None}}, "input: the input cannot be read (found NoneType"),
    (400, {"json": {"input": "a", "encoding_format": "hex"}}, "'float' or 'base64'"),
    (400, {"json": {"input": "a", "dimensions": 8}}, "dimensions"),
]


@pytest.mark.parametrize("status, request_, words", REFUSED)
def test_what_is_wrong_with_a_request_is_said(embed, status, request_, words):
    given = {"headers": {"content-type": "application/json"}} if "content" in request_ else {}
    assert words in refusal(embed, status, **request_, **given)
    assert embed.get("/health").json()["status"] == "ok"


def test_a_body_that_is_not_said_to_be_json_is_told_the_header(embed):
    assert "content-type: application/json" in refusal(embed, 422, content=b'{"input": "a"}')


def test_more_inputs_than_may_ever_wait_are_too_many_and_not_too_early(encoder):
    app = small.app_of(encoder, limits=Limits(batch=2, wait_s=0.0, waiting=3))[0]
    with TestClient(app) as client:
        assert "4 inputs in one request: at most 3 (--max-waiting)" in refusal(client, 413, json={"input": ["a"] * 4})


def test_a_body_that_does_not_say_its_size_is_bounded_too(embed):
    parts = (b" " * 10_000 for _ in range(11))
    assert "too large" in refusal(embed, 413, content=parts, headers={"content-type": "application/json"})


def test_other_paths_and_methods_are_refused_in_words(embed):
    for done, status in ((embed.get("/nothing"), 404), (embed.get("/v1/embeddings"), 405), (embed.put("/health"), 405)):
        assert done.status_code == status and "there are POST /v1/embeddings, GET" in done.json()["error"]["message"]


def image(value=0.1):
    return np.full((3, 16, 16), value).tolist()


def test_classes_are_those_of_the_model(classify, classifier):
    torch.manual_seed(1)
    given = torch.randn(2, 3, 16, 16)
    found = classify.post("/classify", json={"images": given.tolist(), "budget": 0.5, "top": 2}).json()["predictions"]
    acm.set_budget(classifier.model, 0.5)
    with torch.no_grad():
        wanted = classifier.model(given).logits.softmax(-1)
    for row, prediction in zip(wanted, found, strict=True):
        assert prediction["class"] == int(row.argmax()) and len(prediction["classes"]) == 2
        assert prediction["probability"] == pytest.approx(float(row.max()), abs=1e-5)
        assert prediction["label"] == classifier.model.config.id2label[prediction["class"]]


@pytest.mark.parametrize(
    "given, words",
    [
        (None, "NoneType"),
        ([], "an empty list"),
        ([[1, 2], [3]], "shape [2]"),
        ([[[1, 2], [3]]], "other values than numbers"),
        ([[["a"]]], "other values than numbers"),
        ([[[True]]], "other values than numbers"),
        ([image()[0]], "expected shape [3, 16, 16]"),
        ([image(), 3], "images[1]"),
        ([image(1e300)], "finite"),
    ],
)
def test_what_is_no_image_is_refused(classify, given, words):
    assert words in refusal(classify, 400, "/classify", json={"images": given})


@pytest.mark.parametrize(
    "document, words",
    [
        ({}, "images: this model takes"),
        ({"input": "a"}, "images: this model takes"),
        ({"images": [image()], "input": "a"}, "and no other"),
        ({"images": [image()], "budjet": 0.4}, "budjet must be left out: there is no such field"),
        ({"images": [image()], "top": 0}, "top must be at least 1, got 0"),
    ],
)
def test_fields_that_this_model_does_not_read_are_refused(classify, document, words):
    assert words in refusal(classify, 422, "/classify", json=document)


def test_a_number_that_is_none_is_refused(classify):
    text = str(image()).replace("0.1", "NaN", 1)
    given = {"content": f'{{"images": [{text}]}}', "headers": {"content-type": "application/json"}}
    assert "finite" in refusal(classify, 400, "/classify", **given)


def test_files_are_refused_where_nothing_says_how_they_are_read(classify):
    assert "send numbers" in refusal(classify, 400, "/classify/files", files={"files": b"x"})
    assert "files" in refusal(classify, 422, "/classify/files", data={"top": "3"})
    assert "files.0 must be a file, got 'x'" in refusal(classify, 422, "/classify/files", data={"files": "x"})


def test_files_are_read_as_the_recipe_reads_them(classifier, images):
    from PIL import Image

    data = "{kind: imagefolder, root: /nowhere, image_size: 16}"
    reading = small.opened(images, "classify", data)
    picture = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 10, 30)).save(picture, "PNG")
    with TestClient(small.app_of(reading)[0]) as client:
        files = [("files", ("a.png", picture.getvalue())), ("files", ("b.png", picture.getvalue()))]
        done = client.post("/classify/files", files=files, data={"top": "1", "budget": "0.4"})
        assert done.status_code == 200 and len(done.json()["predictions"]) == 2, done.text
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        pixels = ((torch.tensor([200.0, 10, 30]) / 255 - mean) / std)[:, None, None].expand(3, 16, 16)
        same = client.post("/classify", json={"images": [pixels.tolist()], "budget": 0.4, "top": 1}).json()
        assert same["predictions"][0]["probability"] == pytest.approx(done.json()["predictions"][0]["probability"])
        words = refusal(client, 400, "/classify/files", files={"files": ("ä.png", b"no image")})
        assert "the image cannot be read (found no format that Pillow knows)" in words


def test_metrics_are_in_the_format_of_prometheus(encoder):
    from prometheus_client.parser import text_string_to_metric_families

    with TestClient(small.app_of(encoder)[0]) as client:
        vectors(client, input=["a", "a small text", "else"], budget=0.6)
        refusal(client, 400, json={"input": []})
        text = client.get("/metrics").text
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found[("acm_requests_total", ("path", "/v1/embeddings"), ("status", "200"))] == 1
    assert found[("acm_requests_total", ("path", "/v1/embeddings"), ("status", "400"))] == 1
    assert found[("acm_latency_seconds_count",)] == 3 and found[("acm_batch_size_sum",)] == 3
    assert found[("acm_budget",)] == 1 and 0 <= found[("acm_share",)] <= 1 and found[("acm_waiting",)] == 0
    means = [value for name, value in found.items() if name[0] == "acm_mean_k"]
    assert len(means) == len(acm.sites(encoder.model)) and all(0 <= mean <= 4 for mean in means)


def test_a_server_that_stops_refuses_with_503(encoder):
    app, batcher, _ = small.app_of(encoder)
    with TestClient(app) as client:
        batcher.refuse()
        assert client.get("/health").status_code == 503
        assert "stopping" in refusal(client, 503, json={"input": "a"})


def test_too_many_waiting_are_refused_with_503(encoder):
    go_on = threading.Event()

    def run(examples, own, budget):
        go_on.wait(60)
        return type(encoder).run(encoder, examples, own, budget)

    held = small.copy.copy(encoder)
    held.run = run
    app, batcher, _ = small.app_of(held, limits=Limits(batch=1, wait_s=0.0, waiting=2))
    with TestClient(app) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/v1/embeddings", json={"input": ["a", "a"]})
        while batcher.waiting != 1:  # the other one is at the model
            time.sleep(0.01)
        done = client.post("/v1/embeddings", json={"input": ["a", "a"]})
        go_on.set()
        assert done.status_code == 503 and done.headers["retry-after"] == "1"
        assert first.result().status_code == 200


def test_a_model_that_fails_is_a_500_in_words_and_the_server_lives(encoder):
    def run(examples, own, budget):
        if len(examples[0]["input_ids"]) == 2:
            raise RuntimeError("broken")
        return type(encoder).run(encoder, examples, own, budget)

    failing = small.copy.copy(encoder)
    failing.run = run
    with TestClient(small.app_of(failing)[0]) as client:
        assert "RuntimeError: broken" in refusal(client, 500, json={"input": "a small"})
        vectors(client, input="a")


def test_a_worker_that_dies_is_a_500_in_words_and_another_goes_on(encoder):
    def run(examples, own, budget):
        if len(examples[0]["input_ids"]) == 2:
            raise SystemExit("gone")
        return type(encoder).run(encoder, examples, own, budget)

    dying = small.copy.copy(encoder)
    dying.run = run
    with TestClient(small.app_of(dying)[0]) as client:
        assert "died" in refusal(client, 500, json={"input": "a small"})
        vectors(client, input="a")
        assert "acm_worker_deaths_total 1.0" in client.get("/metrics").text


def test_an_output_that_is_not_finite_is_refused(encoder):
    broken = small.copy.copy(encoder)
    broken.run = lambda examples, own, budget: [torch.tensor([math.nan]) for _ in examples]
    with TestClient(small.app_of(broken)[0]) as client:
        assert "not finite" in refusal(client, 422, json={"input": "a"})
