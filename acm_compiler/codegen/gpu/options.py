"""What Triton is asked to build every kernel with."""

from __future__ import annotations


def kernel_options(*, warps: int, stages: int | None = None) -> dict[str, int]:
    """Options of a launch or a build; `stages` of the pipeline, None for Triton's own number.

    Multiplications and additions are fused, whatever Triton's default is: it is to change with 3.10.
    """
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return options if stages is None else options | {"num_stages": stages}
