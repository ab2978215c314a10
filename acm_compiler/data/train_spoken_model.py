"""Train the small wav2vec2 of spoken digits from scratch and write its weights.

    python -m acm_compiler.data.train_spoken_model --out first.safetensors
    python -m acm_compiler.data.train_spoken_model --start first.safetensors --steps 200 --lr 1e-3 --seed 2 --out PATH

The second command goes on with all utterances as long as they get. The shipped weights are what the two gave. A model
this young hears words long before it dares to write the space between them, so at the end of the second the bias of
"|" is set to where the train split's word error rate is lowest.

Every step shows utterances that were never shown before, of the train split's takes; first single words, then up
to three. At first the model is also told which letter is where: a synthesised word's place is known, and its letters
are taken to share it evenly. CTC alone needs many times the steps until it finds alignments. At the end the moving
average of the weights, rounded to 16 bits as it is stored, is measured on utterances of takes (a voice at one speed
and pitch) that were held out, and the figures are written into the file's metadata. Needs espeak-ng.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.data.batch import Batch
from acm_compiler.data.common_voice import LABEL_PADDING
from acm_compiler.data.from_scratch import OneCycle, training_options, write_weights
from acm_compiler.data.loading import BatchStream
from acm_compiler.data.spoken_model import build_model, load_weights
from acm_compiler.data.spoken_words import VOCABULARY
from acm_compiler.data.utterance_set import UtteranceSet
from acm_compiler.inputs import call_model
from acm_compiler.tasks.ctc import open_ctc

log = logging.getLogger(__name__)

WARMUP = 0.1
EMA_DECAY = 0.98
MOST_WORDS = 3
SINGLE, FADE_IN = 0.3, 0.2  # shares of the steps: single words first, then the most words rise to three
ALIGNED, FADE_OUT = 0.5, 0.3  # shares of the steps: letters are placed, then that fades out
HELD_OUT = 800
BIASES = [i / 2 for i in range(17)]
BLANK, SPACE, IGNORED = 0, VOCABULARY.index("|"), LABEL_PADDING


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save, as the command line says."""
    parser = training_options("Train the small wav2vec2 of spoken digits.", steps=800, batch=12, lr=3e-3)
    parser.add_argument("--start", type=Path, default=None, help="weights to go on from; unset: random ones")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    model = train(steps=options.steps, batch=options.batch, lr=options.lr, seed=options.seed, start=options.start)
    minutes = (time.monotonic() - began) / 60
    if options.start is not None:
        fit_space(model, seed=options.seed)
    model = model.half().float()
    errors, words = measure(model)
    log.info("word error rate %.4f on %d words of unheard takes, %.1f minutes", errors / words, words, minutes)
    write_weights(model.half(), options, word_error_rate=f"{errors / words:.4f}", words=str(words))


def train(*, steps: int, batch: int, lr: float, seed: int, start: Path | None = None) -> nn.Module:
    """The model (from `start` on, if given) after `steps` batches of new utterances: AdamW, one cycle, averaged."""
    torch.manual_seed(seed)
    model = build_model().train()
    if start is not None:
        load_weights(model, start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    cycle = OneCycle(model, optimizer, steps=steps, warmup=WARMUP, decay=EMA_DECAY)
    lost = 0.0
    for step, shown in enumerate(_batches(steps, batch, seed, rising=start is None)):
        inputs = {name: shown[name] for name in ("input_values", "attention_mask", "labels")}
        output = model(**inputs)
        placed = min(1.0, max(0.0, 1 - (step / steps - ALIGNED) / FADE_OUT))
        loss = output.loss + (placed * place_letters(output.logits, shown) if placed else 0.0)
        cycle.step(loss)
        lost += output.loss.item()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            log.info("step %d of %d: loss %.3f", step + 1, steps, lost / (step % 100 + 1))
            lost = 0.0
    return cycle.learned


def place_letters(logits_BSV: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of every real frame against the letter said there, if the letters of a word share it evenly.

    The middle half of a letter's stretch of frames is the letter's, the rest is blank, so that no two run together;
    "|" is in the middle of the pauses between words.
    """
    frames = logits_BSV.shape[1]
    samples = batch["input_values"].shape[1]
    target_BS = torch.full(logits_BSV.shape[:2], IGNORED)
    for row, (speech, labels) in enumerate(zip(batch["foreground"], batch["labels"].tolist(), strict=True)):
        real = round(int(batch["attention_mask"][row].sum()) * frames / samples)
        target_BS[row, :real] = BLANK
        edges = (speech.int().diff().nonzero()[:, 0] + 1).tolist()
        words = " ".join(str(label) for label in labels if label != IGNORED).split(f" {SPACE} ")
        stretches = [(words[i // 2].split(), *edges[i : i + 2]) for i in range(0, len(edges), 2)]
        stretches += [([str(SPACE)], *edges[i : i + 2]) for i in range(1, len(edges) - 1, 2)]
        for said, start, end in stretches:
            for i, label in enumerate(said):
                low, high = (start + (end - start) * (i + part) / len(said) for part in (0.25, 0.75))
                first = int(low * frames / samples)
                target_BS[row, first : max(first + 1, int(high * frames / samples))] = int(label)
    return F.cross_entropy(logits_BSV.transpose(1, 2), target_BS, ignore_index=IGNORED)


def _batches(steps: int, batch: int, seed: int, *, rising: bool) -> Iterator[Batch]:
    """Batches of utterances that all have the same most words; `rising`: single words first."""
    sets = {
        most: UtteranceSet("train", count=steps * batch, most_words=most, seed=seed)
        for most in range(1, MOST_WORDS + 1)
    }
    for step in range(steps):
        risen = min(1.0, max(0.0, (step / steps - SINGLE) / FADE_IN)) if rising else 1.0
        data = sets[1 + int(risen * (MOST_WORDS - 1))]
        yield data.collate([data[index] for index in range(step * batch, (step + 1) * batch)])


@torch.inference_mode()
def fit_space(model: nn.Module, *, seed: int, count: int = 192) -> None:
    """Set the bias of "|" to where the word error rate of so many utterances of the train split is lowest."""
    data = UtteranceSet("train", count=count, most_words=MOST_WORDS, seed=seed + 1)
    task = open_ctc(data, model)
    batches = list(BatchStream(dataset=data, batch=32).epoch())
    heard = [model(**dict(task.inputs(batch))).logits for batch in batches]  # type: ignore[call-overload]
    raised = torch.zeros(len(VOCABULARY))
    errors = {}
    for bias in BIASES:
        raised[SPACE] = bias
        errors[bias] = sum(float(task.score(h + raised, b).sum()) for h, b in zip(heard, batches, strict=True))
    best = min(errors, key=errors.__getitem__)
    log.info("the bias of the space is raised by %.1f", best)
    model.get_parameter("lm_head.bias")[SPACE] += best


@torch.inference_mode()
def measure(model: nn.Module, *, count: int = HELD_OUT, seed: int = 0) -> tuple[int, int]:
    """Wrong words and words said, in utterances of takes that were held out."""
    data = UtteranceSet("eval", count=count, most_words=MOST_WORDS, seed=seed)
    task = open_ctc(data, model)
    errors = words = 0
    for batch in BatchStream(dataset=data, batch=32).epoch():
        errors += int(task.score(call_model(model, task.inputs(batch)), batch).sum())
        words += int(task.units(batch).sum())
    return errors, words


if __name__ == "__main__":
    main()
