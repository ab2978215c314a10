"""`acm.quantize`: learners, and other linears, with int8 or 4-bit weights, in place (docs/semantics.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import torch
from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.acm.arguments import Weights
from acm_compiler.acm.intact import refuse_adapted, refuse_in_parts, refuse_skips
from acm_compiler.acm.precision import no_autocast
from acm_compiler.acm.quantized.int8 import DEEPEST
from acm_compiler.acm.quantized.integers import To
from acm_compiler.calibration.examples import MaskOf, masked
from acm_compiler.calibration.quantized.inputs import read_inputs
from acm_compiler.calibration.quantized.round_learners import rounded_learners
from acm_compiler.data.batch import check_tokens
from acm_compiler.errors import UsageError, a_few_of, check_bool, counted
from acm_compiler.passes.capture.normalize import normalized
from acm_compiler.passes.rewrite.conversion import Rewritten, refuse_compiled, wholly_rewritten
from acm_compiler.progress import Progress, Say, progress_of
from acm_compiler.runtime.control import refuse_unfitted
from acm_compiler.runtime.quantized_linear import choose_rest, one_learner_of, replace_linears
from acm_compiler.sources.inputs import Example, Inputs

# tokens that are read of `batches`, unless said
_TOKENS = 24_000
_LOG = logging.getLogger(__name__)
_ONCE = "quantise the model as it was before, with floating-point weights"


def quantize(
    model: nn.Module,
    to: To = "int8",
    batches: Iterable[Inputs] | None = None,
    *,
    rest: bool = False,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    tokens: int = _TOKENS,
    mask: MaskOf | None = None,
    progress: Say | None = None,
) -> nn.Module:
    """Give the learners of a rewritten model weights of 8 or 4 bits, in place; gives `model`.

    int8: one scale per output channel; int4: two numbers per 32 values, but for learners with rows of odd length, which
    stay floats; the log and `acm.status` tell. Activations are quantised as they come, by
    token. Gates and biases stay as they are, and so does the budget table: `acm.recalibrate` measures it anew. The
    choice is final: what fits or trains learners comes before.
    batches, for int4: an iterable of what the model takes, no labels, as for `calibrate`; weights are then rounded so
    that they lose little on these tokens, and biases with them, in place of each to its nearest value. Read until every
    site has seen `tokens` real tokens, at budgets from 1 to .4 in turn. mask, progress: as for `calibrate`.
    rest: whether linears outside of ACMs are quantised, too: all but output heads, routers of experts, linears whose
    weight is tied or computed, and those with hooks. include: heads, routers and tied ones that do, all the same, by
    name, glob, or `re:` and a regular expression; exclude: linears that do not.
    Raises UsageError for another type, batches for int8, a model that is quantised or relaxed, values too many to sum,
    rows of odd length at every site for int4, a batch that the model does not take, or patterns that are not wanted or
    match nothing (SelectionError); DataError (no batches; a site that never ran), TrainingFailed (values that are not
    finite), SitesNotFitted, NotRewritten, CompiledModelError. On an error the model is as it was.
    """
    check_bool(rest, "rest")
    examples = None if batches is None else masked(batches, mask)
    return quantize_on(
        model, to, examples, rest=rest, include=include, exclude=exclude, tokens=tokens, progress=progress
    )


@torch.inference_mode(False)
@torch.no_grad()
def quantize_on(
    model: nn.Module,
    to: To,
    examples: Iterable[Example] | None,
    *,
    rest: bool = False,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    tokens: int = _TOKENS,
    progress: Say | Progress | None = None,
) -> nn.Module:
    """`quantize` with (inputs, padding mask or None) pairs."""
    if to not in get_args(To):
        raise UsageError("to must be 'int8' or 'int4'", found=repr(to))
    if examples is not None and to != "int4":
        raise UsageError(
            "only 4-bit weights are rounded by data: int8 ones lose next to nothing",
            found=f"batches and {to!r}",
            fix='acm.quantize(model, "int8") without them',
        )
    check_tokens(tokens)
    include, exclude = ((given,) if isinstance(given, str) else tuple(given) for given in (include, exclude))
    if (include or exclude) and not rest:
        raise UsageError("include and exclude are about the rest", found="rest=False", fix="rest=True, or neither")
    found = _quantizable(model)
    able = _able(found, to)
    names = choose_rest(found, include, exclude, to) if rest else []
    made: Mapping[str, Weights] = {}
    if examples is not None:
        with no_autocast(), progress_of("quantize", progress) as work:
            made = _rounded(found, names, examples, tokens, work)
    for name, acm in able.items():
        acm.learners.quantize(to, made.get(name))
    replace_linears(found.model, names, to, made)
    found.owner.quantized, found.owner.rest, found.owner.times = to, tuple(names), None
    return model


def _quantizable(model: nn.Module) -> Rewritten:
    """The rewritten model, if its learners can be quantised; the errors of `quantize` about the model alone."""
    refuse_compiled(model, "quantised", fix="quantise the eager model, then torch.compile it")
    found = wholly_rewritten(model, "acm.quantize")
    refuse_adapted(found.acms, "acm.quantize")
    refuse_skips(found.acms, "acm.quantize")
    refuse_in_parts(model, "acm.quantize")
    if kinds := {kind for acm in found.acms.values() if (kind := acm.learners.quantized) is not None}:
        raise UsageError("the learners of this model are quantised already", found=a_few_of(sorted(kinds)), fix=_ONCE)
    refuse_unfitted(found, "quantize")
    for name, acm in found.acms.items():
        _refuse_site(name, acm)
    return found


def _rounded(
    found: Rewritten, names: Sequence[str], examples: Iterable[Example], tokens: int, work: Progress
) -> dict[str, Weights]:
    """The weights of every site, and of these linears, rounded by what they are given; by name."""
    with normalized(found.model) as model:
        linears = {name: model.get_submodule(name) for name in names}
        inputs = read_inputs(found, examples, linears, count=tokens, progress=work)
        work.finish(f"inputs of {counted(tokens, 'token')}")
        work.part("layer", len(inputs))
        made: dict[str, Weights] = {}
        for name in list(inputs):
            site = found.acms.get(name)
            if site is not None and not site.learners.can_quantize("int4"):
                continue
            weights = one_learner_of(linears[name]) if site is None else site.learners.weights()
            made[name] = rounded_learners(weights, inputs.pop(name))
            work.advance(name)
    work.finish(f"{counted(len(made), 'layer')} rounded")
    return made


def _able(found: Rewritten, to: To) -> dict[str, ACM]:
    """The ACMs whose learners can be of this type; the log names others. UsageError where there are none."""
    able = {name: acm for name, acm in found.acms.items() if acm.learners.can_quantize(to)}
    odd = [name for name in found.acms if name not in able]
    if not able:
        raise UsageError(
            "rows of 4-bit weights must be of even length, as two values share a byte",
            where=odd[0],
            found="rows of odd length at every site",
            fix='acm.quantize(model, "int8")',
        )
    if odd:
        where = f"{len(odd)} of {counted(len(found.acms), 'site')}"
        _LOG.warning("learners stay floats at %s, whose rows have odd lengths: %s", where, a_few_of(odd))
    return able


def _refuse_site(name: str, acm: ACM) -> None:
    if acm.temperature is not None:
        raise UsageError("the gates of this model are relaxed", where=name, fix="first acm.relax(model, None)")
    shape = acm.learners.w_in.shape
    deepest = max(acm.d_in, shape[1])
    if deepest > DEEPEST:
        raise UsageError(
            "sums of int8 products of a layer this wide do not fit into 32 bits",
            where=name,
            found=f"{deepest:,} inputs",
            expected=f"at most {DEEPEST:,}",
        )
