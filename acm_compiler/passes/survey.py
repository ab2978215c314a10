"""The analysis of a model: its sites, its look-alikes and its own costs; the model stays as it is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import torch
from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.errors import AlreadyRewritten, UsageError
from acm_compiler.files import dump
from acm_compiler.passes.capture.batch_axes import find_layouts
from acm_compiler.passes.capture.capture import capture, fake_mode
from acm_compiler.passes.capture.graph import tensors
from acm_compiler.passes.capture.isolate import preserve_state
from acm_compiler.passes.capture.normalize import normalized, zeroed_encoders
from acm_compiler.passes.find.count_macs import grouped_macs, not_counted
from acm_compiler.passes.find.dataflow import Dataflow, build_dataflow
from acm_compiler.passes.find.find_sites import Match, match_sites
from acm_compiler.passes.rewrite.conversion import refuse_no_module
from acm_compiler.passes.rewrite.dense_region import named_tensors
from acm_compiler.passes.rewrite.site_functions import functions_of
from acm_compiler.planning.decisions import ModelFacts
from acm_compiler.planning.plan import class_of, fingerprint
from acm_compiler.site import Layout, Site, Skip
from acm_compiler.sources.inputs import Inputs, call_model, split_inputs

# what looks at a model is in its modules and in torch meanwhile
_ONE_AT_A_TIME = threading.RLock()
_SHARDED = ("FullyShardedDataParallel", "DTensor")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """A model's sites and look-alikes, its dataflow with the MACs of every operation, and the facts that plans keep.

    `reads`: by name of a site that runs once, the value that it reads. `zeroed`: encoders whose padded positions are
    zero in eval mode, until a site of theirs is converted.
    """

    sites: tuple[Site, ...]
    skipped: tuple[Skip, ...]
    flow: Dataflow
    model: ModelFacts
    reads: Mapping[str, str]
    zeroed: tuple[str, ...]


def analyze(model: nn.Module, example_inputs: Inputs, *, source: Mapping[str, Any] | None = None) -> Findings:
    """normalize -> capture -> dataflow -> sites -> layouts, each computed once; the model is as it was afterwards."""
    refuse_no_module(model)
    if any(isinstance(module, ACM) for module in model.modules()):
        raise AlreadyRewritten(
            "this model holds ACMs already", fix="plan the original model, or acm.revert(model) first"
        )
    if any(type(part).__name__ in _SHARDED for part in (*model.modules(), *model.parameters())):
        raise UsageError(
            "the model is sharded (FSDP)",
            fix="plan and rewrite it first, then shard it (FSDP with use_orig_params=True, or fully_shard)",
        )
    first = next((tensor for tensor in tensors(example_inputs) if tensor.dim()), None)
    if first is not None and not first.numel():
        raise UsageError(
            "example inputs must hold at least one token of one example",
            found=f"shape {list(first.shape)}",
            fix="give inputs of the size that the model is to be planned for",
        )
    with _ONE_AT_A_TIME, normalized(model) as seen:
        graph = capture(seen, example_inputs)
        dump("00_captured.py", lambda: graph.graph.python_code("self").src)
        flow = build_dataflow(graph)
        matches, skipped = match_sites(seen, flow)
        layouts = find_layouts(seen, example_inputs, graph) if matches else {}
        functions = [functions_of(seen, match.site, named_tensors(seen)) for match in matches]
    _LOG.info("%d sites, %d look-alikes, seen by the %s", len(matches), len(skipped), graph.method)
    found = tuple(
        changed(match.site, layout=_layout(match, layouts), functions=own)
        for match, own in zip(matches, functions, strict=True)
    )
    dump("10_sites.txt", lambda: "\n".join(map(str, (*found, *skipped))))
    facts = _facts(model, example_inputs, flow, source)
    return Findings(
        sites=found,
        skipped=tuple(skipped),
        flow=flow,
        model=facts,
        reads={match.site.name: match.runs[0].x for match in matches if len(match.runs) == 1},
        zeroed=tuple(zeroed_encoders(model)),
    )


def torch_macs(model: nn.Module, example_inputs: Inputs) -> int | None:
    """MACs of one forward by torch's FlopCounterMode (FLOPs / 2), None where it cannot run this model.

    It does not know grouped_mm, the products of experts, which are counted for it.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops})
    products = sdpa_kernel(SDPBackend.MATH)  # attention's fused kernel for CPUs is unknown to the counter
    try:
        with preserve_state(model), torch.no_grad(), fake_mode(), products, counter:
            call_model(model, example_inputs)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AssertionError, NotImplementedError) as error:
        _LOG.debug("FlopCounterMode does not run this model: %s", error)
        return None
    return counter.get_total_flops() // 2


def grouped_flops(left: Any, right: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    """Count the FLOPs of grouped_mm, as FlopCounterMode asks for them."""
    return 2 * grouped_macs(left, right, out_shape)


def _layout(match: Match, layouts: Mapping[str, Layout | None]) -> Layout | None:
    """The layout that all runs of a site have in common."""
    known = {layouts.get(run.x) for run in match.runs}
    return known.pop() if len(known) == 1 else None


def _facts(model: nn.Module, inputs: Inputs, flow: Dataflow, source: Mapping[str, Any] | None) -> ModelFacts:
    args, kwargs = split_inputs(inputs)
    shapes = [tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return ModelFacts(
        fingerprint=fingerprint(model),
        cls=class_of(model),
        source=None if source is None else dict(source),
        inputs=", ".join(" x ".join(map(str, shape)) for shape in shapes),
        batch=shapes[0][0] if shapes and shapes[0] else 1,
        dense_macs=sum(flow.macs.values()),
        dense_params=sum(p.numel() for p in model.parameters()),
        not_counted=not_counted(flow.capture),
    )
