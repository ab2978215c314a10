"""The sites whose tokens lie in an example's own order: those that can be shown along a sequence or in a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from acm_compiler.planning.plan import Plan


def ordered_tokens(k: Mapping[str, Tensor], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Each such site's name and k by call, [B, calls, tokens]; k: as `acm.record` gives it, [B, calls * tokens]."""
    for name, k_BS in k.items():
        site = plan.site(name)
        # windows and beams come in an order of their own
        if site.layout is not None and site.layout.folds == 1 and k_BS.shape[1] % site.calls == 0:
            yield name, k_BS.unflatten(1, (site.calls, -1))
