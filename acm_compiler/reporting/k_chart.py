"""The chart of how many learners each site's tokens ran: one row per site, one column per budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from acm_compiler.evaluation.results import Evaluation, SiteUse
from acm_compiler.reporting.figures import dress, new_figure
from acm_compiler.reporting.theme import Theme, colours_of_k, key_of_k

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW, _COLUMN, _NAMES = 0.22, 1.35, 2.2


def k_chart(found: Evaluation, theme: Theme) -> Figure:
    """Stacked bars: the share of a site's tokens that ran k = 0, 1, ..., N, at every budget."""
    names = [site.name for site in found.budgets[0].per_site]
    key = key_of_k([len(site.tokens_by_k) - 1 for site in found.budgets[0].per_site])
    height = 1.1 + _ROW * len(names)
    figure = new_figure(_NAMES + _COLUMN * len(found.budgets), height)
    grid = figure.subplots(1, len(found.budgets), sharey=True, squeeze=False)[0]
    for axes, budget in zip(grid, found.budgets, strict=True):
        dress(axes, theme)
        for row, site in enumerate(budget.per_site):
            _bar(axes, row, site)
        axes.set_title(f"budget {found.names[budget.asked]}", fontsize=9, color=theme.ink)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", "50", "100 %"], fontsize=8)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
    grid[0].set_yticks(range(len(names)), names, fontsize=8)
    grid[0].set_ylim(len(names) - 0.4, -0.6)
    handles = [_swatch(colour, label) for label, colour in key]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(key), frameon=False, fontsize=8, labelcolor=theme.ink
    )
    return figure


def _bar(axes, row: int, site: SiteUse) -> None:
    total = max(1, sum(site.tokens_by_k))
    left = 0.0
    for tokens, colour in zip(site.tokens_by_k, colours_of_k(len(site.tokens_by_k) - 1), strict=True):
        axes.barh(row, tokens / total, left=left, height=0.78, color=colour, linewidth=0)
        left += tokens / total


def _swatch(colour: str, label: str):
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, label=label)
