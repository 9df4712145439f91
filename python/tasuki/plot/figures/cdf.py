"""Distributions over requests: what share was served within a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tasuki.plot.figures.common import (
    METRICS,
    by_workload,
    chosen,
    described,
    joined,
    limits_ms,
    number,
    spread,
    start_note,
)
from tasuki.plot.figures.marks import Axis, Curve, Figure, Guide, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import Results, Run

# A curve of more points looks no different; the tail keeps its own.
_SHARES = np.unique(np.concatenate([np.linspace(0, 1, 101), 1 - np.logspace(-4, -2, 20)]).round(5))
_LOG_SPAN = 3000.0  # how far below its top a logarithmic axis may reach
_ROUNDED = tuple(_SHARES.tolist())


def cdf(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """One panel for each latency; the PNG shows one load, the HTML offers all."""
    runs = [run for run in results.runs if any(_points(run, metric)[0] for metric in METRICS)]
    if not runs:
        return []
    picked = chosen(runs, options.load)
    groups = by_workload(runs)
    limits = limits_ms(picked, options)
    names = {
        id(run): run.load.text if len(groups) == 1 else joined((workload, run.load.text))
        for workload, group in groups.items()
        for run in group
    }
    panels = tuple(
        _panel(metric, runs, picked, names, colors, limits.get(metric))
        for metric in METRICS
        if any(_points(run, metric)[0] for run in picked)
    )
    coarse = any(
        curve.dashed and curve.choice == names[id(picked[0])]
        for panel in panels
        for curve in panel.curves
    )
    notes = [
        "Dashed: from the percentiles that a file keeps, not from its requests." if coarse else "",
        start_note(picked),
    ]
    return [
        Figure(
            name="cdf",
            title="Share of requests served within a time",
            subtitle=described(picked, picked[0].workload if len(groups) == 1 else ""),
            panels=panels,
            columns=min(3, len(panels)),
            choices=tuple(dict.fromkeys(names[id(run)] for run in runs)),
            choice=names[id(picked[0])],
            note=" ".join(note for note in notes if note),
        )
    ]


def _points(run: Run, metric: str) -> tuple[tuple[float, ...], tuple[float, ...], bool]:
    """(milliseconds, shares, whether from percentiles only) of the run's distribution."""
    answered = [request for request in run.requests if request.measured]
    if metric == "itl":
        values = [gap for request in answered for gap in request.gaps_ms()]
    else:
        values = [v for request in answered if (v := request.latency_ms(metric)) is not None]
    if not values:
        points = getattr(run, metric).quantiles()
        return tuple(v for v, _ in points), tuple(share for _, share in points), True
    quantiles = np.quantile(np.array(values), _SHARES)
    return tuple(float(f"{value:.5g}") for value in quantiles), _ROUNDED, False


def _panel(
    metric: str,
    runs: Sequence[Run],
    picked: Sequence[Run],
    names: Mapping[int, str],
    colors: Mapping[str, int],
    limit: float | None,
) -> Panel:
    curves = []
    for run in sorted(runs, key=lambda r: colors[r.label]):
        values, shares, coarse = _points(run, metric)
        if values:
            curves.append(
                Curve(
                    run.label,
                    values,
                    shares,
                    colors[run.label],
                    points=coarse,
                    dashed=coarse,
                    choice=names[id(run)],
                )
            )
    seen = [v for c in curves if c.choice == names[id(picked[0])] for v in c.x if v > 0]
    log = spread(np.quantile(seen, (0.02, 1.0)))
    if log:
        curves = [_in_sight(curve, max(seen)) for curve in curves]
    guides = (Guide("x", limit, f"SLO {number(limit)} ms"),) if limit else ()
    return Panel(
        x=Axis(f"{metric.upper()} (ms)", log=log, from_zero=not log),
        y=Axis("share", limits=(0.0, 1.02)),
        curves=tuple(curves),
        guides=guides,
        title=METRICS[metric],
    )


def _in_sight(curve: Curve, top: float) -> Curve:
    """The curve without what a logarithmic axis cannot show, or only by squeezing the rest.

    Chunks that were read together have gaps of nothing or next to it.
    """
    kept = [i for i, value in enumerate(curve.x) if value > top / _LOG_SPAN]
    return replace(
        curve,
        x=tuple(curve.x[i] for i in kept),
        y=tuple(curve.y[i] for i in kept),
    )
