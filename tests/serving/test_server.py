"""A server's start: what is measured and tried before the first request."""

import copy
import sys

import pytest
import torch

from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.runs.given import Given
from acm_compiler.serving import server
from acm_compiler.serving.batcher import Limits
from acm_compiler.serving.controller import Controller
from acm_compiler.serving.open_served import ModelOptions, open_served
from acm_compiler.serving.pace import Line, Pace
from acm_compiler.serving.server import drop_wrong_names, is_padding_idle, warm_up
from acm_compiler.tasks.embed import Embed
from tests.helpers import served as small


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    small.save_texts(folder)
    return folder


class OfAllTokens(Embed):
    """Vectors that padding has a part in."""

    def answer(self, output, mask=None):
        return super().answer(output, None)


def test_padding_is_skipped_where_answers_stay_the_same(texts):
    served = small.opened(texts, "embed")
    assert is_padding_idle(served, 0.3)
    served.task = OfAllTokens()
    assert not is_padding_idle(served, 0.3)


def test_a_start_measures_the_pace_and_says_it(texts):
    served, said = small.opened(texts, "embed"), []
    pace = warm_up(served, 0.2, 1.0, 8, said.append)
    assert all(pace.seconds(budget, cells) > 0 for budget in (0.2, 0.5, 1.0) for cells in (1, 100))
    assert served.skips_padding and "at budget 0.6" in said[-1]
    assert served.use.share is served.use.drift is None  # no request has run
    assert not any(sum(tokens) for tokens in served.use.tokens_by_k.values())
    assert conversion(served.model).budget in (0.2, 0.6, 1.0)


def test_a_dense_model_can_be_measured_too(texts):
    served = copy.copy(small.opened(texts, "embed"))
    served.found = served.use = None
    assert warm_up(served, 1.0, 1.0, 4, lambda text: None).seconds(1.0, 8) > 0
    assert not served.skips_padding


def test_classes_of_texts_have_the_names_that_the_data_give_them(texts):
    data = f"{{kind: texts, split: eval, tokenizer: {texts / 'tokenizer.json'}, classes: [prose, code]}}"
    assert small.opened(texts, "classify", data).classes == {0: "prose", 1: "code"}


def test_names_that_are_not_as_many_as_the_models_classes_are_left_out(tmp_path):
    small.save_images(tmp_path)
    served, said = small.opened(tmp_path, "classify"), []
    own = served.classes
    drop_wrong_names(served, 1.0, said.append)
    assert served.classes == own and len(own) > 1 and not said
    served.classes = {0: "of another data set"}
    drop_wrong_names(served, 1.0, said.append)
    assert served.classes == {} and said == [f"classes are numbers: 1 names for the model's {len(own)}"]


def test_connections_outlive_those_of_clients_and_threads_take_short_turns(texts, monkeypatch):
    served, seen, turn = small.opened(texts, "embed"), [], sys.getswitchinterval()

    def run(self, sockets):
        seen.append((self.config.timeout_keep_alive, sys.getswitchinterval()))

    monkeypatch.setattr(server._Server, "run", run)
    controller = Controller(Pace({1.0: Line(0.01, 0.001)}), low=1.0, high=1.0)
    options = server.ServerOptions(max_body=1_000, max_inputs=1, limits=Limits())
    with server.bind("127.0.0.1", 0) as at:
        server.serve(served, controller, options, at, lambda text: None)
    ((idle_s, turn_s),) = seen
    assert idle_s > 15  # aiohttp's clients keep a connection so long
    assert turn_s < 0.1 * turn
    assert sys.getswitchinterval() == turn


@pytest.mark.parametrize("to", ["int8", "int4"])
def test_learners_are_quantised_where_that_is_asked_for(texts, to):
    served = open_served(texts, Given.read("embed", None, None), ModelOptions(device="cpu", quantized=to))
    assert conversion(served.model).quantized == to
    (vector,) = served.run([served.reader.sample(5)], [None], 0.5)
    assert torch.isfinite(vector).all()
