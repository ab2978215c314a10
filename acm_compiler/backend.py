"""`torch.compile(model, backend="acm")`: found through the package's entry point, without importing anything first.

Every graph is compiled by Inductor; `acm::learners` stays one operator in it, so the time of a compiled model
already follows its budget. Fused kernels for that operator register themselves beside the reference.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import fx

from acm_compiler.acm import ops
from acm_compiler.errors import UsageError, did_you_mean

_LEARNERS = (ops.LEARNERS, ops.LEARNERS.default)
_LOG = logging.getLogger("acm_compiler.backend")


def acm_backend(
    graph_module: fx.GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compile one Dynamo graph; `mode` and `options` are Inductor's, an unknown option is a UsageError."""
    # dynamo and inductor take seconds to import and are there already when torch.compile calls
    import torch._inductor
    from torch._inductor.compile_fx import compile_fx

    patches = dict(torch._inductor.list_mode_options(mode)) if mode else {}
    for name, value in (options or {}).items():
        patches[_known_option(name, torch._inductor.list_options())] = value
    count = sum(node.target in _LEARNERS for node in graph_module.graph.nodes)
    if count:
        _LOG.info("graph with %d ACMs compiled by Inductor, each ACM as one operator", count)
    else:
        _LOG.info("graph without ACMs compiled by Inductor as it is; acm.rewrite(model, acm.plan(model, x)) makes some")
    return compile_fx(graph_module, example_inputs, config_patches=patches)


def _known_option(name: str, known: list[str]) -> str:
    plain = name.replace("-", "_")
    if plain not in known:
        raise UsageError(f"unknown option {name!r} of backend 'acm'{did_you_mean(plain, known)}")
    return plain
