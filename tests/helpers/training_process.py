"""A short run of the tiny model in a process of its own: `python -m tests.helpers.training_process OPTIONS`."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from acm_compiler.errors import RunInterrupted
from acm_compiler.training.schedule import run_schedule
from tests.helpers.training_runs import distill, finetune, gate, job_in
from tests.helpers.training_tiny import Task, make_model

STEPS = 5
SCHEDULE = [distill(steps=STEPS, batch=16), gate(steps=STEPS, batch=16), finetune(steps=STEPS, batch=16)]


class Signalling(Task):
    """Sends this process a signal when its n-th batch is asked for, counted from 1 over all phases."""

    def __init__(self, at: int = 0, number: int = signal.SIGINT) -> None:
        self.at, self.number, self.seen = at, number, 0

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), self.number)
        return super().inputs(batch)


def train(
    directory: Path, *, resume: bool = False, until: str | None = None, at: int = 0, number: int = signal.SIGINT
) -> nn.Module:
    """The model after the whole schedule, or after its rest, up to `until`; saves its state every second step."""
    model = make_model()
    job = job_in(directory, padded=True, save_every="2steps", task=Signalling(at, number))
    run_schedule(model, SCHEDULE, job, resume=resume, until=until)
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copies of everything that training changes."""
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in every}


def main() -> None:
    """Run as the options say; exit with an interrupted run's own code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--signal", type=int, default=signal.SIGINT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        model = train(options.directory, resume=options.resume, at=options.at, number=options.signal)
    except RunInterrupted as error:
        raise SystemExit(error.exit_code) from error
    save_file(weights(model), options.directory / "end.safetensors")


if __name__ == "__main__":
    main()
