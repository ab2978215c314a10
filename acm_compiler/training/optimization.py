"""One phase's optimizer: learning rate by step, loss scaling for fp16, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.recipe.phases import TrainedPhase
from acm_compiler.training.machine import Machine
from acm_compiler.training.phase import Group, parameters_of

_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def learning_rate(config: TrainedPhase, lr: float, step: int, steps: int) -> float:
    """The learning rate of `step` of `steps`: along half a cosine from `lr` to `lr_min`, or constant."""
    if config.schedule == "constant":
        return lr
    return config.lr_min + (lr - config.lr_min) * (1 + math.cos(math.pi * step / steps)) / 2


class Optimization:
    """What turns a phase's losses into steps of its parameters."""

    def __init__(self, config: TrainedPhase, groups: Sequence[Group], machine: Machine, *, steps: int) -> None:
        self.config, self.groups, self.steps = config, groups, steps
        self.rates = [config.lr if group.lr is None else group.lr for group in groups]
        settings = [{"params": list(group.parameters)} for group in groups]
        self.optimizer = _OPTIMIZERS[config.optimizer](settings, lr=config.lr, weight_decay=config.weight_decay)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self.scaler.scale(loss).backward()

    def clip(self) -> float:
        """Bring the gradients back to their true scale, clip them, and return their norm before that."""
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        return float(nn.utils.clip_grad_norm_(parameters_of(self.groups), limit))

    def step(self, step: int) -> float:
        """Apply the gradients and forget them; the first group's learning rate. fp16 leaves out overflowed steps."""
        rates = [learning_rate(self.config, lr, step, self.steps) for lr in self.rates]
        for settings, rate in zip(self.optimizer.param_groups, rates, strict=True):
            settings["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return rates[0]

    @property
    def may_overflow(self) -> bool:
        """Whether gradients that are not finite are part of the method (fp16's loss scaling)."""
        return self.scaler.is_enabled()

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers that continue this optimization exactly."""
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue what `state_dict` saved."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
