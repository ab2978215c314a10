"""What one site shows while the unmodified model runs: moments, the metric of its output, a sample of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.acm.precision import float64_device
from acm_compiler.calibration import ranks
from acm_compiler.calibration.dense_weights import DenseWeights
from acm_compiler.calibration.moments import Moments, Reservoir, SecondMoment
from acm_compiler.calibration.whole_examples import WholeExamples
from acm_compiler.errors import DataError, TrainingFailed
from acm_compiler.planning.plan import PlannedSite

# tokens of the examples that are kept whole, as a part of the sample
_WHOLE = 0.5


class SiteRecord:
    """Fed by the site's tap and by gradients; x [T, D] its input, o [T, O] the dense region's output.

    `moments` are of the hidden activation of an MLP and of the input of a linear site. `metric` is G = E[g g^T] of the
    gradient g at the output. `sample` holds inputs, weighted by |g|^2, `whole` the first examples with their
    gradients. `heard` is, for a linear site, `moments` with |g|^2 for weights.
    """

    def __init__(self, site: PlannedSite, dense: DenseWeights, *, sample: int, seed: int) -> None:
        self.site, self.dense, self.seed = site, dense, seed
        self.moments, self.heard, self.metric = Moments(), Moments(), SecondMoment()
        self.sample, self.whole = Reservoir(sample, seed), WholeExamples(int(sample * _WHOLE))
        self.home = float64_device(dense.device)
        self._listens: list[tuple[Tensor, list[Tensor]]] = []

    @property
    def tokens(self) -> int:
        """Real tokens seen."""
        return int(self.moments.count)

    @property
    def inputs(self) -> Tensor:
        """Spread [D, D] of a linear site's inputs, every token counting half as one, half as what listens to it."""
        plain = self.moments.covariance
        return (plain + self.heard.spread_around(self.moments.mean)) / 2 if self.heard.count else plain

    @torch.no_grad()
    def take(self, x_TD: Tensor, o_TO: Tensor, real_T: Tensor | None, example_T: Tensor) -> None:
        """One call of the site; `example_T` numbers the examples. Its gradient, if one arrives, is taken too."""
        if real_T is not None:
            x_TD, example_T = x_TD[real_T], example_T[real_T]
        x_TD = x_TD.to(self.dense.first[0][0].dtype)
        self.moments.add(x_TD if self.dense.last is None else self.dense.hidden(x_TD))
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

    def settle(self) -> None:
        """After a batch's backward. TrainingFailed when something was not finite."""
        self.sample.settle()
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
        if not self.metric.is_finite:
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
            self.sample.join(self.dense.device)

    def require_tokens(self) -> None:
        """DataError when the site never ran on a real token."""
        if not self.tokens:
            raise DataError(
                "this site never saw a token of the calibration data",
                where=self.site.name,
                fix="give batches that use this part of the model, or exclude the site from the plan",
            )

    @staticmethod
    def size_bytes(site: PlannedSite, sample: int, projections: int) -> int:
        """Memory that a record of `site` takes, and what fitting it adds."""
        features = site.dense_width or site.d_in
        heard = site.d_in**2 if site.last is None else 0
        whole = int(_WHOLE * sample) * (site.d_in + projections * site.d_out)
        return 8 * (features**2 + site.d_out**2 + heard) + 4 * (sample * (site.d_in + 1) + whole)
