"""What `tasuki plan` simulated: latency against rate, the Pareto front, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tasuki.plot.figures.common import limits_ms, number, slo_text
from tasuki.plot.figures.marks import GREY, Axis, Curve, Figure, Guide, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import Plan, PlanPoint, Results

_METRICS = {"ttft": "TTFT p95 (ms)", "tpot": "TPOT p95 (ms)"}
# A latency so many times its objective is out of sight.
_IN_SIGHT = 2.0
_FRONT, _CHOSEN = 0, 1


def plan(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """A figure for each plan."""
    del colors  # colours tell the front from the rest
    several = len(results.plans) > 1
    return [
        _figure(each, options, f"-{i + 1}" if several else "")
        for i, each in enumerate(results.plans)
    ]


def _figure(plan: Plan, options: Options, suffix: str) -> Figure:
    limits = limits_ms((), options) or dict(plan.slo_ms)
    return Figure(
        name=f"plan{suffix}",
        title=f"Designs for {plan.label}: {_chosen(plan)}",
        subtitle=plan.steps.partition(";")[0],
        panels=tuple(_panel(plan, metric, limits.get(metric)) for metric in _METRICS),
        columns=2,
        note=(
            "A point is a design at one simulated rate. The front has those that no other one beats"
            f" in both. SLO: {slo_text(limits)}."
        ),
    )


def _meets(plan: Plan) -> bool:
    return any(design.rate > 0 for design in plan.designs)


def _chosen(plan: Plan) -> str:
    if _meets(plan):
        return plan.best
    return f"none meets the objectives, the nearest is {plan.best}"


@dataclass(frozen=True, slots=True)
class _Point:
    """A design at one rate, where its latency is in sight."""

    design: str
    latency: float
    seen: PlanPoint


def _panel(plan: Plan, metric: str, limit: float | None) -> Panel:
    points = [
        _Point(design.name, latency, seen)
        for design in plan.designs
        for seen in design.points
        if (latency := _latency(seen, metric)) is not None
        and (limit is None or not _meets(plan) or latency <= _IN_SIGHT * limit)
    ]
    front = _front(points)
    others = [point for point in points if point not in front]
    chosen = next((design for design in plan.designs if design.name == plan.best), None)
    curves = [_curve("other designs", others, GREY, line=False)]
    curves.append(_curve("Pareto front", front, _FRONT, line=True))
    if chosen is not None:
        at = [
            _Point(chosen.name, latency, seen)
            for seen in (plan.expected,)
            if (latency := _latency(seen, metric)) is not None
        ]
        name = "chosen" if _meets(plan) else "nearest"
        curves.append(_curve(f"{name}: {plan.best}", at, _CHOSEN, line=False))
    guides = (Guide("x", limit, f"SLO {number(limit)} ms"),) if limit else ()
    return Panel(
        Axis(_METRICS[metric], from_zero=True),
        Axis("requests/s", from_zero=True),
        tuple(curve for curve in curves if curve.x),
        guides=guides,
    )


def _latency(seen: PlanPoint, metric: str) -> float | None:
    return seen.ttft_p95_ms if metric == "ttft" else seen.tpot_p95_ms


def _front(points: list[_Point]) -> list[_Point]:
    """Those of which no other one has less latency at no less a rate; from low latency to high."""
    front: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.latency, -p.seen.rate)):
        if not front or point.seen.rate > front[-1].seen.rate:
            front.append(point)
    return front


def _curve(name: str, points: list[_Point], color: int, *, line: bool) -> Curve:
    return Curve(
        name,
        tuple(point.latency for point in points),
        tuple(point.seen.rate for point in points),
        color,
        line=line,
        hover=tuple(
            f"<b>{point.design}</b><br>{number(point.seen.rate)} requests/s,"
            f" {number(point.latency)} ms<br>{point.seen.attainment:.0%} met the objectives"
            for point in points
        ),
    )
