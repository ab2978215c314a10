"""Do load maps follow what is in the picture? Mean k on foreground over mean k on background, and its control.

Shapes: B pictures, L sites, P patches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acm_compiler.plans import Plan
from acm_compiler.report.bootstrap import resampled_means
from acm_compiler.report.evaluation import ForegroundUse
from acm_compiler.report.patches import patch_foreground, patch_k

_ON, _OFF, _SHUFFLED_ON, _SHUFFLED_OFF = range(4)


class ForegroundTally:
    """Gathers, picture by picture, mean k on and off the foreground, as recorded and shuffled over the patches.

    `seed` starts the shuffling.
    """

    def __init__(self, plan: Plan, seed: int) -> None:
        self._plan = plan
        self._rows: list[Tensor] = []
        self._by_site: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)

    def add(self, k: dict[str, Tensor], mask_BHW: Tensor) -> None:
        """Add one batch; pictures without foreground or without background give nan and count nowhere."""
        placed = patch_k(k, self._plan, *mask_BHW.shape[-2:])
        if not placed:
            self._rows.append(torch.full((len(mask_BHW), 4), torch.nan, dtype=torch.float64))
            return
        parts = []
        for side in {k_Bss.shape[-1] for k_Bss in placed.values()}:
            names = [name for name, k_Bss in placed.items() if k_Bss.shape[-1] == side]
            k_LBP = torch.stack([placed[name].flatten(1) for name in names]).cpu().double()
            means_LB4 = self._means(k_LBP, patch_foreground(mask_BHW, side).flatten(1).cpu())
            known_B = ~means_LB4[0].isnan().any(1)
            for name, sums in zip(names, means_LB4[:, known_B, :2].sum(1), strict=True):
                self._by_site[name] = self._by_site.get(name, 0) + sums
            parts.append(means_LB4)
        self._rows.append(torch.cat(parts).mean(0))

    def _means(self, k_LBP: Tensor, on_BP: Tensor) -> Tensor:
        """[L, B, 4]: mean k on and off the foreground, and both again with k shuffled."""
        order = torch.rand(k_LBP.shape, generator=self._generator).argsort(-1)
        shuffled = k_LBP.gather(-1, order)
        on, off = on_BP.double(), (~on_BP).double()
        pairs = ((k_LBP, on), (k_LBP, off), (shuffled, on), (shuffled, off))
        return torch.stack([(k * part).sum(-1) / part.sum(-1) for k, part in pairs], dim=-1)

    def result(self, groups_E: Tensor) -> ForegroundUse | None:
        """The ratios over all pictures added; None when no picture had both foreground and background."""
        rows_E4 = torch.cat(self._rows) if self._rows else torch.empty(0, 4)
        known = ~rows_E4.isnan().any(1)
        if not known.any() or not rows_E4[known, _OFF].any():
            return None
        means = rows_E4[known].mean(0)
        drawn_R4 = resampled_means(rows_E4[known], groups_E[known])
        return ForegroundUse(
            on=float(means[_ON]),
            off=float(means[_OFF]),
            ratio=float(means[_ON] / means[_OFF]),
            ratio_error=_error(drawn_R4[:, _ON] / drawn_R4[:, _OFF]),
            shuffled=float(means[_SHUFFLED_ON] / means[_SHUFFLED_OFF]),
            shuffled_error=_error(drawn_R4[:, _SHUFFLED_ON] / drawn_R4[:, _SHUFFLED_OFF]),
            examples=int(known.sum()),
        )

    def site_ratio(self, name: str) -> float | None:
        """The ratio of one site; None where its tokens have no place, or none of its background runs a learner."""
        sums = self._by_site.get(name)
        return None if sums is None or sums[_OFF] == 0 else float(sums[_ON] / sums[_OFF])


def _error(ratios_R: Tensor) -> float:
    return float(ratios_R.std(correction=0))


def foreground_of(batch: dict[str, Tensor]) -> Tensor | None:
    """The pixel mask bool [B, H, W] that a batch carries; None when it has none."""
    mask = batch.get("foreground")
    return mask if mask is not None and mask.dim() == 3 else None
