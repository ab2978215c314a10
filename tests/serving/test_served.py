"""The drift of MACs that the server notices, by a meter of made-up numbers."""

from types import SimpleNamespace

import pytest
import torch

from acm_compiler.serving.served import RecentUsage


class FakeMeter:
    """Counts what `run` is told: executed and full learner MACs."""

    def __init__(self):
        self.macs, self.k = (7, 9), {"mlp": torch.tensor([1, 2])}

    def reset(self):
        self.macs = (0, 0)

    def run(self, executed, full):
        self.macs = (self.macs[0] + executed, self.macs[1] + full)


@pytest.fixture
def served():
    meter = FakeMeter()
    return SimpleNamespace(meter=meter, usage=RecentUsage(meter))


def test_nothing_is_known_before_a_batch(served):
    assert served.usage.share is None and served.usage.drift is None
    served.usage.add(0.5)  # a batch that ran no learner's MACs
    assert served.usage.share is None and served.usage.drift is None
    assert served.usage.tokens_by_k == {"mlp": [1, 2]}


def test_a_share_is_that_of_the_last_batch_and_drift_weighs_batches_by_their_size(served):
    served.meter.run(50, 100)
    served.usage.add(0.5)
    assert served.usage.share == 0.5 and served.usage.drift == pytest.approx(0.0)
    served.meter.run(240, 300)
    served.usage.add(0.5)
    assert served.usage.share == pytest.approx(0.8)
    run, full = 0.999 * 50 + 240, 0.999 * 100 + 300
    assert served.usage.drift == pytest.approx(run / full - 0.5)


def test_a_batch_of_several_budgets_has_a_share_and_no_promise(served):
    served.meter.run(90, 100)
    served.usage.add(None)
    assert served.usage.share == 0.9 and served.usage.drift is None


def test_a_lasting_drift_is_told_once_until_a_new_table(served, caplog):
    told = []
    served.usage.on_drift = lambda: told.append(1)

    def batches(count):
        for _ in range(count):
            served.meter.run(90, 100)
            served.usage.add(0.5)

    batches(99)
    assert not told
    batches(50)
    assert told == [1] and len(caplog.records) == 1
    served.usage.restart()
    assert served.usage.drift is None and served.usage.share == 0.9
    batches(100)
    assert told == [1, 1]
