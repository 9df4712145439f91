"""How long a sweep will take, as far as it can be told beforehand. Pure.

A load with a rate or a duration says how long its arrivals last; a closed or
saturated one lasts as long as the server takes, which only a measurement of the
same load elsewhere tells. A search is counted with every probe and one look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasuki.bench.plan import Goal, Load, Plan, turns
from tasuki.bench.sweep_state import DONE, SweepState

START_S = 20.0  # of a small model on a CPU; large ones take minutes
_DEFAULT_REQUESTS = 100  # of `tasuki bench serve`
_DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of what is left to do.

    Attributes:
        seconds: Of everything that can be told.
        unknown: Points that cannot.
    """

    seconds: float
    unknown: int

    def __str__(self) -> str:
        minutes = self.seconds / 60.0
        told = f"{self.seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
        if not self.unknown:
            return f"about {told}"
        return f"{told} and {self.unknown} points that run as long as the server takes"


def load_s(work: Load | Goal) -> float | None:
    """Seconds of one point; None: it depends on the server."""
    if isinstance(work, Goal):
        search = work.search
        run_s = search.requests(search.start_rate, 0) / search.start_rate
        return search.max_probes * (run_s + _DRAIN_S)
    options: Mapping[str, Any] = work.options
    try:
        limit_s = float(options["duration-s"]) if "duration-s" in options else None
        rate = float(options.get("request-rate", "inf"))
        arrivals = float(options.get("num-requests", _DEFAULT_REQUESTS)) / turns(options)
        arrivals_s = arrivals / rate
    except (TypeError, ValueError, ZeroDivisionError):
        return None
    if arrivals_s > 0.0 and ("num-requests" in options or limit_s is None):
        return min(arrivals_s, limit_s or arrivals_s) + _DRAIN_S
    return None if limit_s is None else limit_s + _DRAIN_S


def estimate(plan: Plan, state: SweepState) -> Estimate:
    """What the points that are not done will take, starts of their targets included."""
    measured = {
        point.name: state.points[point.key].took_s
        for point in plan.all_points()
        if state.points[point.key].state == DONE
    }
    seconds, unknown = 0.0, 0
    for target in plan.targets:
        left = [point for point in plan.points(target) if not state.is_done(point)]
        seconds += START_S if left else 0.0
        for point in left:
            took_s = measured.get(point.name) or load_s(point.work)
            seconds += took_s or 0.0
            unknown += took_s is None
    return Estimate(seconds, unknown)
