"""LoRA on the learners of a finished run of a language model, beside training the learners themselves.

    acmc rewrite --recipe llama_docs --out runs/llama_docs
    python -m benchmarks.adapters runs/llama_docs --ranks 4 8 16

Each follows the dense model's probabilities for the same steps on the same texts, each step at a budget of its own;
then all are measured on held-out texts, with gates and budget table as they were: docs/results/decoders.md.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import count, islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import acm_compiler as acm
import acm_compiler.hf  # sites become targets
from acm_compiler.data import BatchStream
from acm_compiler.errors import UsageError
from acm_compiler.evaluation.evaluate import evaluate
from acm_compiler.runs.recipe_run import SavedRun, open_saved_run
from benchmarks.decoders import say
from benchmarks.equal_macs import part_of

BUDGETS = (0.25, 0.4, 0.6, 0.75, 1.0)
LEAST, MOST = 0.25, 0.8
RATES = {"learners": 3e-4, "lora": 3e-3}
_WARM_UP = 10


def main() -> None:
    """Heal copies of the run's model and print a row of Markdown for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    run = open_saved_run(options.run)
    if run.recipe is None or run.recipe.data is None or run.dense is None:
        raise UsageError("the run must be finished, with a recipe that names data", where=str(options.run))
    say(f"{torch.get_num_threads()} threads, {sys.argv[1:]}")
    say("| trained | parameters | " + " | ".join(f"{budget:g}" for budget in BUDGETS) + " | CPU s a step |")
    say("| --- |" + " --- |" * (len(BUDGETS) + 2))
    for name, rank in (("nothing", 0), ("learners", 0), *(("lora", rank) for rank in options.ranks)):
        say(row(run, name, rank, options))


def row(run: SavedRun, name: str, rank: int, options: argparse.Namespace) -> str:
    """Excess perplexity at every budget after training what `name` says."""
    model = copy.deepcopy(run.model)
    adapted: nn.Module = model
    if rank:
        adapted = get_peft_model(model, LoraConfig(target_modules=list(acm.sites(model)), r=rank, lora_alpha=rank))
    elif name == "learners":
        own = {id(p) for site in acm.sites(model).values() for p in site.learners.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in own)
    began, trained = time.process_time(), 0
    if name != "nothing":
        trained = train(adapted, run, RATES[name], options)
    seconds = (time.process_time() - began) / options.steps
    healed = adapted.merge_and_unload() if rank else adapted
    held_out = BatchStream(dataset=run.data, batch=run.recipe.run.eval_batch)
    found = evaluate(healed, held_out.epoch(), run.task, budgets=list(BUDGETS), dense=run.dense)
    moved = " | ".join(part_of(found.metric.dense, budget.difference) for budget in found.budgets)
    return f"| {name}{f', rank {rank}' if rank else ''} | {trained:,} | {moved} | {seconds:.2f} |"


def train(model: nn.Module, run: SavedRun, rate: float, options: argparse.Namespace) -> int:
    """Let what is trainable follow the dense model; gives the number of parameters trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    budgets = random.Random(0)
    for step, inputs in enumerate(islice(batches(run, options.batch), options.steps)):
        warm, done = min(1.0, (step + 1) / _WARM_UP), step / options.steps
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (1 + math.cos(math.pi * done)) / 2
        acm.set_budget(model, budgets.uniform(LEAST, MOST))
        distance(model, run.dense, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    return sum(p.numel() for p in parameters)


def batches(run: SavedRun, batch: int) -> Iterator[Mapping[str, Tensor]]:
    """The model's inputs for training texts, without end."""
    stream = BatchStream(dataset=run.opened.dataset(run.recipe.data.train), batch=batch, seed=1, shuffle=True)
    for epoch in count():
        yield from (run.task.inputs(one) for one in stream.epoch(epoch))


def distance(model: nn.Module, dense: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Kullback-Leibler divergence from the dense model's probabilities, the mean over real tokens."""
    with torch.no_grad():
        expected = dense(**inputs).logits.log_softmax(-1)
    found = model(**inputs).logits.log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1)[inputs["attention_mask"].bool()].mean()


if __name__ == "__main__":
    main()
