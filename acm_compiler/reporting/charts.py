"""Charts: quality over cost, learners run by site, and load over time beside each clip's waveform."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from acm_compiler.evaluation import wording
from acm_compiler.evaluation.loads import Clip, ClipLoads
from acm_compiler.evaluation.results import BudgetResult, Evaluation, FixedResult, Result, SiteUse
from acm_compiler.reporting.figures import (
    Theme,
    add_legend,
    colours_of_k,
    dress,
    dress_top,
    key_of_k,
    mark_dense,
    new_figure,
    new_plot,
    series_colours,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_WIDE, _NARROW = (7.2, 4.1), (3.7, 3.9)  # inches, as all sizes here
_SITE_HEIGHT, _BUDGET_WIDTH, _NAMES_WIDTH = 0.22, 1.35, 2.2
_CLIP_HEIGHT = 1.5
_CLIP_COLUMNS = 600  # about one per pixel: more would only make the file larger
_Z95 = 1.96


def cost_chart(found: Evaluation, theme: Theme, *, narrow: bool = False) -> Figure:
    """The metric over the share of the dense model's MACs; `narrow` for phones."""
    figure, axes = new_plot(*(_NARROW if narrow else _WIDE), theme)
    bounds = low, high = _bounds(found)
    _draw_gates(axes, found, theme)
    _draw_fixed(axes, found.fixed, theme, bounds=bounds)
    if found.metric.dense is not None:
        mark_dense(axes, found.metric.dense, theme)
    axes.set_ylim(low, high)
    axes.set_xlim(*_reach(found, bounds))
    axes.set_xlabel("MACs, share of the dense model (modelled)")
    axes.set_ylabel(f"{found.metric.name} (measured)")
    axes.xaxis.set_major_formatter(lambda x, _: wording.percent(x, 0))
    if found.metric.is_share:
        axes.yaxis.set_major_formatter(lambda y, _: wording.percent(y, 0 if high - low > 0.04 else 1))
    _mark_budgets(axes, found, theme, narrow=narrow)
    _name_hidden(axes, found, theme, narrow=narrow)
    add_legend(figure, theme, columns=1 if narrow else 3)
    return figure


def _mark_budgets(axes: Axes, found: Evaluation, theme: Theme, *, narrow: bool) -> None:
    """The budgets asked for, on an axis of their own above the plot; those too close to the last are left out."""
    left, right = axes.get_xlim()
    room = (0.11 if narrow else 0.06) * (right - left)
    shown: list[BudgetResult] = []
    for budget in sorted(found.budgets, key=lambda b: b.model_share):
        if not shown or budget.model_share - shown[-1].model_share >= room:
            shown.append(budget)
    top, names = axes.secondary_xaxis("top"), found.names
    top.set_xticks([b.model_share for b in shown], [names[b.asked] for b in shown])
    top.set_xlabel("budget" if narrow else "budget (share of the learners' MACs)", fontsize=9, labelpad=5)
    dress_top(top, theme)
    for budget in shown:
        axes.axvline(budget.model_share, color=theme.line, linewidth=0.8, zorder=0)


def _bounds(found: Evaluation) -> tuple[float, float]:
    """The part of the metric worth looking at: what the gates reach, and as much again on the worse side."""
    sign = -1 if found.metric.lower_is_better else 1
    gates = [sign * w for result in found.budgets for w in (*_whiskers(found, result), result.metric)]
    fixed = [sign * result.metric for result in found.fixed]
    best = max([*fixed, *gates, *([] if found.metric.dense is None else [sign * found.metric.dense])])
    worst = min(gates or fixed)
    span = max(best - worst, 0.02 * abs(best), 1e-6)
    shown = min([worst, *(value for value in fixed if value > worst - span)])
    pad = max(0.12 * (best - shown), 0.02 * abs(best), 1e-6)
    low, high = sorted((sign * (shown - 1.2 * pad), sign * (best + pad)))
    return low, high


def _reach(found: Evaluation, bounds: tuple[float, float]) -> tuple[float, float]:
    """The part of the cost axis that holds what is shown, to the nearest tenth outwards."""
    shares = [r.model_share for r in (*found.budgets, *found.fixed) if bounds[0] <= r.metric <= bounds[1]]
    return max(0.0, math.floor(10 * min(shares) - 0.3) / 10), max(1.05, 1.05 * max(shares))


def _whiskers(found: Evaluation, result: Result) -> tuple[float, float]:
    """The ends of the 95 % interval: of the difference to the dense model where it is known, else of the metric."""
    if result.difference is not None and found.metric.dense is not None:
        return found.metric.dense + result.difference.low, found.metric.dense + result.difference.high
    return result.metric - _Z95 * result.metric_error, result.metric + _Z95 * result.metric_error


def _draw_gates(axes: Axes, found: Evaluation, theme: Theme) -> None:
    results: Sequence[BudgetResult] = sorted(found.budgets, key=lambda b: b.model_share)
    x, y = [b.model_share for b in results], [b.metric for b in results]
    for result in results:
        axes.plot(
            [result.model_share] * 2, _whiskers(found, result), color=theme.gates, alpha=0.35, linewidth=5, zorder=2
        )
    axes.plot(x, y, "-o", color=theme.gates, linewidth=2, markersize=6, label="gates choose k, at a budget", zorder=5)


def _draw_fixed(axes: Axes, results: Sequence[FixedResult], theme: Theme, *, bounds: tuple[float, float]) -> None:
    if not results:
        return
    results = sorted(results, key=lambda f: f.model_share)
    x, y = [f.model_share for f in results], [f.metric for f in results]
    style: dict[str, Any] = {"color": theme.fixed, "linewidth": 1.5, "markersize": 5, "markerfacecolor": "none"}
    axes.plot(x, y, "--s", label="every token runs k learners", zorder=3, **style)
    for result in results:
        if bounds[0] < result.metric < bounds[1]:
            axes.annotate(
                f"k = {result.k}",
                (result.model_share, result.metric),
                xytext=(6, -12),
                textcoords="offset points",
                color=theme.fixed,
                fontsize=9,
                zorder=6,
                bbox={"facecolor": theme.surface, "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
            )


def _name_hidden(axes: Axes, found: Evaluation, theme: Theme, *, narrow: bool) -> None:
    """Name the fixed k that lie outside of what is drawn, and where."""
    low, high = axes.get_ylim()
    for outside, place, y in (("below", "bottom", 0.02), ("above", "top", 0.98)):
        hidden = [f for f in found.fixed if (f.metric < low if outside == "below" else f.metric > high)]
        if not hidden:
            continue
        shown = [f"k = {f.k}" + ("" if narrow else f" ({wording.score(f.metric, found.metric)})") for f in hidden]
        axes.annotate(
            f"{outside} this part of the axis: {', '.join(shown)}",
            (0.99, y),
            xycoords="axes fraction",
            ha="right",
            va=place,
            color=theme.fixed,
            fontsize=8,
            zorder=6,
        )


def k_chart(found: Evaluation, theme: Theme) -> Figure:
    """Stacked bars: the share of a site's tokens that ran k = 0, 1, ..., N, at every budget."""
    from matplotlib.patches import Patch

    names = [site.name for site in found.budgets[0].per_site]
    key = key_of_k([len(site.tokens_by_k) - 1 for site in found.budgets[0].per_site])
    figure = new_figure(_NAMES_WIDTH + _BUDGET_WIDTH * len(found.budgets), 1.1 + _SITE_HEIGHT * len(names))
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
    handles = [Patch(facecolor=colour, label=label) for label, colour in key]
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


def clip_chart(loads: ClipLoads, theme: Theme, names: Mapping[float, str]) -> Figure:
    """One row per clip: the waveform in grey, what is speech shaded, and one line per budget, named by `names`."""
    figure = new_figure(_WIDE[0], 0.6 + _CLIP_HEIGHT * len(loads.clips))
    rows = figure.subplots(len(loads.clips), 1, squeeze=False)[:, 0]
    for axes, clip in zip(rows, loads.clips, strict=True):
        _draw(axes, clip, loads.rate, theme, names)
    rows[-1].set_xlabel("seconds" if loads.rate else "samples")
    handles, labels = rows[0].get_legend_handles_labels()
    add_legend(figure, theme, columns=4, handles=handles, labels=labels)
    figure.supylabel("share of learners run (k / N)", fontsize=9, color=theme.muted)
    return figure


def _draw(axes: Axes, clip: Clip, rate: int | None, theme: Theme, names: Mapping[float, str]) -> None:
    dress(axes, theme)
    end = len(clip.samples) / (rate or 1)
    places, low, high = envelope(clip.samples)
    axes.fill_between(places * end, 0.5 + 0.5 * low, 0.5 + 0.5 * high, color=theme.muted, alpha=0.35, linewidth=0)
    if clip.foreground is not None:
        runs = [(start * end, (stop - start) * end) for start, stop in stretches(clip.foreground)]
        axes.broken_barh(runs, (0, 1), facecolor=theme.fixed, alpha=0.12, linewidth=0, label="speech")
    budgets = sorted(clip.loads)
    for budget, colour in zip(budgets, series_colours(len(budgets)), strict=True):
        load = np.array([column.mean() for column in _columns(clip.loads[budget].numpy())])
        axes.step(_middles(load) * end, load, where="mid", color=colour, linewidth=1.3, label=f"budget {names[budget]}")
    axes.set(xlim=(0, end), ylim=(0, 1.02))


def envelope(samples: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places in [0, 1], and the lowest and highest value around each, the loudest being 1."""
    loudest = float(samples.abs().max()) or 1.0
    columns = _columns(samples.numpy() / loudest)
    low, high = np.array([column.min() for column in columns]), np.array([column.max() for column in columns])
    return _middles(low), low, high


def stretches(foreground: Tensor) -> list[tuple[float, float]]:
    """Beginning and end, in [0, 1], of each unbroken stretch of columns that are mostly foreground."""
    columns = _columns(foreground.float().numpy())
    there = np.array([False, *(column.mean() >= 0.5 for column in columns), False])
    edges = np.flatnonzero(there[1:] != there[:-1]) / len(columns)
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _columns(values: np.ndarray) -> list[np.ndarray]:
    """Columns of a clip's chart, each the values that it shows."""
    return np.array_split(values, min(_CLIP_COLUMNS, len(values)))


def _middles(column: np.ndarray) -> np.ndarray:
    return (np.arange(len(column)) + 0.5) / len(column)
