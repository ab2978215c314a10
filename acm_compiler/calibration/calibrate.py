"""`acm.calibrate`: fit every site, install, measure (docs/semantics.md, Closed form)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Literal

import torch
from torch import nn

from acm_compiler.acm.intact import refuse_adapted, refuse_in_parts, refuse_meta, refuse_quantized, refuse_skips
from acm_compiler.acm.precision import no_autocast
from acm_compiler.calibration.answer import Answer, default_answer, run
from acm_compiler.calibration.choose_gates import choose_gates
from acm_compiler.calibration.examples import Examples, MaskOf, Options, masked
from acm_compiler.calibration.fit_all import fit_all
from acm_compiler.calibration.install import install
from acm_compiler.errors import LayoutUnknown, UsageError
from acm_compiler.passes.capture.graph import batch_size
from acm_compiler.passes.rewrite.conversion import (
    Rewritten,
    refuse_compiled,
    refuse_inference_tensors,
    wholly_rewritten,
)
from acm_compiler.passes.rewrite.dense_region import broken_weights_named, read_dense
from acm_compiler.passes.rewrite.offload import offloading, streaming
from acm_compiler.planning.check_schedule import check_closed_form
from acm_compiler.planning.plan import Plan
from acm_compiler.progress import Progress, Say, progress_of
from acm_compiler.runtime.batch_context import batch as batch_context
from acm_compiler.runtime.budgets import shares_of
from acm_compiler.runtime.control import spend
from acm_compiler.runtime.measure_budgets import fill_table, undisturbed
from acm_compiler.runtime.sparsity import measure_sizes, skipping_sites
from acm_compiler.sources.inputs import Example, Inputs

# the kinds of gates that `fit_all` gives every site
_KINDS = ("as gradients do", "nearly alike")
# the sizes of values are measured at the budget nearest to this, on so many tokens
_USUAL, _SIZED = 0.75, 2_048


def calibrate(
    model: nn.Module,
    batches: Iterable[Inputs],
    *,
    tokens: int = 20_000,
    gradient_tokens: int | None = None,
    backward_passes: int = 3,
    local_steps: int = 0,
    budgets: Sequence[float | str] = (),
    mask: MaskOf | None = None,
    answer: Answer | None = None,
    offload: str | os.PathLike[str] | None = None,
    precision: Literal["fp32", "bf16"] = "fp32",
    progress: Say | None = None,
) -> Plan:
    """Give a rewritten model fitted learners, gates and a budget table, in place; returns its resolved plan.

    batches: an iterable of what the model takes (tensor, tuple, or dict), no labels. Read until every site has seen
    `tokens` real tokens; every sixth batch is kept for measuring, of many tokens about 4,096.
    gradient_tokens: once so many are seen, the rest is run forward alone and serves the refit of the learners, not the
    gates nor what says which errors matter; it takes a fraction of the time. Where unset, all are run with gradients.
    backward_passes: of each batch with gradients, each along a random direction of the answer: fewer take less time,
    more leave less noise in what says which errors matter.
    local_steps: of training for the learners of every MLP, on inputs of its own, after the closed form: first layers
    move, too, which k below N gain from. Not at sites whose k = N is the dense layer (`lossless`).
    budgets: what you will ask of `set_budget`: they stay reachable (the lowest k may be raised else).
    mask: mask(batch) -> bool [batch, tokens], True at real tokens, as for `acm.batch`: it must fit all sites, and
    overrules the batch's own. Where unset, or None, padding is what the call's `attention_mask` (or torch's
    `src_key_padding_mask` or `key_padding_mask`) says, given by name or by place.
    answer: answer(output, mask) -> a floating tensor [batch, ...] with its graph, or a list of such: what the model is
    judged by, every element alike. `output` is what the model gave for a batch, `mask` its padding mask as above (bool,
    or None); of one [batch, tokens, ...] padding is left out. Where unset: the output's `logits` (of tokens:
    their probabilities), else `last_hidden_state`, else all floating outputs; so give one where pooling follows.
    offload: a folder, or "disk" for the system's own for temporary files, for models that memory does not hold:
    statistics and learners lie in files there, without names, whose pages come and go. The result is the same. Give
    `rewrite` the same; models read from safetensors lie in their files already. "cpu", for a GPU that does not hold
    them: weights and statistics lie in the memory of the CPU, and the GPU has one weight at a time. The model may be on
    either, and stays there; without a GPU the same is done with copies in the CPU's memory.
    precision: bf16 multiplies the linear layers of a float32 model in bfloat16 while it is read, on CPUs with
    instructions for that; statistics, closed forms and the budget table keep their own types.
    progress: called with a line of text after each step, such as "calibrate: site 7 of 60, 2 min left"; when unset, a
    terminal shows a bar, else the log, or stderr where that does not listen at INFO, has a line every ten seconds.

    An autocast around the call is off inside: model and closed forms keep the model's own types.
    Afterwards the model runs at its default budget, or all learners if it has none. Learners and gates are new
    parameters then: make optimizers afterwards. On an error or an interrupt the model is as it was. Raises DataError
    (no batches; a site that never ran), NoDenseRegion, TrainingFailed (values that are not finite), LayoutUnknown,
    CompiledModelError, StorageError (no room where to offload), UsageError (a batch that the model does not take);
    warns where tokens are too few to refit.
    """
    options = Options(
        tokens=tokens,
        gradient_tokens=gradient_tokens,
        backward_passes=backward_passes,
        local_steps=local_steps,
        budgets=budgets,
        answer=default_answer if answer is None else answer,
        offload=offload,
        precision=precision,
    )
    return calibrate_on(model, masked(batches, mask), options=options, progress=progress)


def calibrate_on(
    model: nn.Module,
    batches: Iterable[Example],
    *,
    options: Options | None = None,
    progress: Say | Progress | None = None,
) -> Plan:
    """`calibrate` with (inputs, padding mask or None) pairs and all its options."""
    options = options or Options()
    found = _fittable(model, options)
    owner, wanted = found.owner, shares_of(found.owner, options.budgets)
    for site in owner.plan.sites:
        check_closed_form(site)
    examples = _examples(owner.plan, batches, options)
    with (
        torch.inference_mode(False),
        no_autocast(),
        streaming(found.model) if options.offload == "cpu" else offloading(options.offload),
        progress_of("calibrate", progress) as work,
        ExitStack() as undo,
    ):
        dense = read_dense(found)
        with broken_weights_named(found), undisturbed(found):
            fitted = fit_all(found, dense, examples, options, work)
        install(found, fitted, undo)
        kinds = [{fit.site.name: fit.gates[kind] for fit in fitted} for kind in range(len(_KINDS))]
        choice = choose_gates(found, examples.held_out, kinds, answer=options.answer, budgets=wanted, progress=work)
        for fit in fitted:
            found.acms[fit.site.name].gate = fit.gates[choice.kind].gate
        work.finish(f"lowest k of the budget table: {choice.k_lo}; gates weigh tokens {_KINDS[choice.kind]}")
        table = fill_table(found, examples.held_out, budgets=wanted, k_lo=choice.k_lo, progress=work)
        owner.value_sizes = {}
        if callable(getattr(model, "generate", None)) and skipping_sites(found):
            # so that `set_sparsity` works at once: it is for models that write
            spend(found, min(table.points, key=lambda point: abs(point.share - _USUAL)).share)
            measure_sizes(found, examples.held_out, tokens=_SIZED, run=partial(_run, found))
        spend(found, 1.0 if owner.default_budget is None else owner.default_budget)
        undo.pop_all()
    return owner.plan


def _fittable(model: nn.Module, options: Options) -> Rewritten:
    """The rewritten model, if a calibration can fit it; the errors of `calibrate` that need no batch."""
    refuse_compiled(model, "calibrated")
    found = wholly_rewritten(model, "calibration")
    refuse_inference_tensors(model)
    refuse_quantized(found.acms, "calibration")
    device = next(iter(found.acms.values())).k_lo.device
    if options.offload not in (None, "cpu") and device.type != "cpu":
        raise UsageError(
            "only what is calibrated on the CPU can be offloaded to files",
            found=f"a model on {device}",
            fix="offload to the memory of the CPU: offload='cpu'; or calibrate there: model.cpu(), run.device: cpu",
        )
    refuse_meta(found.acms, "calibration")
    refuse_adapted(found.acms, "calibration")
    refuse_skips(found.acms, "calibration")
    refuse_in_parts(model, "calibration")
    return found


def _examples(plan: Plan, batches: Iterable[Example], options: Options) -> Examples:
    """The batches, of one example each where a site mixes those of a batch; run in parts where no site does."""
    layouts = [site.layout for site in plan.sites]
    mixed = any(layout is not None and layout.batch_axis is None for layout in layouts)
    apart = all(layout is not None and layout.batch_axis == 0 and not layout.is_packed for layout in layouts)
    return Examples(_single(batches) if mixed else batches, tokens=options.tokens, apart=apart)


def _run(found: Rewritten, example: Example) -> None:
    with batch_context(found.model, mask=example[1]):
        run(found, example[0])


def _single(batches: Iterable[Example]) -> Iterator[Example]:
    """The batches, of one example each; LayoutUnknown at the first that holds several."""
    for inputs, mask in batches:
        count = batch_size(inputs)
        if count is not None and count > 1:
            raise LayoutUnknown(
                "this model mixes the examples of a batch, so its plan holds for one at a time",
                found=f"a batch of {count}",
                fix="give batches of one example",
            )
        yield inputs, mask
