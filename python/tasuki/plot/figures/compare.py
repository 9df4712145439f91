"""Runs over time beside each other: what was measured, and what was simulated of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tasuki.plot.figures.common import chosen, described
from tasuki.plot.figures.marks import Axis, Curve, Figure, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import Results, Run

_BUCKETS = 60
_LEAST_S = 0.2  # of a bucket
_Points = tuple[tuple[float, ...], tuple[float, ...]]


def compare(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """TTFT, time per output token and throughput over time, of at least two runs of one load."""
    runs = [run for run in results.runs if run.timed and run.requests]
    picked = chosen(runs, options.load)
    if len(picked) < 2:
        return []
    end_s = max(request.end_s or 0.0 for run in picked for request in run.requests)
    width = max(_LEAST_S, end_s / _BUCKETS)
    limits = (0.0, end_s * 1.01 or 1.0)

    def panel(title: str, points: Callable[[Run], _Points], x: str = "") -> Panel:
        curves = []
        for run in picked:
            times, values = points(run)
            if values:
                curves.append(Curve(run.label, times, values, colors[run.label], points=False))
        return Panel(Axis(x, limits=limits), Axis(title, from_zero=True), tuple(curves))

    return [
        Figure(
            name="compare",
            title="Runs over time, beside each other",
            subtitle=described(picked, picked[0].workload),
            panels=(
                panel("TTFT (ms)", lambda run: _medians(run, "ttft", width)),
                panel("TPOT (ms)", lambda run: _medians(run, "tpot", width)),
                panel("output tokens/s", lambda run: _throughput(run, width, end_s), "seconds"),
            ),
            note=(
                f"TTFT and TPOT: medians of the requests that were due within {width:.3g} s of one"
                " another."
            ),
            share_x=True,
        )
    ]


def _medians(run: Run, metric: str, width: float) -> _Points:
    buckets: dict[int, list[float]] = {}
    for request in run.requests:
        value = request.latency_ms(metric) if request.measured else None
        if value is not None and request.due_s is not None:
            buckets.setdefault(int(request.due_s / width), []).append(value)
    order = sorted(buckets)
    times = tuple((bucket + 0.5) * width for bucket in order)
    return times, tuple(float(np.median(buckets[bucket])) for bucket in order)


def _throughput(run: Run, width: float, end_s: float) -> _Points:
    moments = [moment for request in run.requests for moment in request.chunk_s]
    tokens = [count for request in run.requests for count in request.chunk_tokens]
    if not moments:
        return (), ()
    edges = np.arange(0.0, end_s + width, width)
    counts, _ = np.histogram(moments, bins=edges, weights=tokens)
    middles = (edges[:-1] + width / 2).tolist()
    return tuple(middles), tuple((counts / width).tolist())
