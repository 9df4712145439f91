"""The goodput search on a real server: probes are runs of `tasuki bench serve`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tasuki.bench.errors import BenchError, RunFailedError
from tasuki.bench.goodput import (
    Probe,
    SearchSettings,
    Verdict,
    interval,
    judge,
    next_rate,
    next_runs,
)
from tasuki.bench.header import header
from tasuki.bench.plan import PROBE_SEED, Goal, Point, turns

_ARRIVALS = 0.8  # of a run's time at most; the last requests take the rest

RunProbe = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Runs `tasuki bench serve` with these options and gives its result."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Attributes:
        settings: It was made with.
        probes: In the order in which they were made.
        slo: As the results have it.
        workload: As the results have it.
        failed: Why the search stopped before its end; None: it did not.
    """

    settings: SearchSettings
    probes: tuple[Probe, ...]
    slo: Mapping[str, Any]
    workload: Mapping[str, Any]
    failed: str | None = None

    def result(self, topology: Mapping[str, Any], model: str) -> dict[str, Any]:
        """The result file, kind "goodput"; `rate` is the highest that was shown to meet."""
        low, high = interval(self.probes)
        content = header(
            "goodput",
            label=str(topology["name"]),
            topology=topology,
            model=model,
        )
        return {
            **content,
            "workload": self.workload,
            "slo": self.slo,
            "attainment": self.settings.attainment,
            "points": [
                {
                    "rate": probe.rate,
                    "attainment": probe.attainment,
                    "goodput": probe.goodput,
                    "requests": probe.requests,
                    "meets": None
                    if probe.verdict is Verdict.UNDECIDED
                    else probe.verdict is Verdict.MEETS,
                }
                for probe in sorted(self.probes, key=lambda p: p.rate)
            ],
            "rate": low,
            "confidence": self.settings.confidence,
            "interval": [low, None if math.isinf(high) else high],
            "failed": self.failed,
        }

    def one_line(self) -> str:
        """The answer for a person."""
        low, high = interval(self.probes)
        share = f"{100 * self.settings.attainment:g}%"
        sure = f"at {100 * self.settings.confidence:g}% confidence"
        if low == 0.0:
            lowest = min(probe.rate for probe in self.probes)
            return f"no rate was shown to reach {share}, down to {lowest:.3g} req/s"
        if math.isinf(high):
            return f"{low:.3g} req/s and perhaps more reach {share} ({sure})"
        return f"goodput {low:.3g} to {high:.3g} req/s reach {share} ({sure})"


def search_goodput(
    point: Point,
    run: RunProbe,
    say: Callable[[str], None],
    timeout_s: float = math.inf,
    keep: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Search to the end.

    Args:
        point: A goal's.
        run: Runs one probe.
        say: Gets a line after each.
        timeout_s: Of `run`; rates that need longer are not tried.
        keep: Gets what was found when a probe fails, or Ctrl-C comes, after the first one.

    Raises:
        RunFailedError: A probe could not be run.
    """
    goal = point.work
    assert isinstance(goal, Goal)
    probes: dict[float, Probe] = {}
    runs = itertools.count()
    slo: Mapping[str, Any] = {}
    workload: Mapping[str, Any] = {}
    max_run_s = _ARRIVALS * timeout_s * turns(goal.options)
    while (todo := next_runs(goal.search, tuple(probes.values()), max_run_s)) is not None:
        rate, looks = todo
        for look in looks:
            how_much = {
                "slo": goal.slo,
                "request-rate": rate,
                "num-requests": goal.search.requests(rate * turns(goal.options), look),
                "seed": PROBE_SEED + next(runs),
            }
            try:
                result = run({**goal.options, **how_much})
            except (BenchError, OSError, KeyboardInterrupt) as error:
                if probes:
                    reason = str(error) or "interrupted"
                    found = Found(goal.search, tuple(probes.values()), slo, workload, reason)
                    say(f"  {point.key}: found before it failed: {found.one_line()}")
                    keep(found)
                raise
            probe = _probe(goal.search, rate, look, result)
            slo, workload = result["slo"], result["workload"]
            say(
                f"  {point.key}: {rate:.3g} req/s, {probe.requests} requests: "
                f"attainment {100 * probe.attainment:.1f}%, {probe.verdict.value}"
            )
            if probe.verdict is not Verdict.UNDECIDED:
                break
        probes[rate] = probe
    if next_rate(goal.search, tuple(probes.values())) is not None:
        say(f"  {point.key}: timeout_s is {timeout_s:g}: raise it, other rates need longer runs")
    return Found(goal.search, tuple(probes.values()), slo, workload)


def _probe(settings: SearchSettings, rate: float, look: int, result: Mapping[str, Any]) -> Probe:
    outcomes = outcomes_of(result)
    met = sum(outcomes)
    goodput = result["metrics"]["goodput"]
    return Probe(
        rate=rate,
        requests=len(outcomes),
        attainment=met / max(1, len(outcomes)),
        goodput=0.0 if goodput is None else float(goodput),
        verdict=judge(settings, outcomes),
        look=look,
    )


def outcomes_of(result: Mapping[str, Any]) -> list[bool]:
    """Whether each request of the window met the SLO, in the order in which they were due.

    Raises:
        RunFailedError: The result does not say.
    """
    requests = result["requests"]
    met, due_s, in_window = (requests.get(name) for name in ("met", "due_s", "in_window"))
    if not met or None in met:
        raise RunFailedError(
            "the result does not say which requests met the SLO: if nobody counted their tokens,"
            " give tokenizer"
        )
    order = sorted(range(len(met)), key=lambda index: due_s[index])
    return [bool(met[index]) for index in order if in_window[index]]
