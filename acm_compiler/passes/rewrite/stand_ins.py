"""Small modules that take the places around an ACM: pass-throughs (T) and the two ends of a stash (S)."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn

from acm_compiler.acm import ACM
from acm_compiler.errors import AcmError


class Stash(threading.local):
    """One value on its way from a site's first linear to its ACM, for each thread by itself.

    It holds one value at a time: a site's region runs to its end before it starts again. What an exception left
    behind is overwritten by the next call.
    """

    value: Tensor | None = None

    def __reduce__(self) -> tuple[type[Stash], tuple[()]]:
        # copies and pickles start empty; those of one site still share one
        return Stash, ()

    def take(self, site: str) -> Tensor:
        """The value, which is handed over once."""
        value, self.value = self.value, None
        if value is None:
            raise AcmError(
                "the site's last linear ran without its first one just before",
                where=site,
                expected="each run of the first linear to be followed by one of the last, in the same thread",
                fix="exclude this site from the plan",
            )
        return value


def dummy(x: Tensor, width: int) -> Tensor:
    """A hidden value nobody reads: zeros [..., width], fresh, so that operations in place may write to it."""
    return x.new_zeros(*x.shape[:-1], width)


class PassThrough(nn.Module):
    """Stand-in for a module that tiles a site's region: hands its input on to the ACM."""

    def __init__(self, site: str) -> None:
        super().__init__()
        self.site = site

    def forward(self, input: Tensor) -> Tensor:
        return input

    def extra_repr(self) -> str:
        return f"to {self.site}"


class StashInput(nn.Module):
    """Stand-in for a site's first linear: keeps x for the ACM and hands on a dummy of the hidden width."""

    def __init__(self, site: str, *, stash: Stash | None, width: int) -> None:
        super().__init__()
        self.site, self.stash, self.width = site, stash, width

    def forward(self, input: Tensor) -> Tensor:
        if self.stash is not None:
            self.stash.value = input
        return dummy(input, self.width)

    def extra_repr(self) -> str:
        return f"to {self.site}"


class StashedACM(ACM):
    """An ACM in the place of a site's last linear: runs on the stashed x, and only looks at the shape it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stash = Stash()

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(self.stash.take(self.name))
        return y if y.shape[:-1] == x.shape[:-1] else y.reshape(*x.shape[:-1], y.shape[-1])
