"""Search for the highest rate that meets the SLO: probes in, next rate out. Pure.

A probe is an open-loop Poisson run at one rate. *Attainment* is the share of
its requests that met every SLO, failures included, and falls as the rate
rises. A probe **meets** when attainment is above the target for sure, **fails**
when it is below for sure, and is undecided when its budget of requests ends
before either. For sure: the Wilson bound of the run clears the target. A run
that decides nothing is repeated twice as long, up to `looks` times, and each
run is judged by itself: it begins with an empty server, so runs cannot be
pooled.

    0 ---- meets ---- undecided ---- undecided ---- fails ---->  rate
            low  <--------- the answer --------->  high

The rate doubles or halves until one probe meets and one fails; then the widest
open gap (in ratio) is halved until every gap is within `precision`, or the
probes are used up. Undecided rates lie inside the answer: more bisection
between them would be guessing.

Where late requests come in bursts, a short run may meet without one of them, and
says nothing of how long they are. So a rate that would be the answer is run again
as long as the last look takes, unless that look decided, and this run counts
instead.

Every bound is allowed an error of (1 - confidence) / (max_probes x looks), so
that all verdicts are right together, and the answer with them, at the stated
confidence, provided that attainment falls with the rate.

Source: bisection with a decided comparison at each step, the errors summed by
Bonferroni's inequality; bounds in `intervals.py`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.bench.errors import BenchError
from tasuki.bench.intervals import count_above, effective_count, wilson

_REACH = 1024.0  # times or parts of the first rate


class Verdict(enum.Enum):
    """What a probe says of its rate."""

    MEETS = "meets"
    FAILS = "fails"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How to search.

    Attributes:
        attainment: To reach, above 0 and below 1.
        confidence: Of the answer, 0.5 to 0.9999.
        precision: Relative width at which a gap counts as closed, 0.001 to 1.
        start_rate: First rate, requests per second.
        min_requests: Of a probe's first run; it has more where the last look would be too short
            to show the attainment.
        min_probe_s: A run's arrivals last at least so long: queues need time to grow.
        looks: Runs of one rate, each twice as long as the one before.
        max_probes: Rates tried.
    """

    attainment: float = 0.9
    confidence: float = 0.95
    precision: float = 0.1
    start_rate: float = 1.0
    min_requests: int = 100
    min_probe_s: float = 20.0
    looks: int = 3
    max_probes: int = 14

    def __post_init__(self) -> None:
        for name, low, high in (
            ("attainment", 0.01, 0.999),
            ("confidence", 0.5, 0.9999),
            ("precision", 0.001, 1.0),
            ("start_rate", 1e-3, 1e6),
            ("min_requests", 10, 10**6),
            ("min_probe_s", 0.0, 3600.0),
            ("looks", 1, 10),
            ("max_probes", 2, 100),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BenchError(f"goodput: {name} is {value}: use a value from {low} to {high}")

    @property
    def error(self) -> float:
        """What one bound may be wrong with."""
        return (1.0 - self.confidence) / (self.max_probes * self.looks)

    @property
    def longest_s(self) -> float:
        """How long the arrivals of the last look last at the first rate."""
        return self.requests(self.start_rate, self.looks - 1) / self.start_rate

    def looks_within(self, rate: float, seconds: float) -> range:
        """Looks at `rate` whose arrivals last at most so long."""
        every = range(self.looks)
        return every[: sum(self.requests(rate, look) <= rate * seconds for look in every)]

    def requests(self, rate: float, look: int) -> int:
        """How many requests run number `look` (from 0) at `rate` sends."""
        # So many show the attainment if all of them meet; the last look has twice as many.
        shown = count_above(self.attainment, self.error)
        least = math.ceil(2.0 * shown / (1 << (self.looks - 1)))
        first = max(self.min_requests, math.ceil(rate * self.min_probe_s), least)
        return int(first << look)


@dataclass(frozen=True, slots=True)
class Probe:
    """A rate that was tried.

    Attributes:
        rate: Requests per second.
        requests: Sent and counted in the run that decided.
        attainment: Share of them that met every SLO.
        goodput: Of them per second.
        verdict: What it says.
        look: Number of the run that decided, from 0.
    """

    rate: float
    requests: int
    attainment: float
    goodput: float
    verdict: Verdict
    look: int = 0


def judge(settings: SearchSettings, outcomes: Sequence[bool]) -> Verdict:
    """What a run says whose requests, in the order in which they were due, met the SLO or not."""
    if not outcomes:
        return Verdict.UNDECIDED
    share = sum(outcomes) / len(outcomes)
    low, high = wilson(share, effective_count(outcomes), settings.error)
    if low > settings.attainment:
        return Verdict.MEETS
    return Verdict.FAILS if high < settings.attainment else Verdict.UNDECIDED


def interval(probes: Sequence[Probe]) -> tuple[float, float]:
    """Where the highest rate lies: (0 if nothing met, infinity if nothing failed)."""
    high = min((p.rate for p in probes if p.verdict is Verdict.FAILS), default=math.inf)
    met = (p.rate for p in probes if p.verdict is Verdict.MEETS and p.rate < high)
    return max(met, default=0.0), high


def next_runs(
    settings: SearchSettings, probes: Sequence[Probe], max_run_s: float = math.inf
) -> tuple[float, range] | None:
    """The rate to run next, with its looks until one decides; None when the search is over.

    A rate of `probes` comes again with the last look, which then counts alone.

    Args:
        settings: How to search.
        probes: So far.
        max_run_s: No run's arrivals take longer, but the first one's.
    """
    rate = next_rate(settings, probes)
    if rate is not None:
        looks = settings.looks_within(rate, max_run_s)
        if looks or not probes:
            return rate, looks or range(1)
    low, _ = interval(probes)
    last = settings.looks_within(low, max_run_s)[-1:]
    again = any(p.rate == low and p.look < look for p in probes for look in last)
    return (low, last) if again else None


def next_rate(settings: SearchSettings, probes: Sequence[Probe]) -> float | None:
    """The rate to try next; None when the search is over."""
    if not probes:
        return settings.start_rate
    if len(probes) >= settings.max_probes:
        return None
    low, high = interval(probes)
    rates = [p.rate for p in probes]
    if math.isinf(high):
        up = max(rates) * 2.0
        return up if up <= settings.start_rate * _REACH else None
    if low == 0.0:
        down = min(rates) / 2.0
        return down if down >= settings.start_rate / _REACH else None
    open_rates = [r for r in rates if low < r < high]
    edges = [low, min(open_rates), max(open_rates), high] if open_rates else [low, high]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    below, above = max(gaps, key=lambda gap: gap[1] / gap[0])
    return math.sqrt(below * above) if above / below > 1.0 + settings.precision else None
