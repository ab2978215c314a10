"""`acm.quantize`: learners, and other linears, with int8 or 4-bit weights, in place (docs/semantics.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch
from torch import nn

from acm_compiler.acm import ACM
from acm_compiler.acm.intact import refuse_adapted, refuse_in_parts, refuse_skips
from acm_compiler.acm.quantized.int8 import DEEPEST
from acm_compiler.acm.quantized.integers import To
from acm_compiler.errors import UsageError
from acm_compiler.passes.rewrite.conversion import refuse_compiled, wholly_rewritten
from acm_compiler.runtime.control import refuse_unfitted
from acm_compiler.runtime.quantized_linear import choose_rest, replace_linears


@torch.inference_mode(False)
def quantize(
    model: nn.Module,
    to: To = "int8",
    *,
    rest: bool = False,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
) -> nn.Module:
    """Give the learners of a rewritten model weights of 8 or 4 bits, in place; gives `model`.

    int8: one scale per output channel; int4: two numbers per 32 values. Activations are quantised as they come, by
    token. Gates and biases stay as they are, and so does the budget table: `acm.recalibrate` measures it anew. The
    choice is final: what fits or trains learners comes before.
    rest: whether linears outside of ACMs are quantised, too: all but output heads, routers of experts, linears whose
    weight is tied or computed, and those with hooks. include: heads, routers and tied ones that do, all the same, by
    name, glob, or `re:` and a regular expression; exclude: linears that do not.
    Raises UsageError for another type, a model that is quantised or relaxed, values too many to sum, an odd number of
    values of 4 bits, or patterns that are not wanted or match nothing (SelectionError); SitesNotFitted, NotRewritten,
    CompiledModelError.
    """
    if to not in get_args(To):
        raise UsageError("learners can be quantised to two types", found=repr(to), expected="'int8' or 'int4'")
    include, exclude = ((given,) if isinstance(given, str) else tuple(given) for given in (include, exclude))
    if (include or exclude) and not rest:
        raise UsageError("include and exclude are about the rest", found="rest=False", fix="rest=True, or neither")
    refuse_compiled(model, "quantised", fix="quantise the eager model, then torch.compile it")
    found = wholly_rewritten(model, "acm.quantize")
    refuse_adapted(found.acms, "acm.quantize")
    refuse_skips(found.acms, "acm.quantize")
    refuse_in_parts(model, "acm.quantize")
    if found.owner.quantized is not None:
        raise UsageError("the learners of this model are quantised already", found=found.owner.quantized)
    refuse_unfitted(found, "quantize")
    for name, acm in found.acms.items():
        _refuse_site(name, acm, to)
    names = choose_rest(found, include, exclude, to) if rest else []
    for acm in found.acms.values():
        acm.learners.quantize(to)
    replace_linears(found.model, names, to)
    found.owner.quantized, found.owner.rest, found.owner.times = to, tuple(names), None
    return model


def _refuse_site(name: str, acm: ACM, to: To) -> None:
    if acm.temperature is not None:
        raise UsageError("the gates of this model are relaxed", where=name, fix="first acm.relax(model, None)")
    shape = acm.learners.w_in.shape
    for length in (shape[-1], *([shape[1]] if acm.learners.w_out is not None else [])):
        if to == "int4" and length % 2:
            raise UsageError(
                "rows of 4-bit weights must be of even length, as two values share a byte",
                where=name,
                found=length,
                fix='acm.quantize(model, "int8"), or exclude this site from the plan',
            )
    deepest = max(acm.d_in, shape[1])
    if deepest > DEEPEST:
        raise UsageError(
            "sums of int8 products of a layer this wide do not fit into 32 bits",
            where=name,
            found=f"{deepest:,} inputs",
            expected=f"at most {DEEPEST:,}",
        )
