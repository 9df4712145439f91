"""How many requests per second each topology serves within the SLO."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tasuki.plot.figures.common import (
    by_label,
    described,
    divisors,
    hover,
    limits_ms,
    number,
    slo_text,
)
from tasuki.plot.figures.marks import GREY, Axis, Bars, Curve, Figure, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import GoodputSearch, Results, Run


def goodput(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """Bars of the searched rates (else of the best goodput seen), and what led there."""
    runs = [run for run in results.runs if run.goodput is not None]
    searches = list(results.searches)
    if not runs and not searches:
        return []
    divide_by, unit = divisors([*searches, *runs], options)
    # A bar is either searched or the best seen, never a mix of the two.
    bars = (
        _searched(searches, colors, divide_by, unit)
        if searches
        else _best_seen(runs, colors, divide_by, unit)
    )
    panels = [bars]
    if any(search.points for search in searches):
        panels.append(_attainment(searches, colors))
    rated = [run for run in runs if run.load.rate is not None]
    if len({run.load.rate for run in rated}) > 1:
        panels.append(_against_offered(rated, colors, divide_by, unit))
    limits = limits_ms([*searches, *runs], options)
    confidence = {s.confidence for s in searches if s.confidence is not None}
    note = f"SLO: {slo_text(limits)}." if limits else ""
    if len(confidence) == 1 and any(s.interval for s in searches):
        note += f" Whiskers: {confidence.pop():.0%} confidence."
    return [
        Figure(
            name="goodput",
            title="Goodput: requests within the SLO",
            subtitle=described([*searches, *runs]),
            panels=tuple(panels),
            columns=min(3, len(panels)),
            note=note.strip(),
        )
    ]


def _searched(
    searches: list[GoodputSearch],
    colors: Mapping[str, int],
    divide_by: Mapping[str, float],
    unit: str,
) -> Panel:
    names = tuple(dict.fromkeys(s.label for s in searches))
    last = {s.label: s for s in searches}
    rates = [(last[name].rate or 0.0) / divide_by[name] for name in names]
    edges = [_edges(last[name], divide_by[name]) for name in names]
    bars = Bars(
        "highest rate",
        tuple(float(i) for i in range(len(names))),
        tuple(rates),
        tuple(colors[name] for name in names),
        low=tuple(low for low, _ in edges),
        high=tuple(
            rate if math.isinf(high) else high for rate, (_, high) in zip(rates, edges, strict=True)
        ),
        labels=tuple(
            (("≥ " if math.isinf(high) else "") + number(rate) if rate else "none")
            + ("" if last[name].finished else "\nnot finished")
            for name, rate, (_, high) in zip(names, rates, edges, strict=True)
        ),
        hover=tuple(
            f"<b>{name}</b><br>{number(rate)} requests/s{unit}<br>"
            + (
                f"{number(low)} or more: no higher rate failed"
                if math.isinf(high)
                else f"between {number(low)} and {number(high)}"
            )
            for name, rate, (low, high) in zip(names, rates, edges, strict=True)
        ),
    )
    y = Axis(f"requests/s{unit}", from_zero=True)
    return Panel(
        Axis("", categories=names), y, bars=(bars,), title="highest rate that meets the SLO"
    )


def _edges(search: GoodputSearch, by: float) -> tuple[float, float]:
    low, high = search.interval or (search.rate or 0.0, search.rate or 0.0)
    return low / by, high / by


def _best_seen(
    runs: list[Run], colors: Mapping[str, int], divide_by: Mapping[str, float], unit: str
) -> Panel:
    best = {
        label: max(group, key=lambda run: run.goodput or 0.0)
        for label, group in by_label(runs).items()
    }
    names = tuple(sorted(best, key=lambda name: colors[name]))
    values = tuple((best[name].goodput or 0.0) / divide_by[name] for name in names)
    bars = Bars(
        "best goodput",
        tuple(float(i) for i in range(len(names))),
        values,
        tuple(colors[name] for name in names),
        labels=tuple(
            f"{number(value)}\nat {best[name].load.text}"
            for name, value in zip(names, values, strict=True)
        ),
        hover=tuple(hover(best[name]) for name in names),
    )
    y = Axis(f"requests/s{unit}", from_zero=True)
    return Panel(Axis("", categories=names), y, bars=(bars,), title="best of the loads measured")


def _attainment(searches: list[GoodputSearch], colors: Mapping[str, int]) -> Panel:
    curves = []
    for search in searches:
        points = sorted(search.points, key=lambda point: point.rate)
        curves.append(
            Curve(
                search.label,
                tuple(point.rate for point in points),
                tuple(point.attainment for point in points),
                colors[search.label],
                hover=tuple(
                    f"<b>{search.label}</b> at {number(point.rate)}/s"
                    f"<br>{point.attainment:.1%} of {point.requests} requests met the SLO"
                    f"<br>goodput {number(point.goodput)}/s"
                    for point in points
                ),
            )
        )
    return Panel(
        Axis("requests per second, offered", from_zero=True),
        Axis("share that met the SLO", limits=(0.0, 1.05)),
        tuple(curves),
        title="what the search saw",
    )


def _against_offered(
    runs: list[Run], colors: Mapping[str, int], divide_by: Mapping[str, float], unit: str
) -> Panel:
    curves = tuple(
        Curve(
            label,
            tuple((run.load.rate or 0.0) / divide_by[label] for run in group),
            tuple((run.goodput or 0.0) / divide_by[label] for run in group),
            colors[label],
            hover=tuple(hover(run) for run in group),
        )
        for label, group in by_label(runs).items()
    )
    top = max(max(curve.x) for curve in curves)
    ideal = Curve("all of them", (0.0, top), (0.0, top), GREY, points=False, dashed=True)
    return Panel(
        Axis(f"requests/s{unit}, offered", from_zero=True),
        Axis(f"requests/s{unit} within the SLO", from_zero=True),
        (ideal, *curves),
        title="goodput against offered load",
    )
