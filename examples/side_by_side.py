"""One text continued by a converted language model at several budgets, side by side.

    python examples/side_by_side.py runs/smollm2 ["What is a compiler?" ...] [--budgets 1 .75 .6 .4] [--tokens 40]

The folder is that of a run of `acmc rewrite`, which holds the tokenizer's files too. A model that was trained to
converse is asked, others go on with the text; the likeliest token each time.
"""

import argparse
import textwrap
from pathlib import Path

from tabulate import tabulate
from transformers import AutoTokenizer

import acm_compiler as acm
import acm_compiler.hf  # lets transformers open the folder

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path)
parser.add_argument("texts", nargs="*", default=QUESTIONS)
parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 0.75, 0.6, 0.4])
parser.add_argument("--tokens", type=int, default=40)
options = parser.parse_args()

model = acm.load(options.folder)
tokenizer = AutoTokenizer.from_pretrained(options.folder)


def continued(text: str) -> str:
    """The text's continuation at the budget that is set."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
    read = tokenizer(text, return_tensors="pt").input_ids
    written = model.generate(read, max_new_tokens=options.tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(written[0, read.shape[1] :], skip_special_tokens=True)


for text in options.texts:
    columns = {}
    for budget in options.budgets:
        acm.set_budget(model, budget)
        with acm.record(model) as usage:
            found = continued(text)
        heading = f"{budget:g} ({usage.model_share:.0%} of the MACs)"
        columns[heading] = ["\n".join(textwrap.wrap(found, 34))]
    print(f"\n{text}\n{tabulate(columns, headers='keys', tablefmt='grid')}")
