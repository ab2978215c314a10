"""Train the small wav2vec2 of spoken digits from scratch and write its weights.

    python -m scripts.train_shipped.spoken --out PATH

gave the shipped weights. With `--post-norm --lr 8e-4` it trains the same model with its norms after the sums, which is
not shipped (at the rate of the other kind it learns nothing).

Every step shows utterances that were never shown before, of the train split's takes; first single words, then up
to three. At first the model is also told which letter is where: a synthesised word's place is known, and its letters
are taken to share it evenly. CTC alone needs many times the steps until it finds alignments. At the end the moving
average of the weights, rounded to 16 bits as it is stored, is measured on utterances of takes (a voice at one speed
and pitch) that were held out, and the figures are written into the file's metadata. Needs espeak-ng.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acm_compiler.data.batch import Batch
from acm_compiler.data.common_voice import LABEL_PADDING
from acm_compiler.data.loading import BatchStream
from acm_compiler.data.spoken_digits import RATE, VOCABULARY, UtteranceSet
from acm_compiler.shipped import WAV2VEC2_DIGITS
from acm_compiler.sources.inputs import call_model
from acm_compiler.tasks.ctc import open_ctc
from scripts.train_shipped.from_scratch import OneCycle, packed, round_as_packed, training_options, write_weights

log = logging.getLogger(__name__)

WARMUP = 0.1
EMA_DECAY = 0.98
MOST_WORDS = 3
SINGLE, FADE_IN = 0.3, 0.2  # shares of the steps: single words first, then the most words rise to three
ALIGNED, FADE_OUT = 0.5, 0.3  # shares of the steps: letters are placed, then that fades out
HELD_OUT = 800
BEFORE = RATE // 10  # samples: the shortest pause
BLANK, SPACE, IGNORED = 0, VOCABULARY.index("|"), LABEL_PADDING


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and save, as the command line says."""
    parser = training_options("Train the small wav2vec2 of spoken digits.", steps=800, batch=12, lr=3e-3)
    parser.add_argument("--post-norm", action="store_true", help="norms after the sums, as in wav2vec2-base")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    torch.manual_seed(options.seed)
    model = WAV2VEC2_DIGITS.build_model(post_norm=options.post_norm)
    shown = utterances(options.steps, options.batch, seed=options.seed)
    model = train(model, shown, steps=options.steps, lr=options.lr)
    minutes = (time.monotonic() - began) / 60
    round_as_packed(model)
    errors, words = measure(model)
    log.info("word error rate %.4f on %d words of unheard takes, %.1f minutes", errors / words, words, minutes)
    write_weights(packed(model), options, word_error_rate=f"{errors / words:.4f}", words=str(words))


def train(model: nn.Module, batches: Iterable[Batch], *, steps: int, lr: float) -> nn.Module:
    """The model after so many batches: AdamW, one cycle, the moving average of its weights."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    cycle = OneCycle(model, optimizer, steps=steps, warmup=WARMUP, decay=EMA_DECAY)
    lost = 0.0
    for step, shown in enumerate(batches):
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
    "|" has the time just before its word.
    """
    frames = logits_BSV.shape[1]
    samples = batch["input_values"].shape[1]
    target_BS = torch.full(logits_BSV.shape[:2], IGNORED)
    for row, (speech, labels) in enumerate(zip(batch["foreground"], batch["labels"].tolist(), strict=True)):
        real = round(int(batch["attention_mask"][row].sum()) * frames / samples)
        target_BS[row, :real] = BLANK
        edges = (speech.int().diff().nonzero()[:, 0] + 1).tolist()
        for i, word in enumerate(_words(labels)):
            start, end = edges[2 * i : 2 * i + 2]
            for said, low, high in (([SPACE], start - BEFORE, start), (word, start, end)):
                for label, first, last in _middles(said, low * frames / samples, high * frames / samples):
                    target_BS[row, first:last] = label
    return F.cross_entropy(logits_BSV.transpose(1, 2), target_BS, ignore_index=IGNORED)


def _words(labels: Sequence[int]) -> list[list[int]]:
    """The letters of each word of a transcript."""
    words: list[list[int]] = []
    for label in labels:
        if label == SPACE:
            words.append([])
        elif label != IGNORED:
            words[-1].append(label)
    return words


def _middles(said: Sequence[int], start: float, end: float) -> Iterator[tuple[int, int, int]]:
    """Each label with its first and last frame, if they share the time evenly and keep the middle half of it."""
    for i, label in enumerate(said):
        low, high = (start + (end - start) * (i + part) / len(said) for part in (0.25, 0.75))
        yield label, int(low), max(int(low) + 1, int(high))


def utterances(steps: int, batch: int, *, seed: int) -> Iterator[Batch]:
    """Batches of new utterances, single words first; all of a batch have the same most words."""
    sets = {
        most: UtteranceSet("train", count=steps * batch, most_words=most, seed=seed)
        for most in range(1, MOST_WORDS + 1)
    }
    for step in range(steps):
        risen = min(1.0, max(0.0, (step / steps - SINGLE) / FADE_IN))
        data = sets[1 + int(risen * (MOST_WORDS - 1))]
        yield data.collate([data[index] for index in range(step * batch, (step + 1) * batch)])


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
