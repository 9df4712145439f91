"""What the command line chooses about the pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from tasuki.plot.errors import PlotError

if TYPE_CHECKING:  # the command line loads this module, and not numpy
    from tasuki.plot.run import Run, Stats

_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_LATENCIES = ("ttft", "ttst", "tpot", "itl", "e2e")


class Throughput(StrEnum):
    """What is counted."""

    output = "output"
    total = "total"
    input = "input"
    request = "request"


class Against(StrEnum):
    """What throughput is paid with."""

    tpot = "tpot"
    ttft = "ttft"
    ttst = "ttst"
    e2e = "e2e"
    chunk = "chunk"
    interactivity = "interactivity"


class Statistic(StrEnum):
    """Which value stands for a run's requests."""

    mean = "mean"
    median = "median"
    p90 = "p90"
    p95 = "p95"
    p99 = "p99"

    def of(self, stats: Stats) -> float | None:
        """That value, in milliseconds."""
        value: float | None = getattr(stats, self.value)
        return value


@dataclass(frozen=True, slots=True)
class Options:
    """Everything but what to read and where to write.

    Attributes:
        per_gpu: Whether throughput is divided by the deployment's GPUs (workers
            where it has none).
        chunk: Tokens of a chunk, for chunk latency.
        slo_ms: Limits by metric; empty: what the results themselves say.
        load: Text of the load that distributions and timelines show; empty: chosen.
        rows: Most requests in a timeline.
    """

    throughput: Throughput = Throughput.output
    against: Against = Against.tpot
    statistic: Statistic = Statistic.median
    per_gpu: bool = False
    chunk: int = 16
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    load: str = ""
    rows: int = 400

    def latency_ms(self, run: Run, metric: str | None = None) -> float | None:
        """The run's value on the latency axis; tokens per second for interactivity."""
        name = metric or self.against.value
        tpot = self.statistic.of(run.tpot)
        if name == Against.interactivity:
            return 1e3 / tpot if tpot else None
        if name == Against.chunk:
            ttft = self.statistic.of(run.ttft)
            return None if tpot is None or ttft is None else (self.chunk - 1) * tpot + ttft
        stats: Stats = getattr(run, name)
        return self.statistic.of(stats)


def parse_slo(text: str) -> dict[str, float]:
    """Read "ttft=2s,tpot=50ms" into milliseconds by metric.

    Raises:
        PlotError: It names no latency, or a limit has no unit or is not above 0.
    """
    limits: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, limit = (each.strip() for each in part.partition("="))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", limit)
        if name not in _LATENCIES:
            raise PlotError(f"--slo {part}: {name!r} is not one of {', '.join(_LATENCIES)}")
        if not match or float(match[1]) <= 0:
            raise PlotError(f"--slo {part}: write a limit above 0 with its unit, like {name}=50ms")
        limits[name] = float(match[1]) * _UNITS_MS[match[2]]
    return limits
