"""What the trainers of the shipped models have in common: their options, one cycle of AdamW, the file they write."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

_KEPT = ("steps", "batch", "lr", "seed")


def training_options(description: str, **defaults: int | float | None) -> argparse.ArgumentParser:
    """A parser for where to write, steps, batch, rate, seed and threads; what `defaults` leave out is no option."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    for name, default in {**defaults, "seed": 1, "threads": defaults.get("threads", 1)}.items():
        kind = float if name == "lr" else int
        said = "unset: what the shipped weights took" if default is None else f"default: {default}"
        parser.add_argument(f"--{name}", type=kind, default=default, help=said)
    return parser


class OneCycle:
    """AdamW along one cycle of `steps`, gradients clipped at 1, and a moving average of the weights."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.AdamW, *, steps: int, warmup: float, decay: float):
        self.model, self._optimizer = model, optimizer
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
        self._averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average)
        highest = optimizer.param_groups[0]["lr"]
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, highest, total_steps=steps, pct_start=warmup)

    def step(self, loss: Tensor) -> None:
        """Move the weights once."""
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        self._averaged.update_parameters(self.model)

    @property
    def learned(self) -> nn.Module:
        """The model with the averaged weights, in eval mode."""
        return self._averaged.module.eval()


def write_weights(model: nn.Module, options: argparse.Namespace, **measured: str) -> None:
    """Write `options.out`: the weights and, as metadata, what was measured and what they were trained with."""
    from safetensors.torch import save_model

    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: str(getattr(options, name)) for name in _KEPT if hasattr(options, name)}
    save_model(model, str(options.out), metadata={**measured, **facts, "torch": torch.__version__})
    log.info("%s: %d kB", options.out, options.out.stat().st_size // 1000)
