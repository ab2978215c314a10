"""Does a converted decoder still do its job? Continuations and choices at every budget, beside the dense model's.

    python -m benchmarks.job runs/smollm2 [--budgets .25 .4 .6 .75 1] [--texts 60] [--tokens 32]

The folder is a finished run; its held-out texts are cut in two halves. Continuation: how many of the first tokens that
a model writes greedily after the first half are those that the dense model writes. Choice: of the true second half and
three others' from different sources, as long, the one that the model finds likeliest given the first; chance is 25 %.
95 % intervals over sources, of choices also of the difference to the dense model. Next tokens: `acmc eval`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import acm_compiler as acm
from acm_compiler.evaluation.results import Interval
from acm_compiler.evaluation.statistics import interval, resampled_means
from acm_compiler.runs.opened import SavedRun, open_saved_run

HEADINGS = ("budget", "same tokens", "all the same", "right choice", "to dense, points")
CHOICES, SHORTEST = 4, 24  # tokens of a text that is asked about


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.25, 0.4, 0.6, 0.75, 1.0])
    parser.add_argument("--texts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=32, help="of a continuation")
    chosen = parser.parse_args()
    run = open_saved_run(chosen.run)
    assert run.dense is not None
    texts, source_E = questions(run, chosen.texts)
    wanted, right_E = answers(run.dense.eval(), texts, source_E, chosen.tokens)
    rows = [["dense", "", "", shown(mean_of(100 * right_E, source_E), " %"), ""]]
    for budget in chosen.budgets:
        acm.set_budget(run.model, budget)
        found, chosen_E = answers(run.model.eval(), texts, source_E, chosen.tokens)
        same_E = (found == wanted).cumprod(1).sum(1).double()
        rows.append(
            [
                f"{budget:g}",
                shown(mean_of(same_E, source_E), f" of {chosen.tokens}"),
                f"{float((same_E == chosen.tokens).double().mean()):.0%}",
                shown(mean_of(100 * chosen_E, source_E), " %"),
                shown(mean_of(100 * (chosen_E - right_E), source_E), ""),
            ]
        )
    print(f"{len(texts)} texts from {len(source_E.unique())} sources, torch {torch.__version__}\n")
    print(tabulate(rows, headers=HEADINGS, tablefmt="github", disable_numparse=True))


def questions(run: SavedRun, count: int) -> tuple[list[Tensor], Tensor]:
    """The first held-out texts that are long enough, and the source of each, [E]."""
    examples = (run.data[number] for number in range(len(run.data)))  # type: ignore[arg-type]
    long = [e for e in examples if len(e["input_ids"]) >= SHORTEST][:count]
    return [e["input_ids"] for e in long], torch.stack([e["source"] for e in long])


@torch.no_grad()
def answers(model: nn.Module, texts: list[Tensor], source_E: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Continuations of each first half [E, tokens], and 1 where the true second half is chosen, [E]."""
    written, right = [], []
    options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
    for number, ids in enumerate(texts):
        first, second = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        written.append(model.generate(first[None], **options)[0, len(first) :])  # type: ignore[operator]
        choices = torch.stack([second, *others(number, texts, source_E, len(second))])
        right.append(float(log_likelihoods(model, first, choices).argmax() == 0))
    return torch.stack(written), torch.tensor(right, dtype=torch.float64)


def others(number: int, texts: list[Tensor], source_E: Tensor, length: int) -> list[Tensor]:
    """Ends of that length of the next texts from other sources; shorter ones are repeated from their beginning."""
    after = [(number + step) % len(texts) for step in range(1, len(texts))]
    elsewhere = [place for place in after if source_E[place] != source_E[number]][: CHOICES - 1]
    return [texts[place].repeat(-(-length // len(texts[place])))[-length:] for place in elsewhere]


def log_likelihoods(model: nn.Module, first: Tensor, choices_CS: Tensor) -> Tensor:
    """log p of each choice after `first`, a sum over its tokens, [C]."""
    ids_CL = torch.cat([first.expand(len(choices_CS), -1), choices_CS], 1)
    logits_CSV = model(input_ids=ids_CL).logits[:, len(first) - 1 : -1].float()
    return -F.cross_entropy(logits_CSV.transpose(1, 2), choices_CS, reduction="none").sum(1)


def mean_of(value_E: Tensor, source_E: Tensor) -> Interval:
    """The mean over texts, with its interval over sources."""
    return interval(float(value_E.mean()), resampled_means(value_E[:, None], source_E)[:, 0])


def shown(found: Interval, unit: str) -> str:
    """A mean with its interval."""
    return f"{found.mean:.1f}{unit} ({found.low:.1f} to {found.high:.1f})"


if __name__ == "__main__":
    main()
