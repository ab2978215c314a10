"""State outside of a model: torch.compile's stance while anyone holds it, and caches that fake tensors got into."""

import functools
import sys
import types

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from acm_compiler.passes.capture.global_state import Eager, GlobalCaches, empty_filled, enclosed


def stance():
    return torch._dynamo.eval_frame._stance.stance


def test_compiled_functions_are_eager_until_the_last_holder_lets_go():
    eager, before = Eager(), stance()
    with eager.held():
        with eager.held():
            assert stance() == "force_eager"
        assert stance() == "force_eager"
    assert stance() == before
    with pytest.raises(ZeroDivisionError), eager.held():
        1 / 0  # noqa: B018
    assert stance() == before
    eager.force()  # nobody holds it
    assert stance() == before


@pytest.fixture
def code(monkeypatch):
    """A file with a module that keeps masks in every way that files do."""
    file = types.ModuleType("a_file_of_a_user")

    class Masked(nn.Module):
        __module__ = file.__name__
        of_class = {}  # noqa: RUF012 - a cache of the class

    @functools.lru_cache
    def mask(size):
        return torch.ones(size)

    @functools.wraps(mask)
    def wrapper(size):
        return mask(size)

    vars(file).update(Masked=Masked, mask=wrapper, by_size={4: torch.zeros(4)}, listed=[torch.zeros(2)], last=None)
    monkeypatch.setitem(sys.modules, file.__name__, file)
    return file


def test_fake_tensors_leave_every_cache_of_a_file_and_real_ones_stay(code):
    caches, kept = GlobalCaches(nn.Sequential(code.Masked())), code.by_size[4]
    first = code.listed[0]
    with FakeTensorMode():
        fake = torch.ones(3)
        code.mask(3)
        code.by_size |= {3: [fake], 4: fake}
        code.listed.append({"a": fake})
        code.last = (fake,)
        code.Masked.of_class["mask"] = fake
    code.by_size[5] = torch.zeros(5)
    caches.forget_fakes()
    assert list(code.by_size) == [4, 5] and code.by_size[4] is kept
    assert code.last is None and len(code.listed) == 1 and code.listed[0] is first
    assert code.Masked.of_class == {}
    assert type(code.mask(3)) is torch.Tensor


def test_a_cache_that_was_only_read_keeps_what_it_holds():
    @functools.lru_cache
    def square(x):
        return x * x

    square(2)
    before = [(square, square.cache_info())]
    square(2)
    empty_filled(before)
    assert square.cache_info().currsize == 1
    square(3)
    empty_filled(before)
    assert square.cache_info().currsize == 0


def test_values_enclosed_in_a_function_are_those_that_are_there_yet():
    def outer():
        def inner():
            return later, known

        known = 3
        found = enclosed(inner)
        later = 4
        return found, enclosed(inner)

    assert outer() == ([3], [3, 4])
    assert enclosed(5) == []
