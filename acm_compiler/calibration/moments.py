"""Mean, covariance, second moment and a bounded sample of a stream of vectors.

Products are taken in fp32 block by block and added up in float64. T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from acm_compiler.acm.precision import float64_device, to_float64
from acm_compiler.passes.rewrite.offload import kept, let_go
from acm_compiler.runtime import ranks

_BLOCK = 4096


class Moments:
    """Running mean [F] and covariance [F, F] in float64.

    Sums are taken around the mean of the first block, so that a mean that is large beside the spread costs no digits.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self._shift: Tensor | None = None
        self._sum = torch.zeros((), device="cpu")
        self._products = SymmetricSum()

    def add(self, v_TF: Tensor, weight_T: Tensor | None = None) -> None:
        """Take in `v_TF`, every vector once or as often as `weight_T` says."""
        if not v_TF.shape[0]:
            return
        home = float64_device(v_TF.device)
        if self._shift is None:
            self._shift = v_TF.mean(0)
            self._sum = torch.zeros(v_TF.shape[1], dtype=torch.float64, device=home)
        for first in range(0, len(v_TF), _BLOCK):
            shifted = v_TF[first : first + _BLOCK] - self._shift
            weighed = shifted if weight_T is None else shifted * weight_T[first : first + _BLOCK, None].to(v_TF)
            self._sum += to_float64(weighed.sum(0))
            self._products.add(shifted, weighed)
        self.count += len(v_TF) if weight_T is None else float(to_float64(weight_T).sum())

    @property
    def mean(self) -> Tensor:
        """Mean [F], float64."""
        assert self._shift is not None
        return to_float64(self._shift) + self._sum / self.count

    @property
    def covariance(self) -> Tensor:
        """Covariance [F, F], float64, divided by the number of tokens."""
        offset = self._sum / self.count
        return self._products.value(len(offset), offset.device) / self.count - torch.outer(offset, offset)

    def spread_around(self, mean_F: Tensor) -> Tensor:
        """Second moment [F, F] around another mean."""
        offset = self.mean - mean_F
        return self.covariance + torch.outer(offset, offset)

    @property
    def is_finite(self) -> bool:
        """True if everything seen so far was finite, and its squares."""
        return bool(self._sum.isfinite().all()) and self._products.is_finite

    def join(self, features: int, home: torch.device) -> None:
        """Become the moments of what all processes saw."""
        own_mean = self.mean if self.count else torch.zeros(features, dtype=torch.float64, device=home)
        products = torch.zeros(features, features, dtype=torch.float64, device=home)
        count = ranks.total(torch.tensor(self.count, dtype=torch.float64, device=home))
        mean = ranks.total(own_mean * self.count) / count.clamp_min(torch.finfo(count.dtype).tiny)
        if self.count:
            products = self.count * self.spread_around(mean)
        self._products.replace(ranks.total(products))
        self.count, self._shift, self._sum = float(count), mean, torch.zeros_like(mean)


class SecondMoment:
    """Running E[g g^T], [F, F] in float64, around zero. Tokens whose `g` is known to be zero only count."""

    def __init__(self) -> None:
        self.count = 0
        self._products = SymmetricSum()

    def add(self, g_TF: Tensor) -> None:
        """Take in `g_TF`."""
        self._products.add(g_TF, g_TF)

    def count_tokens(self, tokens: int) -> None:
        """Record the number of tokens, with a `g` or without."""
        self.count += tokens

    @property
    def is_finite(self) -> bool:
        """True if everything seen so far was finite."""
        return self._products.is_finite

    def join(self, features: int, home: torch.device) -> None:
        """Become the moment of what all processes saw."""
        self._products.replace(ranks.total(self._products.value(features, home)))
        self.count = int(ranks.total(torch.tensor(self.count, device=home)))

    @property
    def trace(self) -> float:
        """E|g|^2."""
        return self._products.trace / max(1, self.count)

    def value(self, features: int, device: torch.device) -> Tensor:
        """E[g g^T], zeros if there never was a `g`."""
        return self._products.value(features, float64_device(device)) / max(1, self.count)


class Reservoir:
    """At most `size` tokens of a stream, each with the same chance: their vectors [R, F] and one weight each.

    A token's vector comes first and its weight, if any, later; `flush` joins them. The stream is that of all
    processes: each draws for all of it, alike, and holds zeros in place of what others have seen, until `join`.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seen = size, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._vectors, self._weights = torch.zeros(0, 0, device="cpu"), torch.zeros(0, device="cpu")
        self._pending: list[_Call] = []

    def offer(self, v_TF: Tensor) -> _Call:
        """Take in tokens; their weights go to the `_Call` that comes back.

        Which are kept is drawn now or, of several processes, once it is known what the others saw before them.
        """
        call = _Call(v_TF)
        if ranks.world() == 1:
            call.keep(*self._draw(len(v_TF)))
        self._pending.append(call)
        return call

    def _draw(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Rows to keep and where to put them; of two rows for one slot the later wins (algorithm R)."""
        order = torch.arange(self.seen, self.seen + tokens, device="cpu")
        draws = (torch.rand(tokens, generator=self._generator, dtype=torch.float64, device="cpu") * (order + 1)).long()
        slots = torch.where(order < self.size, order, draws)
        self.seen += tokens
        rows = torch.nonzero(slots < self.size).flatten()
        last = dict(zip(slots[rows].tolist(), rows.tolist(), strict=True))
        return torch.tensor(list(last.values()), dtype=torch.long), torch.tensor(list(last), dtype=torch.long)

    def flush(self, stream: Iterable[ranks.Call] = ()) -> None:
        """Move what was drawn since the last call into the sample; tokens without a weight weigh nothing.

        stream: of several processes, what all have seen since then.
        """
        for call in self._pending if ranks.world() == 1 else self._drawn_from(stream):
            self._make_room(call.vectors)
            slots = call.slots.to(self._vectors.device)
            self._vectors[slots] = call.vectors
            self._weights[slots] = 0.0 if call.weights is None else call.weights
        let_go(self._vectors)
        self._pending.clear()

    def _drawn_from(self, stream: Iterable[ranks.Call]) -> Iterator[_Call]:
        """This process's calls with what is drawn of them; what others overwrite is zero by then."""
        for seen in stream:
            rows, slots = self._draw(seen.tokens)
            own = (rows >= seen.start) & (rows < seen.start + seen.own)
            others = slots[~own & (slots < len(self._weights))].to(self._vectors.device)
            self._vectors[others], self._weights[others] = 0, 0
            if seen.number is not None:
                call = self._pending[seen.number]
                call.keep(rows[own] - seen.start, slots[own])
                yield call

    def _make_room(self, like: Tensor) -> None:
        """Hold as many as were seen, at least twice as many as before."""
        if not len(self._weights):
            self._vectors, self._weights = like.new_zeros(0, like.shape[1]), like.new_zeros(0, dtype=torch.float32)
        held = len(self._weights)
        if (wanted := min(self.seen, self.size)) > held:
            rows = min(self.size, max(wanted, 2 * held))
            # zeros that take no memory, so that a sample in a file is never whole anywhere else; where there is no file
            # `kept` leaves them as they are, and they are given memory first
            zeros = self._vectors.new_zeros(1, 1).expand(rows, self._vectors.shape[1])
            if not (grown := kept(zeros)).is_contiguous():
                grown = kept(zeros.contiguous())
            grown[:held] = self._vectors
            self._vectors, self._weights = grown, F.pad(self._weights, (0, rows - held))

    def join(self, like: Tensor) -> None:
        """Become the sample of what all processes saw, in the type of `like` [0, F]."""
        self._make_room(like)
        wide = torch.promote_types(like.dtype, torch.float32)  # not every backend adds up bfloat16
        self._vectors = kept(ranks.total(self.vectors.to(wide)).to(like))
        self._weights = ranks.total(self.weights)

    @property
    def holds_all(self) -> bool:
        """True where every token of the stream was kept, in its order."""
        return self.seen <= self.size

    @property
    def vectors(self) -> Tensor:
        """The sample, [R, F]."""
        return self._vectors[: self.seen]

    @property
    def weights(self) -> Tensor:
        """The weight of each token of the sample, fp32 [R]."""
        return self._weights[: self.seen]


class _Call:
    """The tokens of one call of a site, and later those of them that a reservoir keeps."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors, self.slots = vectors, torch.zeros(0, dtype=torch.long)
        self.weights: Tensor | None = None
        self._rows: Tensor | None = None

    def keep(self, rows: Tensor, slots: Tensor) -> None:
        """Keep these tokens alone, one for each of these slots."""
        self._rows, self.slots = rows.to(self.vectors.device), slots
        self.vectors = self.vectors[self._rows]
        self.weights = None if self.weights is None else self.weights[self._rows]

    def weigh(self, weights_T: Tensor) -> None:
        """Add to the weights of all tokens of the call, [T]."""
        more = (weights_T if self._rows is None else weights_T[self._rows]).float()
        self.weights = more if self.weights is None else self.weights + more


# rows of a symmetric product that are computed at once, from the diagonal on
_ROWS = 256


class SymmetricSum:
    """A running sum [F, F] in float64 of products a^T b that are symmetric.

    Only what is on or above the diagonal is computed and kept, in blocks of rows: little more than half of it.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []  # rows [R, F - first] of `first`, from the diagonal on

    @staticmethod
    def size_bytes(features: int) -> int:
        """Memory that the sum of so many features takes."""
        return 4 * features * (features + min(features, _ROWS))

    def add(self, a_TF: Tensor, b_TF: Tensor) -> None:
        """Add a^T b, taken in the type of `a` and `b`."""
        features, home = a_TF.shape[1], float64_device(a_TF.device)
        if not self._blocks:
            self.replace(torch.zeros(features, features, dtype=torch.float64, device=home))
        for first, block in zip(range(0, features, _ROWS), self._blocks, strict=True):
            block += (a_TF[:, first : first + _ROWS].T @ b_TF[:, first:]).to(block.device)
            let_go(block)

    def value(self, features: int, home: torch.device) -> Tensor:
        """The sum; zeros, on `home`, where nothing was added."""
        value_FF = torch.zeros(features, features, dtype=torch.float64, device=home)
        first = 0
        for block in self._blocks:
            end = first + len(block)
            value_FF[first:end, first:] = block
            value_FF[end:, first:end] = block[:, len(block) :].T
            corner = value_FF[first:end, first:end]
            corner.copy_(corner.triu() + corner.triu(1).T)
            first = end
        return value_FF

    @property
    def trace(self) -> float:
        """The sum of the diagonal; 0 where nothing was added."""
        return sum(float(block.trace()) for block in self._blocks)

    @property
    def is_finite(self) -> bool:
        """True if everything on the diagonal is finite."""
        finite = all(bool(block.diagonal().isfinite().all()) for block in self._blocks)
        let_go(self._blocks)  # a page of the file was read for every row
        return finite

    def replace(self, value_FF: Tensor) -> None:
        """Become this symmetric matrix."""
        self._blocks = [kept(value_FF[at : at + _ROWS, at:].clone()) for at in range(0, len(value_FF), _ROWS)]
