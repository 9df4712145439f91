"""How latency and throughput move as the load grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tasuki.plot.figures.common import (
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
from tasuki.plot.figures.marks import Axis, Curve, Figure, Guide, Panel
from tasuki.plot.figures.pareto import throughput, throughput_title
from tasuki.plot.options import Options
from tasuki.plot.run import Results, Run

_LATENCIES = ("ttft", "ttst", "tpot")


def load(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """A figure for each workload with at least two loads of one kind."""
    figures = []
    groups = by_workload(results.runs)
    for place, (workload, group) in enumerate(groups.items()):
        rates = [r for r in group if r.load.rate is not None]
        levels = [r for r in group if r.load.rate is None and r.load.concurrency is not None]
        runs = rates if len(rates) >= len(levels) else levels
        if len({r.load.text for r in runs}) < 2:
            continue
        suffix = f"-{place + 1}" if len(groups) > 1 else ""
        figures.append(_figure(runs, options, colors, workload, suffix))
    return figures


def _figure(
    runs: Sequence[Run], options: Options, colors: Mapping[str, int], workload: str, suffix: str
) -> Figure:
    open_loop = runs[0].load.rate is not None
    levels = [_level(run) for run in runs]
    title = "requests per second, offered" if open_loop else "requests at once"
    x = Axis(title, log=spread(levels), from_zero=not spread(levels))
    limits = limits_ms(runs, options)
    divide_by, unit = divisors(runs, options)

    def panel(
        name: str, value: Callable[[Run], float | None], guides: tuple[Guide, ...] = ()
    ) -> Panel:
        values = [v for run in runs if (v := value(run)) is not None]
        log = bool(values) and spread(values)
        curves = tuple(
            _curve(label, [r for r in group if value(r) is not None], value, colors[label])
            for label, group in by_label(runs).items()
        )
        return Panel(x, Axis(name, log=log, from_zero=not log), curves, guides=guides)

    statistic = options.statistic
    panels = [
        panel(
            throughput_title(options, unit),
            lambda run: _divided(throughput(run, options), divide_by[run.label]),
        )
    ]
    for metric in _LATENCIES:
        value = partial(options.latency_ms, metric=metric)
        if any(value(run) is not None for run in runs):
            limit = limits.get(metric)
            guides = (Guide("y", limit, f"SLO {number(limit)} ms"),) if limit else ()
            panels.append(panel(f"{statistic.value} {metric.upper()} (ms)", value, guides))
    return Figure(
        name=f"load{suffix}",
        title="What more load does",
        subtitle=described(runs, workload),
        panels=tuple(panels),
        columns=2,
        note=start_note(runs),
    )


def _level(run: Run) -> float:
    return run.load.rate if run.load.rate is not None else float(run.load.concurrency or 0)


def _divided(amount: float | None, by: float) -> float | None:
    return None if amount is None else amount / by


def _curve(
    label: str, runs: Sequence[Run], value: Callable[[Run], float | None], color: int
) -> Curve:
    return Curve(
        label,
        tuple(_level(run) for run in runs),
        tuple(value(run) or 0.0 for run in runs),
        color,
        hover=tuple(hover(run) for run in runs),
    )
