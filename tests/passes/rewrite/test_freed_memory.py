"""Freed memory while offloading: held or given back, by what follows and by the room there is."""

import os

import pytest
import torch

import acm_compiler as acm
from acm_compiler.passes.rewrite import freed_memory
from tests.helpers.calibration_tiny import make_tiny, texts


@pytest.mark.parametrize("ample", [False, True])
def test_memory_is_held_only_where_there_is_much_or_a_run_of_the_model_keeps_little(tmp_path, monkeypatch, ample):
    """Room of what a gradient or a fit frees goes back at once, as the next large thing may not fit into it."""
    model, set_to, runs = make_tiny(), {}, []
    monkeypatch.setattr(freed_memory, "_room", lambda: 2**34 if ample else 2**32)
    monkeypatch.setattr(freed_memory, "_mallopt", set_to.__setitem__)

    def see(*_):
        runs.append((torch.is_grad_enabled(), set_to[freed_memory._THRESHOLD]))

    with model.register_forward_pre_hook(see):
        acm.calibrate(model, texts(14), tokens=120, gradient_tokens=60, offload=tmp_path)
    with_gradients = [threshold for gradients, threshold in runs if gradients]
    alone = [threshold for gradients, threshold in runs if not gradients]
    # each time the first finds what was set for what came before
    assert len(with_gradients) > 1 and with_gradients[0] == freed_memory._WEIGHTS
    assert set(with_gradients[1:]) == {freed_memory._ACTIVATIONS if ample else freed_memory._WEIGHTS}
    assert alone[:2] == [freed_memory._ACTIVATIONS if ample else freed_memory._WEIGHTS, freed_memory._ACTIVATIONS]
    assert len(alone) > 40 and set(alone[-20:]) == {freed_memory._ACTIVATIONS}
    assert set_to[freed_memory._THRESHOLD] == freed_memory._ACTIVATIONS


def test_room_is_the_least_of_machine_container_and_own_limits(tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    limits = {resource.RLIMIT_DATA: resource.RLIM_INFINITY, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    monkeypatch.setattr(freed_memory, "_CONTAINER", tmp_path / "memory.max")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert freed_memory._room() == machine
    freed_memory._CONTAINER.write_text("max\n")
    assert freed_memory._room() == machine
    freed_memory._CONTAINER.write_text("3000000\n")
    assert freed_memory._room() == 3_000_000
    limits[resource.RLIMIT_DATA] = 2_000_000
    assert freed_memory._room() == 2_000_000
