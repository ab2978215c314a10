"""Refuses training under DistributedDataParallel in which parameters take no part, before torch fails in its words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from acm_compiler.errors import UsageError


def refuse_idle(name: str, parameters: Iterable[nn.Parameter], *, what: str, fix: str) -> None:
    """Raise UsageError where the wrapper whose forward runs waits for gradients of `parameters`, which get none.

    name: of the ACM; `what` takes no part, and `fix` is what to do about it.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or wrapper.find_unused_parameters or wrapper.static_graph:
        return
    if wrapper.require_backward_grad_sync and any(parameter.requires_grad for parameter in parameters):
        raise UsageError(
            f"{what} take no part in this step, and DistributedDataParallel waits for the gradients of all parameters",
            where=name,
            fix=fix,
        )
