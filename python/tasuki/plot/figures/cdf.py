"""Distributions over requests: what share was served within a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    seen = {metric: [_Seen.of(run, metric) for run in results.runs] for metric in METRICS}
    measured = {id(each.run) for all_of in seen.values() for each in all_of if each.values}
    runs = [run for run in results.runs if id(run) in measured]
    if not runs:
        return []
    groups = by_workload(runs)
    names = {
        id(run): run.load.text if len(groups) == 1 else joined((workload, run.load.text))
        for workload, group in groups.items()
        for run in group
    }
    choice = names[id(chosen(runs, options.load)[0])]
    picked = [run for run in runs if names[id(run)] == choice]
    limits = limits_ms(picked, options)
    panels = []
    for metric, all_of in seen.items():
        curves = [each.curve(names[id(each.run)], colors) for each in all_of if each.values]
        if any(curve.choice == choice for curve in curves):
            panels.append(_panel(metric, curves, choice, limits.get(metric)))
    coarse = any(c.dashed and c.choice == choice for panel in panels for c in panel.curves)
    notes = [
        "Dashed: from the percentiles that a file keeps, not from its requests." if coarse else "",
        start_note(picked),
    ]
    return [
        Figure(
            name="cdf",
            title="Share of requests served within a time",
            subtitle=described(picked, next(iter(groups)) if len(groups) == 1 else ""),
            panels=tuple(panels),
            columns=min(3, len(panels)),
            choices=tuple(dict.fromkeys(names[id(run)] for run in runs)),
            choice=choice,
            note=" ".join(note for note in notes if note),
        )
    ]


@dataclass(frozen=True, slots=True)
class _Seen:
    """How a run's requests, or the gaps between their tokens, spread.

    Attributes:
        values: In milliseconds, rising; empty: not known.
        shares: What share of all took no longer.
        coarse: Whether from the file's percentiles only.
    """

    run: Run
    values: tuple[float, ...]
    shares: tuple[float, ...]
    coarse: bool

    @classmethod
    def of(cls, run: Run, metric: str) -> _Seen:
        """Reckoned from the run's requests, else from its statistics."""
        answered = [request for request in run.requests if request.measured]
        if metric == "itl":
            values = [gap for request in answered for gap in request.gaps_ms()]
        else:
            values = [v for request in answered if (v := request.latency_ms(metric)) is not None]
        if not values:
            points = getattr(run, metric).quantiles()
            return cls(run, tuple(v for v, _ in points), tuple(share for _, share in points), True)
        quantiles = np.quantile(np.array(values), _SHARES)
        return cls(run, tuple(float(f"{value:.5g}") for value in quantiles), _ROUNDED, False)

    def curve(self, choice: str, colors: Mapping[str, int]) -> Curve:
        """As a line of its label's colour, with points where there are few."""
        color = colors[self.run.label]
        return Curve(
            self.run.label,
            self.values,
            self.shares,
            color,
            points=self.coarse,
            dashed=self.coarse,
            choice=choice,
        )


def _panel(metric: str, curves: list[Curve], choice: str, limit: float | None) -> Panel:
    curves = sorted(curves, key=lambda curve: curve.color)
    first = [v for curve in curves if curve.choice == choice for v in curve.x if v > 0]
    log = bool(first) and spread(np.quantile(first, (0.02, 1.0)))
    if log:
        curves = [_in_sight(curve, max(first)) for curve in curves]
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
