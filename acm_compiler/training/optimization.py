"""One phase's optimizer: learning rate by step, loss scaling for fp16, clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.recipe.phases import TrainedPhase
from acm_compiler.training.machine import Machine

_OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def learning_rate(config: TrainedPhase, step: int, steps: int) -> float:
    """The learning rate of `step` of `steps`: along half a cosine from `lr` to `lr_min`, or constant."""
    if config.schedule == "constant":
        return config.lr
    return config.lr_min + (config.lr - config.lr_min) * (1 + math.cos(math.pi * step / steps)) / 2


class Optimization:
    """What turns a phase's losses into steps of its parameters."""

    def __init__(
        self, config: TrainedPhase, parameters: Sequence[nn.Parameter], machine: Machine, *, steps: int
    ) -> None:
        self.config, self.parameters, self.steps = config, list(parameters), steps
        self.optimizer = _OPTIMIZERS[config.optimizer](self.parameters, lr=config.lr, weight_decay=config.weight_decay)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self.scaler.scale(loss).backward()

    def clip(self) -> float:
        """Bring the gradients back to their true scale, clip them, and return their norm before that."""
        self.scaler.unscale_(self.optimizer)
        limit = math.inf if self.config.clip_norm is None else self.config.clip_norm
        return float(nn.utils.clip_grad_norm_(self.parameters, limit))

    def step(self, step: int) -> float:
        """Apply the gradients and forget them; the learning rate used. fp16 leaves out steps that overflowed."""
        rate = learning_rate(self.config, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return rate

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
