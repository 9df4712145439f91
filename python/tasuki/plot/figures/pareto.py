"""Throughput against what it costs in latency: one line for each topology, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasuki.plot.figures.common import (
    METRICS,
    by_label,
    by_workload,
    described,
    divisors,
    hover,
    limits_ms,
    number,
    spread,
    start_note,
)
from tasuki.plot.figures.marks import GREY, Axis, Curve, Figure, Guide, Panel
from tasuki.plot.options import Against, Options, Throughput
from tasuki.plot.run import Results, Run

_UNITS = {Throughput.request: "requests/s"}


def pareto(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """One panel for each workload; none when no run has both values."""
    runs = [r for r in results.runs if throughput(r, options) is not None]
    runs = [r for r in runs if options.latency_ms(r) is not None]
    if not runs:
        return []
    divide_by, unit = divisors(runs, options)
    groups = by_workload(runs)
    panels = tuple(
        _panel(group, options, colors, divide_by, unit, name if len(groups) > 1 else "")
        for name, group in groups.items()
    )
    only = next(iter(groups)) if len(groups) == 1 else ""
    notes = [
        "Grey: what no other point beats in both. Labels: requests per second,"
        " or c = requests at once.",
        start_note(runs) if options.against in (Against.ttft, Against.chunk, Against.e2e) else "",
    ]
    return [
        Figure(
            name="pareto",
            title=f"Throughput against {_cost_name(options)}",
            subtitle=described(runs, only),
            panels=panels,
            columns=min(2, len(panels)),
            note=" ".join(note for note in notes if note),
        )
    ]


def throughput(run: Run, options: Options) -> float | None:
    """The run's value on the throughput axis, undivided."""
    value: float | None = getattr(run, f"{options.throughput.value}_throughput")
    return value


def throughput_title(options: Options, unit: str) -> str:
    """The throughput axis in words."""
    counted = "" if options.throughput is Throughput.request else f"{options.throughput.value} "
    return f"{counted}{_UNITS.get(options.throughput, 'tokens/s')}{unit}"


def _cost_name(options: Options) -> str:
    if options.against is Against.chunk:
        return f"the time to {options.chunk} tokens"
    return METRICS.get(options.against.value, "interactivity")


def _cost_axis(options: Options, log: bool) -> Axis:
    statistic = options.statistic.value
    if options.against is Against.interactivity:
        title = f"tokens/s for each user (1 / {statistic} TPOT), more is better"
    elif options.against is Against.chunk:
        title = f"{statistic} TTFT + {options.chunk - 1} x TPOT (ms), less is better"
    else:
        title = f"{statistic} {options.against.value.upper()} (ms), less is better"
    return Axis(title, log=log, from_zero=not log)


def frontier(points: Sequence[tuple[float, float]], more_is_better: bool) -> list[int]:
    """Indices of the points that no other point beats, in order of cost.

    Args:
        points: (cost, throughput); more throughput is better.
        more_is_better: Whether that holds for the cost too.
    """
    sign = -1 if more_is_better else 1
    order = sorted(range(len(points)), key=lambda i: (sign * points[i][0], -points[i][1]))
    best, kept = float("-inf"), []
    for i in order:
        if points[i][1] > best:
            kept.append(i)
            best = points[i][1]
    return kept


def _panel(
    runs: Sequence[Run],
    options: Options,
    colors: Mapping[str, int],
    divide_by: Mapping[str, float],
    unit: str,
    title: str,
) -> Panel:
    def point(run: Run) -> tuple[float, float]:
        amount = throughput(run, options)
        return options.latency_ms(run) or 0.0, (amount or 0.0) / divide_by[run.label]

    points = [point(run) for run in runs]
    best = [points[i] for i in frontier(points, options.against is Against.interactivity)]
    front = Curve(
        "frontier",
        tuple(x for x, _ in best),
        tuple(y for _, y in best),
        GREY,
        points=False,
        step=options.against is not Against.interactivity,
    )
    lines = []
    for label, group in by_label(runs).items():
        where = [point(run) for run in group]
        lines.append(
            Curve(
                label,
                tuple(x for x, _ in where),
                tuple(y for _, y in where),
                colors[label],
                labels=tuple(_label(run) for run in group),
                hover=tuple(hover(run) for run in group),
            )
        )
    log = spread(x for x, _ in points)
    limit = limits_ms(runs, options).get(options.against.value)
    guides = (Guide("x", limit, f"SLO {number(limit)} ms"),) if limit is not None else ()
    return Panel(
        x=_cost_axis(options, log),
        y=Axis(throughput_title(options, unit), from_zero=True),
        curves=(*((front,) if len(best) > 1 else ()), *lines),
        guides=guides,
        title=title,
    )


def _label(run: Run) -> str:
    return f"{run.load.text} ({run.failed} failed)" if run.failed else run.load.text
