"""State of a run for exact continuation: live tensors, facts that are no tensors, and random generators."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.acm.context import recomputing
from acm_compiler.acm.learners import gumbel_noise
from acm_compiler.data.draws import derive
from acm_compiler.passes.rewrite.build_acm import build_acm
from acm_compiler.passes.rewrite.conversion import plain_facts, restore_facts, rewritten
from acm_compiler.planning.cost import learner_unit
from acm_compiler.planning.plan import Plan
from acm_compiler.training.machine import Machine
from acm_compiler.training.sharding import names_of_parts, read_parts


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer outside the dense regions, once, by its first name."""
    dense = tuple(f"{name}.dense." for name, module in model.named_modules() if isinstance(module, ACM))
    seen: set[int] = set()
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in every:
        if id(tensor) not in seen and not name.startswith(dense):
            seen.add(id(tensor))
            yield name, tensor


def live_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors by name, on the CPU, none sharing memory with another."""
    taken: set[int] = set()
    tensors = {}
    for name, tensor in named_tensors(model):
        value = tensor.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if place in taken else value
        taken.add(place)
    return tensors


@torch.no_grad()
def restore_tensors(model: nn.Module, path: Path) -> None:
    """Write the tensors of `path` into the model. ValueError when they are not this model's."""
    targets = dict(named_tensors(model))
    with safe_open(path, framework="pt") as file:
        _match("tensors", set(file.keys()), set(targets))
        for name, target in targets.items():
            target.copy_(file.get_tensor(name))


def restore_parts(model: nn.Module, directory: Path) -> None:
    """Write the tensors that all processes of a sharded run kept their parts of into the model. ValueError as above."""
    targets = {f"model/{name}": tensor.detach() for name, tensor in named_tensors(model)}
    _match("tensors", {name for name in names_of_parts(directory) if name.startswith("model/")}, set(targets))
    read_parts(targets, directory)


def _match(what: str, saved: set[str], here: set[str]) -> None:
    odd = sorted(saved ^ here)
    if odd:
        raise ValueError(f"{len(odd)} {what} of the model and of the state do not match, such as {odd[0]}")


def live_facts(model: nn.Module) -> dict[str, Any]:
    """The plan, the budget set, states, gate rules and measured budgets as plain values."""
    found = rewritten(model)
    return {"plan": found.plan.to_json(), "budget": found.owner.budget, **plain_facts(found)}


def restore_structure(model: nn.Module, facts: dict[str, Any]) -> None:
    """Give sites whose plan a calibration had changed learners and gates of the right shapes, and note that plan.

    ValueError for a plan of other sites.
    """
    found, plan = rewritten(model), Plan.from_json(facts["plan"])
    _match("sites", {site.name for site in plan.sites}, set(found.acms))
    unit = learner_unit(plan.sites)
    for name, acm in found.acms.items():
        site = plan.site(name)
        if site != found.plan.site(name):
            shaped = build_acm(site, like=acm.learners.w_in, unit=unit)
            acm.learners, acm.gate = shaped.learners, shaped.gate
    found.owner.plan = plan


def restore_live_facts(model: nn.Module, facts: dict[str, Any]) -> None:
    """Write what else `live_facts` gave into the model."""
    found = rewritten(model)
    restore_facts(found.owner, found.acms, facts)
    found.owner.budget = facts["budget"]


def seed_generators(*names: int) -> None:
    """Start torch's (all devices'), Python's and NumPy's global generators from integers that name the use."""
    seed = derive(*names)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def generator_states(device: torch.device) -> dict[str, Any]:
    """The state of every generator this process draws from, as tensors and plain values."""
    name, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ),
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(*_named_generators(device))
    return states


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Continue from what `generator_states` captured."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], *_named_generators(device))


def _named_generators(device: torch.device) -> tuple[torch.device, ...]:
    """Arguments that name a device to its module: none where there is only one."""
    return () if device.type == "mps" else (device,)


class SharedNoise:
    """The gates' noise of several processes: each draws what one process would for the whole batch, and takes its rows.

    All have as many examples of a batch, padded alike. The draws are from the global generators, which stay the same in
    all processes: for the rest of a forward, dropout for instance, each has some of its own (`apart`).
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._shared: dict[str, Any] | None = None
        self._drawn: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, acm: ACM, u_TC: Tensor, shape: torch.Size) -> Tensor:
        """Gumbel noise for the utilities of an input [*shape, D]."""
        drawn = self._drawn.get(acm.name, [])
        if recomputing():  # a checkpoint's second forward of this batch
            return next(noise_TC for u, noise_TC in drawn if len(drawn) == 1 or u.equal(u_TC))
        axis = 0 if acm.layout is None else acm.layout.batch_axis or 0
        every = list(shape)
        every[axis] *= self.machine.world
        with self._of_all():
            noise = gumbel_noise(u_TC.new_empty(*every, u_TC.shape[1]))
        noise_TC = noise.narrow(axis, shape[axis] * self.machine.rank, shape[axis]).reshape(u_TC.shape)
        if self._shared is not None:
            self._drawn.setdefault(acm.name, []).append((u_TC.detach(), noise_TC))
        return noise_TC

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, the global generators are this process's own, started from those of all, which come back after it."""
        self._shared = states = generator_states(self.machine.device)
        self._drawn.clear()
        tensors = [state for state in states.values() if isinstance(state, Tensor)]
        seed_generators(zlib.crc32(b"".join(state.numpy().tobytes() for state in tensors)), self.machine.rank)
        try:
            yield
        finally:
            restore_generators(self._shared, self.machine.device)
            self._shared = None
            self._drawn.clear()

    @contextmanager
    def _of_all(self) -> Iterator[None]:
        if self._shared is None:
            yield
            return
        own = generator_states(self.machine.device)
        restore_generators(self._shared, self.machine.device)
        yield
        self._shared = generator_states(self.machine.device)
        restore_generators(own, self.machine.device)
