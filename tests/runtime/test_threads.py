"""Threads, asyncio tasks and the autograd engine's own threads that use one model at once."""

import asyncio
import contextvars
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.utils.checkpoint import checkpoint

import acm_compiler as acm
from acm_compiler.acm.context import batch_of
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import BudgetPoint, BudgetTable, conversion
from tests.helpers.build import planned_site, stack_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo
POINTS = (BudgetPoint(share=0.1, knob=1.0, k_lo=0), BudgetPoint(share=0.9, knob=-1.0, k_lo=0))
SAID = (
    {},
    {"budgets": [0.2, 1.0, 0.6]},
    {"mask": torch.arange(5) < torch.tensor([[5], [2], [3]])},
    {"budgets": [1.0, 0.3, 0.3], "mask": torch.arange(5) < torch.tensor([[1], [5], [4]])},
)


def make_model():
    made = stack_of(planned_site("a"), planned_site("b", k_min=1))
    conversion(made).table = BudgetTable(rule="logits", points=POINTS, examples=1)
    return made


@pytest.fixture
def model():
    return make_model()


@pytest.fixture(scope="module", params=["eager", "compiled"])
def ways(request):
    """A model, and the same as it is called."""
    torch._dynamo.reset()
    with inductor.patch(freezing=True):
        pass  # a setting of Inductor's that was once made on this thread is another object here than on all others
    model = make_model()
    return model, torch.compile(model, backend="acm", fullgraph=True) if request.param == "compiled" else model


def answer(model, called, x, said):
    if not said:
        return called(x)
    with acm.batch(model, **said):
        return called(x)


def answers_alone(model, called, inputs):
    return [[answer(model, called, x, said) for said in SAID] for x in inputs]


@pytest.mark.parametrize("calls", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_serve_one_model_each_with_budgets_and_masks_of_its_own(ways, calls):
    model, called = ways
    inputs = [torch.randn(3, 5, 8) for _ in range(8)]
    with torch.no_grad():
        expected = answers_alone(model, called, inputs)
    graphs, together = counters["stats"]["unique_graphs"], threading.Barrier(8)

    def serve(number):
        order = random.Random(number)
        together.wait()
        with torch.no_grad():
            draws = [order.randrange(len(SAID)) for _ in range(calls)]
            return [
                which
                for which in draws
                if not torch.equal(answer(model, called, inputs[number], SAID[which]), expected[number][which])
            ]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(serve, range(8))) == [[]] * 8
    assert counters["stats"]["unique_graphs"] == graphs


def test_tasks_of_one_thread_serve_one_model_each_with_budgets_and_masks_of_its_own(ways):
    model, called = ways
    inputs = [torch.randn(3, 5, 8) for _ in range(8)]
    with torch.no_grad():
        expected = answers_alone(model, called, inputs)

    async def serve(number):
        wrong = []
        for step in range(12):
            which = (number + step) % len(SAID)
            with acm.batch(model, **SAID[which]):
                await asyncio.sleep(0)
                y = called(inputs[number])
                await asyncio.sleep(0)
                elsewhere = await asyncio.to_thread(torch.no_grad()(called), inputs[number])
            wrong += [which] if not torch.equal(y, expected[number][which]) or not torch.equal(y, elsewhere) else []
            await asyncio.sleep(0)
            wrong += [] if torch.equal(called(inputs[number]), expected[number][0]) else ["none"]
        return wrong

    async def serve_all():
        return await asyncio.gather(*(serve(number) for number in range(8)))

    with torch.no_grad():
        assert asyncio.run(serve_all()) == [[]] * 8


def test_what_a_batch_says_ends_with_it_also_for_who_was_started_inside(model):
    with acm.batch(model, budgets=[1.0, 1.0, 1.0]):
        inherited = contextvars.copy_context()
        assert inherited.run(batch_of, conversion(model)).knob is not None
        with pytest.raises(UsageError, match="already open"), acm.batch(model):
            pass
    assert inherited.run(batch_of, conversion(model)) is None


def test_batches_of_two_models_do_not_meet(model):
    other, x = stack_of(planned_site("a")), torch.randn(3, 5, 8)
    conversion(other).table = conversion(model).table
    alone = answer(model, model, x, SAID[1]), answer(other, other, x, SAID[3])
    with acm.batch(model, **SAID[1]), acm.batch(other, **SAID[3]):
        assert torch.equal(model(x), alone[0]) and torch.equal(other(x), alone[1])


def test_another_models_batch_costs_a_compiled_model_one_graph_at_most(model):
    torch._dynamo.reset()
    counters.clear()
    compiled, x = torch.compile(model, backend="acm", fullgraph=True), torch.randn(3, 5, 8)
    others = [stack_of(planned_site("a")) for _ in range(3)]
    with torch.no_grad():
        compiled(x)
        for other in others:
            with acm.batch(other, mask=torch.ones(3, 5)):
                compiled(x)
    assert counters["stats"]["unique_graphs"] == 2


def test_a_record_holds_what_its_own_thread_ran(model):
    model.double()  # sums of other threads' calls would show
    together, inputs = threading.Barrier(4), [torch.randn(3, 5, 8).double() for _ in range(4)]

    def run(number):
        together.wait()
        for step in range(20):
            said = SAID[(number + step) % 4]
            with torch.no_grad(), acm.batch(model, **said), acm.record(model, macs=step % 2 == 0) as usage:
                model(inputs[number])
            yield said, usage

    def seen(number):
        return [(usage.k, usage.macs if usage.counted else None) for _, usage in run(number)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(seen, range(4)))
    together = threading.Barrier(1)
    for number, of_thread in enumerate(found):
        for (k, macs), (alone, alone_macs) in zip(of_thread, seen(number), strict=True):
            assert all(torch.equal(k[site], alone[site]) for site in "ab")
            assert (macs is None and alone_macs is None) or torch.equal(macs, alone_macs)


def test_relaxed_forwards_of_several_threads_have_no_loss_together(model):
    acm.relax(model.train(), 0.8)
    x = torch.randn(3, 5, 8)
    for _ in range(2):
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    model(x)
    with pytest.raises(UsageError, match="several threads"):
        acm.losses(model, 0.5)
    model(x)
    assert acm.losses(model, 0.5)  # what was refused is forgotten


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoints_recomputation_sees_the_batch(model, reentrant):
    x = torch.randn(3, 5, 8, requires_grad=True)
    with acm.batch(model, **SAID[3]):
        expected = torch.autograd.grad(model(x).square().sum(), x)[0]
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_recomputation_in_a_thread_of_the_engine_sees_the_batch(model):
    """More than 60 backward passes inside each other make the engine take another thread, as an accelerator does."""
    x, threads = torch.randn(3, 5, 8, requires_grad=True), set()

    def nest(depth, x):
        if depth:
            return checkpoint(nest, depth - 1, x, use_reentrant=True)
        threads.add(threading.get_ident())
        return model(x)

    with acm.batch(model, **SAID[3]):
        expected = torch.autograd.grad(model(x).square().sum(), x)[0]
        nest(70, x).square().sum().backward()
    assert len(threads) == 2
    torch.testing.assert_close(x.grad, expected)
