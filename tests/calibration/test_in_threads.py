from contextvars import ContextVar
from threading import Barrier, get_ident

import pytest
import torch

import acm_compiler as acm
from acm_compiler.calibration import fit_all
from acm_compiler.calibration.in_threads import in_threads
from acm_compiler.passes.rewrite.conversion import sites

SEEN: ContextVar[str] = ContextVar("seen", default="nothing")


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


def test_results_keep_their_order_and_workers_share_the_threads(four_threads):
    together = Barrier(2, timeout=60)  # which one worker alone would wait at in vain

    def facts(item):
        together.wait()
        return item, torch.get_num_threads(), torch.is_grad_enabled(), SEEN.get(), get_ident()

    SEEN.set("by all")
    with torch.no_grad():
        found = list(in_threads(facts, range(6), workers=2))
    assert [facts[:-1] for facts in found] == [(item, 2, False, "by all") for item in range(6)]
    assert len({facts[-1] for facts in found} - {get_ident()}) == 2
    assert list(in_threads(lambda _: get_ident(), range(2), workers=1)) == [get_ident()] * 2


def test_an_item_is_taken_once_there_is_a_worker_for_it(four_threads):
    taken = []

    def items():
        for item in range(5):
            taken.append(item)
            yield item

    results = in_threads(lambda item: item, items(), workers=2)
    assert next(results) == 0 and taken == [0, 1]
    assert next(results) == 1 and taken == [0, 1, 2]
    results.close()
    assert taken == [0, 1, 2]


def test_an_error_comes_behind_the_results_before_it(four_threads):
    results = in_threads(lambda item: 1 // (2 - item), range(5), workers=2)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_sites_fitted_side_by_side_are_what_they_are_alone(four_threads, monkeypatch):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    batches = [torch.randn(8, 9, 16) for _ in range(8)]
    plan = acm.plan(model, batches[0], sites=["mlp", "attn"], learners=2)
    counts = []

    def learners(at_most):
        def counted(*arguments):
            counts.append(at_most)
            return at_most

        monkeypatch.setattr(fit_all, "_workers", counted)
        converted = acm.rewrite(model, plan)
        acm.calibrate(converted, batches, tokens=400, progress=lambda _: None)
        return {name: value for name, value in converted.state_dict().items() if "learners" in name or "gate" in name}

    alone, together = learners(1), learners(3)
    assert counts == [1, 3] and len(sites(acm.rewrite(model, plan))) == len(plan.sites) > 3
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-3, atol=1e-4)
