"""Common parts of the trainers of the shipped models: options, one cycle of AdamW, the weights they write."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.errors import StorageError
from acm_compiler.files import whole_file
from acm_compiler.shipped import SCALE, unpacked

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

    @property
    def _moving(self) -> tuple[Any, ...]:
        return self.model, self._optimizer, self._averaged, self._schedule

    def state(self) -> list[dict[str, Any]]:
        """Everything that a step changes."""
        return [part.state_dict() for part in self._moving]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from what `state` gave."""
        for part, values in zip(self._moving, state, strict=True):
            part.load_state_dict(values)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """File of an interrupted training, and the facts of the training that it belongs to."""

    path: Path
    facts: Mapping[str, int | float | str]

    def load(self, cycle: OneCycle) -> int:
        """Restore `cycle`; the steps that are done, 0 where there is no file. StorageError for another training's."""
        if not self.path.is_file():
            return 0
        kept = torch.load(self.path, weights_only=True)
        if kept["facts"] != dict(self.facts):
            raise StorageError(
                "an unfinished training of another kind was kept here",
                where=str(self.path),
                found=kept["facts"],
                expected=dict(self.facts),
                fix="remove that file, or train as it was begun",
            )
        cycle.restore(kept["cycle"])
        torch.set_rng_state(kept["random"])
        log.info("%s: going on after %d steps", self.path, kept["step"])
        return kept["step"]

    def save(self, cycle: OneCycle, step: int) -> None:
        """Keep where `cycle` is after so many steps; never half a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = {"facts": dict(self.facts), "cycle": cycle.state(), "step": step, "random": torch.get_rng_state()}
        with whole_file(self.path) as beside:
            torch.save(kept, beside)

    def remove(self) -> None:
        """Forget it, when the training is done."""
        self.path.unlink(missing_ok=True)


def packed(model: nn.Module) -> dict[str, Tensor]:
    """The weights of `model` in 8 bits where they are matrices, row by row, and in 16 bits else; shared ones once."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _distinct(model).items():
        if tensor.dim() < 2 or not tensor.is_floating_point():
            tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
            continue
        rows = tensor.float().flatten(1)
        scale = (rows.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        integers = (rows / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        tensors |= {name: integers.view_as(tensor), f"{name}{SCALE}": scale}
    return tensors


def round_as_packed(model: nn.Module) -> nn.Module:
    """`model`, in place, with the weights that are read back once they are packed."""
    model.load_state_dict(unpacked(packed(model)), strict=False)  # of tied weights the first is packed
    return model


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `model` by name; of names for the same one the first."""
    by_place = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    return dict(by_place.values())


def write_weights(tensors: Mapping[str, Tensor], options: argparse.Namespace, **measured: str) -> None:
    """Write `options.out`: the weights and, as metadata, what was measured and what they were trained with."""
    from safetensors.torch import save_file

    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: str(getattr(options, name)) for name in _KEPT if hasattr(options, name)}
    with whole_file(options.out) as beside:
        save_file(dict(tensors), str(beside), metadata={**measured, **facts, "torch": torch.__version__})
    log.info("%s: %d kB", options.out, options.out.stat().st_size // 1000)
