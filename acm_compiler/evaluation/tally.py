"""What one setting of a model did over all examples, added up batch by batch.

Shapes: B examples of a batch, E of all batches, S tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acm_compiler.evaluation.foreground import ForegroundTally, foreground_of
from acm_compiler.evaluation.results import SiteUse
from acm_compiler.evaluation.statistics import Sample, Spent
from acm_compiler.planning.cost import macs_per_learner
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.usage import Usage


class Tally:
    """Scores, shares and MACs of every example, and how many tokens of every site ran how many learners.

    Examples of padding alone have a score, but no share and no MACs: they are left out of means and percentiles.
    `seed` is that of its foreground control, which should differ from setting to setting.
    """

    def __init__(self, plan: Plan, *, seed: int = 0) -> None:
        self._plan, self._seed = plan, seed
        self._scores: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._shares: list[Tensor] = []
        self._macs: list[Tensor] = []
        self._dense_macs: list[Tensor] = []
        self._tokens_by_k = {site.name: torch.zeros(site.learners + 1, dtype=torch.long) for site in plan.sites}
        self._foreground: ForegroundTally | None = None

    def add(self, usage: Usage, score_B: Tensor, batch: dict[str, Tensor]) -> None:
        """Add what one forward used and how it scored."""
        self._scores.append(score_B)
        self._shares.append(usage.shares)
        padding = usage.shares.isnan()
        self._macs.append(usage.macs.masked_fill(padding, torch.nan))
        self._dense_macs.append(usage.dense_macs.masked_fill(padding, torch.nan))
        used = usage.k
        for name, k_BS in used.items():
            counts = self._tokens_by_k[name]
            counts += torch.bincount(k_BS[k_BS >= 0].long(), minlength=len(counts)).cpu()
        mask = foreground_of(batch)
        if mask is not None:
            self._foreground = self._foreground or ForegroundTally(self._plan, self._seed)
            self._foreground.add(used, mask)

    def keep(self, kept_B: Tensor) -> None:
        """Keep what the answers of one batch are to be compared by, [B, ...]."""
        self._kept.append(kept_B)

    @property
    def kept(self) -> Tensor:
        """What was kept of all examples, [E, ...]."""
        return torch.cat(self._kept)

    @property
    def spent(self) -> Spent:
        """The share that was reached, a mean over examples, and the score of every example."""
        return Spent(share=float(torch.cat(self._shares).nanmean()), score_E=torch.cat(self._scores))

    def result(self, sample: Sample, dense_E: Tensor | None) -> dict[str, Any]:
        """The fields of a `Result`; dense_E is the dense model's scores."""
        spent, macs = self.spent, torch.cat(self._macs)
        percentiles = torch.nanquantile(macs, torch.tensor([0.05, 0.95], dtype=macs.dtype))
        return {
            "reached": spent.share,
            "pooled": self._pooled(),
            "metric": sample.value(spent.score_E),
            "metric_error": sample.error(spent.score_E),
            "difference": None if dense_E is None else sample.difference(spent.score_E, dense_E),
            "model_share": float(macs.nanmean()) / self.dense_macs,
            "macs_mean": float(macs.nanmean()),
            "macs_p5": float(percentiles[0]),
            "macs_p95": float(percentiles[1]),
            "per_site": tuple(self._site(name) for name in self._tokens_by_k),
            "foreground": self._foreground.result(sample.groups_E) if self._foreground else None,
        }

    def _site(self, name: str) -> SiteUse:
        counts = self._tokens_by_k[name]
        return SiteUse(
            name=name,
            share=_mean_k(counts) / (len(counts) - 1),
            tokens_by_k=tuple(counts.tolist()),
            foreground_ratio=self._foreground.site_ratio(name) if self._foreground else None,
        )

    @property
    def dense_macs(self) -> float:
        """The dense model's MACs, the mean over examples."""
        return float(torch.cat(self._dense_macs).nanmean())

    def _pooled(self) -> float:
        run = full = 0.0
        for site in self._plan.sites:
            counts = self._tokens_by_k[site.name]
            learners = int(counts.sum()) * macs_per_learner(site)
            run, full = run + _mean_k(counts) * learners, full + site.learners * learners
        return run / full if full else 0.0


def _mean_k(counts: Tensor) -> float:
    k = torch.arange(len(counts))
    return float((k * counts).sum() / counts.sum().clamp_min(1))
