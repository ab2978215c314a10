"""Sums over all examples of one setting of a model, added up batch by batch.

Do its learners follow what is in an image or a clip? That is mean k on the foreground over mean k on the background,
with its control: the same k shuffled over the places.
Shapes: B examples of a batch, E of all batches, L sites, S tokens, P places (patches of an image, frames of a clip).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from acm_compiler.evaluation.places import frame_foreground, frame_k, patch_foreground, patch_k
from acm_compiler.evaluation.results import ForegroundUse, Places, SiteUse
from acm_compiler.evaluation.statistics import Sample, Spent, resampled_means
from acm_compiler.planning.cost import learner_macs, macs_per_learner
from acm_compiler.planning.plan import Plan
from acm_compiler.runtime.meter import learners_run
from acm_compiler.runtime.usage import Usage

_ON, _OFF, _SHUFFLED_ON, _SHUFFLED_OFF = range(4)


class ForegroundTally:
    """Gathers, example by example, mean k on and off the foreground, as recorded and shuffled over the places.

    `seed` starts the shuffling.
    """

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._rows: list[Tensor] = []
        self._macs: list[Tensor] = []
        self._by_site: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._of: Places = "patches"

    def add(self, k: dict[str, Tensor], mask: Tensor) -> None:
        """Add one batch with its foreground, pixels [B, H, W] or samples [B, R].

        Examples without foreground or without background give nan and count nowhere.
        """
        self._of = "patches" if mask.dim() == 3 else "frames"
        placed = self._placed(k, mask)
        if not placed:
            self._rows.append(torch.full((len(mask), 4), torch.nan, dtype=torch.float64))
            self._macs.append(self._rows[-1][:, : _OFF + 1])
            return
        parts, costs = [], []
        for size in {k_BP.shape[1] for k_BP in placed.values()}:
            names = [name for name, k_BP in placed.items() if k_BP.shape[1] == size]
            k_LBP = torch.stack([placed[name].cpu() for name in names]).double()
            means_LB4 = self._means(k_LBP, _foreground_places(mask, size).cpu())
            known_B = ~means_LB4[0].isnan().any(1)
            for name, sums in zip(names, means_LB4[:, known_B, :2].sum(1), strict=True):
                self._by_site[name] = self._by_site.get(name, 0) + sums
            parts.append(means_LB4)
            costs += [macs_per_learner(self._plan.site(name)) for name in names]
        means_LB4 = torch.cat(parts)
        self._rows.append(means_LB4.mean(0))
        weights_L = torch.tensor(costs, dtype=torch.float64)
        self._macs.append(torch.einsum("l,lbm->bm", weights_L, means_LB4[..., : _OFF + 1]))

    def _placed(self, k: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """k [B, P] of the sites whose tokens have places; nan at padding."""
        if mask.dim() == 3:
            found = patch_k(k, self._plan, mask.shape[1], mask.shape[2])
            return {name: k_Bss.flatten(1) for name, k_Bss in found.items()}
        return frame_k(k, self._plan)

    def _means(self, k_LBP: Tensor, on_BP: Tensor) -> Tensor:
        """[L, B, 4]: mean k on and off the foreground, and both again with k shuffled over the real places."""
        real = ~k_LBP.isnan()
        k_LBP = k_LBP.nan_to_num()
        # padding comes last in the drawn order and in that of the places it is dealt out to
        drawn = torch.rand(k_LBP.shape, generator=self._generator, dtype=torch.float32, device="cpu")
        drawn = torch.where(real, drawn, 2.0).argsort(-1)
        places = (~real).int().argsort(dim=-1, stable=True)
        shuffled = k_LBP.scatter(-1, places, k_LBP.gather(-1, drawn))
        on, off = (on_BP & real).double(), (~on_BP & real).double()
        pairs = ((k_LBP, on), (k_LBP, off), (shuffled, on), (shuffled, off))
        return torch.stack([(k * part).sum(-1) / part.sum(-1) for k, part in pairs], dim=-1)

    def result(self, groups_E: Tensor) -> ForegroundUse | None:
        """The ratios over all examples added; None when no example had both foreground and background."""
        rows_E4 = torch.cat(self._rows) if self._rows else torch.empty(0, 4)
        known = ~rows_E4.isnan().any(1)
        if not known.any() or not rows_E4[known, _OFF].any():
            return None
        means = rows_E4[known].mean(0)
        on, off = torch.cat(self._macs)[known].mean(0).tolist()
        drawn_R4 = resampled_means(rows_E4[known], groups_E[known])
        return ForegroundUse(
            on=float(means[_ON]),
            off=float(means[_OFF]),
            ratio=float(means[_ON] / means[_OFF]),
            ratio_error=_error(drawn_R4[:, _ON] / drawn_R4[:, _OFF]),
            shuffled=float(means[_SHUFFLED_ON] / means[_SHUFFLED_OFF]),
            shuffled_error=_error(drawn_R4[:, _SHUFFLED_ON] / drawn_R4[:, _SHUFFLED_OFF]),
            examples=int(known.sum()),
            of=self._of,
            macs=on / off,
        )

    def site_ratio(self, name: str) -> float | None:
        """The ratio of one site; None where its tokens have no place, or none of its background runs a learner."""
        sums = self._by_site.get(name)
        return None if sums is None or sums[_OFF] == 0 else float(sums[_ON] / sums[_OFF])


def _error(ratios_R: Tensor) -> float:
    return float(ratios_R.std(correction=0))


def foreground_of(batch: dict[str, Tensor]) -> Tensor | None:
    """The mask that a batch carries, bool pixels [B, H, W] or samples [B, R]; None when it has none."""
    mask = batch.get("foreground")
    return mask if mask is not None and mask.dim() in (2, 3) else None


def _foreground_places(mask: Tensor, count: int) -> Tensor:
    """bool [B, P]: which of `count` places are foreground."""
    return patch_foreground(mask, math.isqrt(count)).flatten(1) if mask.dim() == 3 else frame_foreground(mask, count)


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
        self._tokens_by_k = {s.name: torch.zeros(s.learners + 1, dtype=torch.long, device="cpu") for s in plan.sites}
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
        """Keep what the outputs of one batch are compared by, [B, ...]."""
        self._kept.append(kept_B)

    @property
    def kept(self) -> Tensor:
        """Outputs kept of all examples, [E, ...]."""
        return torch.cat(self._kept)

    @property
    def spent(self) -> Spent:
        """The share that was reached, a mean over examples, and the score of every example."""
        return Spent(share=float(torch.cat(self._shares).nanmean()), score_E=torch.cat(self._scores))

    def result(self, sample: Sample, dense_E: Tensor | None) -> dict[str, Any]:
        """The fields of a `Result`; dense_E is the dense model's scores."""
        spent, macs = self.spent, torch.cat(self._macs)
        percentiles = torch.nanquantile(macs, macs.new_tensor([0.05, 0.95]))
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
            share=learners_run(counts) / max(int(counts.sum()), 1) / (len(counts) - 1),
            tokens_by_k=tuple(counts.tolist()),
            foreground_ratio=self._foreground.site_ratio(name) if self._foreground else None,
        )

    @property
    def dense_macs(self) -> float:
        """The dense model's MACs, the mean over examples."""
        return float(torch.cat(self._dense_macs).nanmean())

    def _pooled(self) -> float:
        counts = [(site, self._tokens_by_k[site.name]) for site in self._plan.sites]
        run, full = learner_macs((site, learners_run(tokens), int(tokens.sum())) for site, tokens in counts)
        return run / full if full else 0.0
