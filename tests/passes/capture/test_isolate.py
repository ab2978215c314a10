"""Nothing of a capture stays behind: not in the model, its inputs, generators, nor in caches of its files."""

import functools
import random

import numpy
import pytest
import torch
from torch import Tensor, nn

from acm_compiler.errors import CaptureFailed
from acm_compiler.passes.capture.capture import capture
from tests.helpers.captures import Block, D

_masks: dict[int, Tensor] = {}


@functools.lru_cache
def cached_ramp(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)


def behind_a_cache(function):
    """A function that asks a cache which only it can reach."""
    cached = functools.lru_cache(function)

    def ask(size: int) -> Tensor:
        return cached(size)

    return ask


@behind_a_cache
def hidden_ramp(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)


class Config:
    """Holds settings, as transformers' configs do."""

    def __init__(self) -> None:
        self.use_cache, self._attn_implementation, self.seen = True, "flash_attention_2", [1]


class Leaving(nn.Module):
    """A forward that leaves traces wherever a model can, and raises at the end if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.config = Config()
        self.history: list = []
        self.cache: dict = {}
        self.last = None
        self.generator = torch.Generator().manual_seed(5)
        self.plain = torch.zeros(D)
        self.register_buffer("steps", torch.zeros(3))
        self.register_buffer("ids", None)
        self.raises = self.reads = False

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training and not self.config.use_cache
        assert self.config._attn_implementation == "eager"
        self.last, self.ids = x, torch.arange(3)
        self.history.append(x)
        self.cache["x"] = x
        self.config.seen.append(2)
        self.config.fresh = x
        self.steps += 1
        self.steps[0] = 5
        self.plain.add_(self.block.up.bias.sum())
        self.block.down.bias.data[0] = 7
        x.mul_(2)
        noise = torch.rand(D) + torch.rand(D, generator=self.generator) + numpy.random.rand() + random.random()
        mask = _masks.setdefault(len(x), torch.ones(len(x), 1))
        self.block.register_forward_hook(lambda *_: None)
        if self.reads:
            x.sum().item()
        if self.raises:
            raise ValueError("the model's own")
        return self.block(x + noise + cached_ramp(D) + hidden_ramp(D)) * mask


def everything(model: nn.Module) -> dict:
    """The identity of all that a model holds, and the values of its tensors."""
    found: dict = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            inner = value.items() if isinstance(value, dict) else value if isinstance(value, list) else ()
            found[name, key] = (id(value), [str(entry) for entry in inner])
    config = model.config
    found["config"] = (dict(vars(config)), list(config.seen))
    found["tensors"] = [t.clone() for t in (*model.parameters(), model.steps, model.plain)]
    found["generator"] = model.generator.get_state()
    return found


def same(left, right) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(value, right[key]) for key, value in left.items())
    return bool(left == right)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_a_model_is_as_it_was_after_its_capture_also_after_an_error(training, reads, raises):
    model = Leaving().train(training)
    model.block.down.eval()
    model.raises, model.reads = raises, reads
    handle = model.block.register_forward_hook(lambda *_: None)
    x = torch.randn(2, D)
    before, given = everything(model), x.clone()
    states = [torch.get_rng_state(), random.getstate(), list(numpy.random.get_state()[1])]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    _masks.clear()
    for cache in (cached_ramp, hidden_ramp.__closure__[0].cell_contents):
        cache.cache_clear()
    if raises:
        with pytest.raises(CaptureFailed, match="the model's own"):
            capture(model, x)
    else:
        assert capture(model, x).method == "recorder"
    after = everything(model)
    assert {key for key in before if not same(before[key], after.get(key))} == set()
    assert list(before) == list(after)
    assert same(states, [torch.get_rng_state(), random.getstate(), list(numpy.random.get_state()[1])])
    assert torch.equal(x, given) and torch.backends.mha.get_fastpath_enabled() == fast_path
    assert not any(type(t).__name__ == "FakeTensor" for t in (*_masks.values(), cached_ramp(D), hidden_ramp(D)))
    assert list(model.block._forward_hooks) == [handle.id] and not model.block._forward_pre_hooks


def test_a_renormalizing_embedding_keeps_its_weight_although_it_is_really_run():
    class Renormalizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, D, max_norm=0.1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids) * ids.max().item()

    model = Renormalizes()
    before = model.embed.weight.detach().clone()
    capture(model, torch.arange(5))
    assert torch.equal(model.embed.weight, before)
    model(torch.arange(5))
    assert not torch.equal(model.embed.weight, before)


class Cache:
    """Keeps its state in slots, one of which is empty at first."""

    __slots__ = ("calls", "last", "seen")

    def __init__(self) -> None:
        self.calls, self.seen = 0, [0]

    def state(self) -> tuple:
        return self.calls, [*self.seen], hasattr(self, "last")


class NamedCache(Cache):
    """Slots of a base class, and attributes beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "of a layer"

    def state(self) -> tuple:
        return *super().state(), dict(vars(self))


def fill(cache, x):
    cache.calls, cache.last, cache.name = cache.calls + 1, x, "of a call"
    cache.seen.append(x)


def fill_slots(cache, x):
    cache.calls, cache.last = cache.calls + 1, x
    cache.seen.append(x)


class Dice(random.Random):
    """A generator that counts what it gives."""

    given = 0

    def throw(self, _: Tensor) -> None:
        self.given += 1
        self.random()


def freeze(held, x):
    held[0] = 1
    held.setflags(write=False)


class Using(nn.Module):
    def __init__(self, held, use) -> None:
        super().__init__()
        self.block, self.held, self.use = Block(), [held], use

    def forward(self, x: Tensor) -> Tensor:
        self.use(self.held[0], x)
        return self.block(x)


@pytest.mark.parametrize(
    ("held", "use", "state"),
    [
        (Cache(), fill_slots, Cache.state),
        (NamedCache(), fill, NamedCache.state),
        (random.Random(3), lambda held, x: held.gauss(0, 1), random.Random.getstate),
        (numpy.random.default_rng(3), lambda held, x: held.random(), lambda held: held.bit_generator.state),
        (numpy.random.RandomState(3), lambda held, x: held.rand(), lambda held: held.get_state()[1].tolist()),
        (numpy.zeros(3), lambda held, x: numpy.add(held, 1, out=held), numpy.ndarray.tolist),
        (numpy.zeros(()), lambda held, x: held.fill(1), numpy.ndarray.tolist),
        (Dice(3), Dice.throw, lambda held: (held.getstate(), held.given)),
        (numpy.array([None]), lambda held, x: held.fill(x), numpy.ndarray.tolist),
    ],
    ids=lambda value: type(value).__name__,
)
def test_slots_generators_and_arrays_that_a_model_holds_are_put_back(held, use, state):
    before = state(held)
    capture(Using(held, use), torch.randn(2, D))
    assert state(held) == before
    use(held, torch.ones(1))
    assert state(held) != before


def test_an_array_that_a_model_makes_read_only_is_no_error():
    held = numpy.zeros(3)
    capture(Using(held, freeze), torch.randn(2, D))
    assert not held.flags.writeable
