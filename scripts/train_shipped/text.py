"""Train one of the small models of text from scratch and write its weights.

    python -m scripts.train_shipped.text --model llama_docs --out llama_docs.safetensors
    python -m scripts.train_shipped.text --model modernbert_packages --out modernbert_packages.safetensors

The texts are paragraphs of the documentation of eight installed packages (`data: {kind: texts, classes: …}`), of the
train split's files. With `--tokenizer FILE` a byte-level BPE is learned from them first; else the shipped one is used.
The metric is that of files that were held out, after rounding to 16 bits as the weights are stored. Other versions of
the packages give other texts and so other weights. The shipped ones were made with the defaults,
when batches came in another order. The same command goes
on with a training that was interrupted, from the last hundred steps that were done.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from acm_compiler.data.batch import Batch
from acm_compiler.data.loading import BatchStream
from acm_compiler.data.texts import TextSet
from acm_compiler.files import write_file
from acm_compiler.recipe.datasets import TextData
from acm_compiler.shipped import (
    LLAMA_DOCS,
    MODERNBERT_PACKAGES,
    PACKAGES,
    TOKENIZER,
    TOKENS,
    VOCABULARY,
)
from acm_compiler.sources.inputs import call_model
from acm_compiler.tasks.base import Task, base_metric
from acm_compiler.tasks.classify import Classify
from acm_compiler.tasks.language import CausalLM
from scripts.train_shipped.from_scratch import (
    Checkpoint,
    OneCycle,
    packed,
    round_as_packed,
    training_options,
    write_weights,
)

log = logging.getLogger(__name__)

WARMUP = 0.08
EMA_DECAY = 0.99
TEXTS, HELD_OUT = 40_000, 1000
MARKS = ("<pad>", "<s>", "</s>")
_KEPT_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Training of one model: its own builder, the task, rate and length."""

    build: Callable[[], nn.Module]
    task: Task
    lr: float
    steps: int


LESSONS = {
    "llama_docs": Lesson(build=LLAMA_DOCS.build_model, task=CausalLM(), lr=4e-3, steps=1000),
    "modernbert_packages": Lesson(
        build=MODERNBERT_PACKAGES.build_model, task=Classify(classes=len(PACKAGES)), lr=2e-3, steps=1000
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save, as the command line says."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    if options.tokenizer != TOKENIZER:
        learn_tokenizer(options.tokenizer, seed=options.seed)
    lesson = replace(LESSONS[options.model], steps=options.steps)
    began = time.monotonic()
    facts = {"model": options.model, "steps": options.steps, "batch": options.batch, "seed": options.seed}
    checkpoint = Checkpoint(options.out.with_suffix(".unfinished.pt"), facts)
    data = texts(options.tokenizer, "train")
    model = train(lesson, data, batch=options.batch, seed=options.seed, checkpoint=checkpoint)
    minutes = (time.monotonic() - began) / 60
    round_as_packed(model)
    held_out = BatchStream(dataset=texts(options.tokenizer, "eval"), batch=32)
    found = base_metric(model, held_out.epoch(), lesson.task)
    log.info("%s %.4f on %d held-out texts, %.1f minutes", lesson.task.metric, found, held_out.examples, minutes)
    write_weights(packed(model), options, **{lesson.task.metric: f"{found:.4f}"})
    checkpoint.remove()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = training_options("Train one of the small models of text.", steps=None, batch=32)
    parser.add_argument("--model", choices=sorted(LESSONS), required=True)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, help="a tokenizer.json to learn and write first")
    options = parser.parse_args(arguments)
    options.steps = options.steps or LESSONS[options.model].steps
    return options


def texts(tokenizer: Path, split: Literal["train", "eval"]) -> TextSet:
    """The documentation of one split, as tokens."""
    config = TextData(
        kind="texts",
        split=split,
        tokenizer=str(tokenizer),
        classes=PACKAGES,
        count=TEXTS if split == "train" else HELD_OUT,
        max_tokens=TOKENS,
    )
    return TextSet(config)


def learn_tokenizer(path: Path, *, seed: int) -> None:
    """Write a byte-level BPE with marks at both ends of a text, learned from the train split."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from acm_compiler.data.paragraphs import draw_paragraphs

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = draw_paragraphs(None, "train", TEXTS, seed=seed, classes=PACKAGES)
    tokenizer.train_from_iterator([paragraph.text for paragraph in drawn], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(mark, MARKS.index(mark)) for mark in MARKS[1:]]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, tokenizer.to_str())


def train(lesson: Lesson, data: TextSet, *, batch: int, seed: int, checkpoint: Checkpoint | None = None) -> nn.Module:
    """The model after the lesson's steps on batches of `data`: AdamW, one cycle; averaged weights.

    checkpoint: kept every hundred steps; where it is there already, training goes on from it, with the same result.
    """
    torch.manual_seed(seed)
    task, model = lesson.task, lesson.build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.lr, weight_decay=0.05, betas=(0.9, 0.98))
    cycle = OneCycle(model, optimizer, steps=lesson.steps, warmup=WARMUP, decay=EMA_DECAY)
    stream = BatchStream(dataset=data, batch=batch, seed=seed, shuffle=True, drop_last=True)
    done = 0 if checkpoint is None else checkpoint.load(cycle)
    losses: list[float] = []
    for step, shown in enumerate(_batches(stream, done, lesson.steps), done + 1):
        loss = task.loss(call_model(model, task.inputs(shown)), shown)
        cycle.step(loss)
        losses.append(loss.item())
        if step % _KEPT_EVERY == 0 or step == lesson.steps:
            log.info("step %d of %d: loss %.3f", step, lesson.steps, sum(losses) / len(losses))
            losses.clear()
            if checkpoint is not None:
                checkpoint.save(cycle, step)
    return cycle.learned


def _batches(stream: BatchStream, start: int, stop: int) -> Iterator[Batch]:
    """Batches number `start` to `stop`, epoch after epoch."""
    epoch, number = stream.place(start)
    later = (stream.epoch(epoch) for epoch in count(epoch + 1))
    return islice(chain(stream.epoch(epoch, number), chain.from_iterable(later)), stop - start)


if __name__ == "__main__":
    main()
