"""Statistics of a site, kept while the unmodified model runs: moments, metric, sampled tokens, whole examples.

Sums over single tokens miss errors that all tokens of an example share; a few examples kept whole show them.
Shapes: T tokens, P backward passes, D in, O out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acm_compiler.acm.precision import float64_device
from acm_compiler.calibration.moments import Moments, Reservoir, SecondMoment, SymmetricSum
from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.passes.rewrite.dense_region import DenseWeights
from acm_compiler.passes.rewrite.offload import kept
from acm_compiler.planning.decisions import PlannedSite
from acm_compiler.runtime import ranks

# tokens of the examples that are kept whole, as a part of the sample
_WHOLE = 0.5


class SiteRecord:
    """Fed by the site's tap and by gradients; x [T, D] its input, o [T, O] the dense region's output.

    `moments` are of the hidden activation of an MLP and of the input of a linear site. `metric` is G = E[g g^T] of the
    gradient g at the output. `sample` holds inputs, weighted by |g|^2, `whole` the first examples with their
    gradients. `heard` is, for a linear site, `moments` with |g|^2 for weights. `shown` holds as many inputs of an MLP,
    in bfloat16, as that argument says: those that its learners are trained on; None where there are none.
    Several processes see a part of the data each: `tokens` are those of all, the rest is from `join` on. `calls`: real
    tokens of this one's calls since the last `flush`.
    """

    def __init__(self, site: PlannedSite, dense: DenseWeights, *, sample: int, seed: int, shown: int = 0) -> None:
        self.site, self.dense = site, dense
        self.moments, self.heard, self.metric = Moments(), Moments(), SecondMoment()
        self.sample, self.whole = Reservoir(sample, seed), WholeExamples(int(sample * _WHOLE))
        self.shown = Reservoir(shown, seed) if shown and dense.last is not None else None
        self.home = float64_device(dense.device)
        self.tokens = 0
        self.calls: list[int] = []
        self._listens: list[tuple[Tensor, list[Tensor]]] = []

    @property
    def inputs(self) -> Tensor:
        """Spread [D, D] of a linear site's inputs, every token counting half as one, half as what listens to it."""
        plain = self.moments.covariance
        return (plain + self.heard.spread_around(self.moments.mean)) / 2 if self.heard.count else plain

    @torch.no_grad()
    def take(
        self, x_TD: Tensor, o_TO: Tensor, real_T: Tensor | None, example_T: Tensor, h_TF: Tensor | None = None
    ) -> None:
        """One call of the site; `example_T` numbers the examples. Its gradient, if one arrives, is taken too."""
        x_TD = self.add_moments(x_TD, real_T, h_TF)
        if real_T is not None:
            example_T = example_T[real_T]
        self.metric.count_tokens(len(x_TD))
        call = self.sample.offer(x_TD)
        take_whole = self.whole.offer(x_TD, example_T)
        listens: list[Tensor] = []
        self._listens.append((x_TD, listens))

        def take_gradient(g_TO: Tensor) -> None:
            with torch.no_grad():
                g_TO = g_TO.detach().reshape(-1, g_TO.shape[-1]).float()
                if real_T is not None:
                    g_TO = g_TO[real_T]
                self.metric.add(g_TO)
                listens_T = g_TO.square().sum(1)
                call.weigh(listens_T)
                take_whole(g_TO)
                listens.append(listens_T)

        if o_TO.requires_grad:
            o_TO.register_hook(take_gradient)

    @torch.no_grad()
    def add_moments(self, x_TD: Tensor, real_T: Tensor | None, h_TF: Tensor | None = None) -> Tensor:
        """Add one call of the site to the moments, and nothing else; gives its real tokens [T, D].

        h_TF: the hidden activation of an MLP, in the type of its dense weights, where it is known.
        """
        x_TD = (x_TD if real_T is None else x_TD[real_T]).to(self.dense.first[0][0].dtype)
        self.calls.append(len(x_TD))
        if self.dense.last is None:
            self.moments.add(x_TD)
        elif h_TF is None:
            self.moments.add(self.dense.hidden(x_TD))
        else:
            self.moments.add(h_TF if real_T is None else h_TF[real_T])
        if self.shown is not None:
            self.shown.offer(x_TD.bfloat16())
        return x_TD

    def flush(self, stream: Sequence[ranks.Call], *, forward_alone: bool) -> None:
        """After a batch's backward; `stream`: what all processes saw. TrainingFailed when something was not finite."""
        self.tokens += sum(call.tokens for call in stream)
        self.calls.clear()
        if not forward_alone:
            self.sample.flush(stream)
        if self.shown is not None:
            self.shown.flush(stream)
        for x_TD, listens in self._listens:
            if listens and self.dense.last is None:
                self.heard.add(x_TD, torch.stack(listens).sum(0))
        self._listens.clear()
        if not self.moments.is_finite:
            raise TrainingFailed(
                "the model computed values that are not finite",
                where=self.site.name,
                fix="look for such values in its weights and in the data, or run it in a wider floating type",
            )
        if not (self.metric.is_finite and self.heard.is_finite):
            raise TrainingFailed(
                "the gradient of the model's output is not finite here",
                where=self.site.name,
                fix="run the model in a wider floating type while calibrating",
            )

    def join(self) -> None:
        """Become what all processes saw, where several calibrate together."""
        if ranks.world() > 1:
            self.moments.join(self.site.dense_width or self.site.d_in, self.home)
            self.metric.join(self.site.d_out, self.home)
            if self.dense.last is None:
                self.heard.join(self.site.d_in, self.home)
            like = torch.empty(0, self.site.d_in, dtype=self.dense.first[0][0].dtype, device=self.dense.device)
            self.sample.join(like)
            self.whole.join()
            if self.shown is not None:
                self.shown.join(like.bfloat16())

    def require_tokens(self) -> None:
        """DataError when the site never ran on a real token."""
        if not self.tokens:
            raise DataError(
                "this site never saw a token of the calibration data",
                where=self.site.name,
                fix="give batches that use this part of the model and are not padding alone, or exclude the site",
            )

    @staticmethod
    def size_bytes(site: PlannedSite, tokens: int, sample: int, backward_passes: int, *, shown: int = 0) -> int:
        """Memory that a record of `site` takes once it has seen so many tokens."""
        widths = [site.dense_width or site.d_in, site.d_out, *([site.d_in] if site.last is None else [])]
        moments = sum(map(SymmetricSum.size_bytes, widths))
        whole = min(tokens, int(_WHOLE * sample)) * (site.d_in + backward_passes * site.d_out)
        inputs = 0 if site.last is None else 2 * min(tokens, shown) * site.d_in
        return moments + 4 * (min(tokens, sample) * (site.d_in + 1) + whole) + inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """x_TD: inputs of the tokens, g_TPO: gradients at their outputs, example_T: to which example each belongs.

    at_T: the place of each among the tokens of the site.
    """

    x_TD: Tensor
    g_TPO: Tensor
    example_T: Tensor
    at_T: Tensor


class WholeExamples:
    """The first examples of a stream, at least one, up to `tokens` tokens.

    Of several processes each keeps what it sees of them, and, until `join`, maybe more.
    """

    def __init__(self, tokens: int) -> None:
        self._most = tokens
        self._until = self._next = self._seen = 0
        self._counts: dict[int, int] = {}
        self._kept: list[tuple[Tensor, Tensor, Tensor, list[Tensor]]] = []

    def offer(self, x_TD: Tensor, example_T: Tensor) -> Callable[[Tensor], None]:
        """Keep what belongs to kept examples; gradients [T, O] of all of `x_TD` go to what comes back, each in a call.

        Examples are numbered from 0 in the order of the data; a site may be called several times for the same ones.
        """
        if len(example_T) and int(example_T.max()) >= self._next:
            self._decide(example_T)
        kept_T = example_T < self._until
        at_T = self._seen + torch.arange(len(kept_T), device=kept_T.device)
        self._seen += len(kept_T)
        if not kept_T.any():
            return _nothing
        x_TD = kept(x_TD[kept_T])
        gradients: list[Tensor] = []
        self._kept.append((x_TD, example_T[kept_T], at_T[kept_T], gradients))

        def take(g_TO: Tensor) -> None:
            gradients.append(kept(g_TO[kept_T].to(x_TD)))

        return take

    def _decide(self, example_T: Tensor) -> None:
        """Choose the examples of a new batch that are kept: none after one that was not."""
        counts = torch.bincount(example_T - self._next).tolist()
        if self._until == self._next:
            self._counts |= {example: count for example, count in enumerate(counts, start=self._next) if count}
            self._until = self._fitting(self._counts, self._next + len(counts))
        self._next += len(counts)

    def _fitting(self, counts: Mapping[int, int], following: int) -> int:
        """The number of the first example that is not kept, by the tokens of each, at least 1; else `following`."""
        total = 0
        for example in sorted(counts):
            total += counts[example]
            if total > self._most:
                return max(1, example)
        return following

    def join(self) -> None:
        """Keep what fits with the examples that other processes saw."""
        counts = {example: count for own in ranks.gathered(self._counts) for example, count in own.items()}
        until = self._fitting(counts, self._next)
        owned = [(call, call[1] < until) for call in self._kept]
        self._kept = [(x[own], e[own], at[own], [g[own] for g in gs]) for (x, e, at, gs), own in owned if own.any()]

    def take(self) -> Whole | None:
        """Everything kept, which is held here no longer; None where nothing was."""
        heard = [(*parts, torch.stack(g, 1)) for *parts, g in self._kept if g]
        self._kept.clear()
        if not heard:
            return None
        x_TD, example_T, at_T, g_TPO = (torch.cat(parts) for parts in zip(*heard, strict=True))
        return Whole(x_TD=x_TD, g_TPO=g_TPO, example_T=example_T.unique(return_inverse=True)[1], at_T=at_T)


def _nothing(g_TO: Tensor) -> None:
    """Gradients of examples that are not kept."""
