"""Perplexity of converted decoders at every budget, beside the dense model and a fixed k: docs/results/decoders.md.

    python -m benchmarks.decoders --model gpt2 --width 192 --out runs/decoders      trains it first, or loads it
    python -m benchmarks.decoders --model llama --width 256 --out runs/decoders
    python -m benchmarks.decoders --model llama_docs                                the shipped Llama
    python -m benchmarks.decoders --model FOLDER --texts 96                         a causal model of transformers'
    python -m benchmarks.decoders --model runs/smollm2 --against teal wina          a finished run; all at equal MACs
    python -m benchmarks.decoders --model runs/smollm2 --sparsity .15 .3            and with small values skipped

GPT-2 and GPT-NeoX have GELU MLPs, Llama SwiGLU. They are trained on documentation of installed packages as the shipped
language model is, one file per size below `--out`; the same command goes on with a training that was interrupted.
FOLDER is one with config.json, weights and tokenizer.json. Nothing is trained after the conversion. `--against` adds
other methods of acm_compiler/baselines at the same shares on the same texts (cmoe needs scipy).
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

import acm_compiler as acm
from acm_compiler.baselines.choose_methods import METHODS, OURS
from acm_compiler.baselines.site_method import SiteMethod
from acm_compiler.calibration.calibrate import calibrate_on
from acm_compiler.calibration.examples import Options
from acm_compiler.data import Batch, BatchStream
from acm_compiler.data.texts import TextSet
from acm_compiler.errors import UsageError
from acm_compiler.evaluation.evaluate import evaluate
from acm_compiler.evaluation.results import BudgetResult, Evaluation, load_evaluation
from acm_compiler.passes.rewrite.conversion import conversion
from acm_compiler.recipe.datasets import TextData
from acm_compiler.runs.opened import open_saved_run
from acm_compiler.runtime.control import FixedK
from acm_compiler.shipped import LLAMA_DOCS, PACKAGES, TOKENIZER, TOKENS, VOCABULARY, load_shipped
from acm_compiler.tasks.language import CausalLM
from benchmarks.equal_macs import SHARES, Rivals, part_of
from scripts.train_shipped.from_scratch import Checkpoint, write_weights
from scripts.train_shipped.text import Lesson, texts, train

BUDGETS = (0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
TASK, RATE = CausalLM(), 3e-3
RIVALS = tuple(name for name, kind in METHODS.items() if issubclass(kind, SiteMethod) and name not in OURS)
say = partial(print, flush=True)
_POOL = 96  # batches of like length, before they are shuffled


def main() -> None:
    """Measure one model with MLP sites, and with all of them."""
    options = arguments().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("acm_compiler.calibration").setLevel(logging.WARNING)
    if (Path(options.model) / "eval.json").is_file():
        for row in of_run(Path(options.model), options):
            say(row)
        return
    if options.sparsity:
        raise UsageError("--sparsity is for finished runs", found=options.model)
    model, tokenizer = decoder(options)
    size = sum(p.numel() for p in model.parameters())
    say(f"{type(model).__name__}, {size / 1e6:.1f} M parameters, {torch.get_num_threads()} threads, {sys.argv[1:]}")
    for kinds in options.sites:
        for row in measured(model, tokenizer, kinds.split("+"), options):
            say(row)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help=f"{', '.join(BUILDERS)}, llama_docs, or a folder")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=1000, help="of training, 32 texts each")
    parser.add_argument("--sites", nargs="+", choices=("mlp", "mlp+attn"), default=["mlp", "mlp+attn"])
    parser.add_argument("--learners", type=int, default=8)
    parser.add_argument("--lossless", action="store_true")
    parser.add_argument("--tokens", type=int, default=20_000, help="to calibrate on")
    parser.add_argument("--against", nargs="+", choices=RIVALS, default=[], help="measured beside ours")
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of the sites' MACs, of all methods")
    parser.add_argument("--sparsity", nargs="+", type=float, default=[], help="shares that acm.set_sparsity skips")
    parser.add_argument("--texts", type=int, default=400, help="to judge by")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/decoders"))
    return parser


def gpt2(width: int, layers: int) -> nn.Module:
    """Pre-norm, GELU, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": width // 32, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(**VOCABULARY_OF, **sizes, **none))


def gpt_neox(width: int, layers: int) -> nn.Module:
    """Attention and MLP side by side, GELU, rotary positions."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes_of(width, layers), intermediate_size=4 * width))


def llama(width: int, layers: int) -> nn.Module:
    """Pre-norm, SwiGLU, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    inner = 8 * width // 3 // 16 * 16
    return LlamaForCausalLM(LlamaConfig(**sizes_of(width, layers), intermediate_size=inner))


VOCABULARY_OF: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BUILDERS: dict[str, Callable[[int, int], nn.Module]] = {"gpt2": gpt2, "gpt_neox": gpt_neox, "llama": llama}


def sizes_of(width: int, layers: int) -> dict[str, Any]:
    """Sizes that configurations name alike."""
    heads = {"num_hidden_layers": layers, "num_attention_heads": width // 32}
    return {**VOCABULARY_OF, **heads, "hidden_size": width, "max_position_embeddings": 256}


def decoder(options: argparse.Namespace) -> tuple[nn.Module, Path]:
    """A trained causal model, and its tokenizer's file."""
    if options.model in BUILDERS:
        return trained(options), TOKENIZER
    if options.model == "llama_docs":
        return LLAMA_DOCS.trained(), TOKENIZER
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    return model.eval(), Path(options.model) / "tokenizer.json"


def trained(options: argparse.Namespace) -> nn.Module:
    """The model of these sizes: loaded, or trained and written."""
    name = f"{options.model}_{options.width}_{options.layers}_{options.steps}"
    path = options.out / f"{name}.safetensors"

    def build() -> nn.Module:
        return BUILDERS[options.model](options.width, options.layers)

    if not path.is_file():
        began = time.process_time()
        lesson = Lesson(build=build, task=TASK, lr=RATE, steps=options.steps)
        checkpoint = Checkpoint(options.out / f"{name}.unfinished.pt", {"name": name})
        model = train(lesson, texts(TOKENIZER, "train"), batch=32, seed=1, checkpoint=checkpoint)
        say(f"trained in {(time.process_time() - began) / 60:.1f} minutes of CPU time since it last began")
        write_weights(model, argparse.Namespace(out=path, steps=options.steps, batch=32, lr=RATE, seed=1))
        checkpoint.remove()
    return load_shipped(build(), path, script="train_text_model").eval()


def measured(model: nn.Module, tokenizer: Path, kinds: list[str], options: argparse.Namespace) -> Iterator[str]:
    """The conversion's facts, and a row of Markdown for every setting."""
    began, converted = time.process_time(), converted_copy(model, tokenizer, kinds, options)
    seconds, planned = time.process_time() - began, conversion(converted).plan.sites
    added = conversion(converted).plan.cost.acm_params / conversion(converted).plan.model.dense_params - 1
    forms = [site.form if site.kind == "linear" else site.second_layer for site in planned]
    yield f"\n{' and '.join(kinds)}: { ({form: forms.count(form) for form in forms}) }, N = {options.learners}, "
    yield f"{added:+.1%} parameters, {options.tokens} tokens, calibrated in {seconds:.0f} s of CPU time, "
    budgets = conversion(converted).table
    yield f"lowest k {budgets.points[0].k_lo if budgets else None}\n"
    held_out = BatchStream(dataset=documentation(tokenizer, "eval", options.texts), batch=options.batch)
    quarters = [FixedK(options.learners * part // 4) for part in (1, 2, 3, 4)]
    found = evaluate(converted, held_out.epoch(), TASK, budgets=[*BUDGETS, *quarters], dense=model)
    yield from table(found)
    if options.against:
        shown = partial(calibration_batches, tokenizer, options.batch)
        plan, shares = conversion(converted).plan, options.shares
        rivals = Rivals(model, plan, TASK, fit=shown, held_out=held_out.epoch, shares=shares)
        yield from beside(rivals, converted, options.against)


def of_run(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """The rows that a finished run has measured, those with values skipped, and those of other methods on its texts."""
    run = open_saved_run(folder)
    found, recipe = load_evaluation(folder), run.recipe
    if found is None or recipe is None or recipe.data is None or run.dense is None:
        raise UsageError("the run must be finished, with a recipe that names data", where=str(folder))
    yield from table(found)
    train, batch = run.opened.dataset(recipe.data.train), recipe.run.eval_batch
    shown = BatchStream(dataset=train, batch=batch, seed=recipe.run.seed, shuffle=True)
    held_out = BatchStream(dataset=run.data, batch=batch)
    for share in options.sparsity:
        if not conversion(run.model).value_sizes:
            acm.measure_sparsity(run.model, (run.task.inputs(batch) for batch in shown.epoch()))
        acm.set_sparsity(run.model, share, calls="all")
        yield from table(
            evaluate(run.model, held_out.epoch(), run.task, budgets=BUDGETS, dense=run.dense),
            note=f", {share:g} skipped",
        )
        acm.set_sparsity(run.model, None)
    if options.against:
        plan, shares = conversion(run.model).plan, options.shares
        rivals = Rivals(run.dense, plan, run.task, fit=shown.epoch, held_out=held_out.epoch, shares=shares)
        yield from beside(rivals, run.model, options.against)


def beside(rivals: Rivals, model: nn.Module, methods: list[str]) -> Iterator[str]:
    """A row of the same table for every method and share of the MACs of the plan's sites, then all at equal shares."""
    for name in methods:
        yield from rivals.measure(name, say)
    yield ""
    yield from rivals.read_off(model)


def table(found: Evaluation, *, note: str = "") -> Iterator[str]:
    """A row of Markdown for every budget and every k; `note` goes with each setting."""
    metric = f"{found.metric.name}, dense {found.metric.dense:.2f}"
    yield f"| setting | share | of dense MACs | {metric} | to dense | to fixed k |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for result in (*found.budgets, *found.fixed):
        setting = f"{result.asked:g}{note}" if isinstance(result, BudgetResult) else f"k = {result.k} everywhere"
        control = result.over_fixed if isinstance(result, BudgetResult) else None
        moved = " | ".join(part_of(found.metric.dense, change) for change in (result.difference, control))
        yield f"| {setting} | {result.reached:.3f} | {result.model_share:.1%} | {result.metric:.2f} | {moved} |"


def converted_copy(model: nn.Module, tokenizer: Path, kinds: list[str], options: argparse.Namespace) -> nn.Module:
    """Rewritten and calibrated on texts of the train split."""
    example = {"input_ids": torch.ones(1, TOKENS, dtype=torch.int64)}
    plan = acm.plan(model, example, sites=kinds, learners=options.learners, lossless=options.lossless)
    converted = acm.rewrite(model, plan)
    shown = ((TASK.inputs(batch), TASK.mask(batch)) for batch in calibration_batches(tokenizer, options.batch))
    calibrate_on(converted, shown, options=Options(tokens=options.tokens, budgets=BUDGETS, answer=TASK.judged_by))
    return converted


def calibration_batches(tokenizer: Path, batch: int) -> Iterator[Batch]:
    """Texts of like length in a batch, which saves padding; the batches in any order."""
    dataset = documentation(tokenizer, "train", 6000)
    batches = list(islice(BatchStream(dataset=dataset, batch=batch, seed=1, shuffle=True).epoch(), _POOL))
    for place in torch.randperm(len(batches), generator=torch.Generator().manual_seed(1)).tolist():
        yield batches[place]


def documentation(tokenizer: Path, split: Any, count: int) -> TextSet:
    """Paragraphs of the packages that the shipped language model knows; files are in one split each."""
    return TextSet(
        TextData(
            kind="texts",
            split=split,
            tokenizer=str(tokenizer),
            classes=PACKAGES,
            count=count,
            max_tokens=TOKENS,
            seed=1 if split == "train" else 2,
        )
    )


if __name__ == "__main__":
    main()
