"""A fleet as the checks see it: the same picture of Tasuki, vLLM and SGLang. Pure.

Values have names of ours, whatever an engine calls them; `series.py` has the translations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tasuki.preflight.expect import Expectation

Engine = Literal["tasuki", "vllm", "sglang"]
Role = Literal["prefill", "decode", "mixed", ""]


@dataclass(frozen=True, slots=True)
class Reading:
    """A number, and which time it is of.

    Attributes:
        value: Of a counter: how much it grew.
        when: For example `in 10 s`, or `since its start`.
    """

    value: float
    when: str


def growth(before: float, after: float) -> float:
    """How much a counter grew; one that is smaller than before began again at 0."""
    return after - before if after >= before else after


@dataclass(slots=True)
class Scrapes:
    """Values of one thing at several moments.

    Attributes:
        times_s: When; on a monotonic clock.
        values: At each moment, by our names.
        sources: What the engine calls them.
    """

    times_s: list[float] = field(default_factory=list)
    values: list[Mapping[str, float]] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)

    def add(
        self, time_s: float, values: Mapping[str, float], sources: Mapping[str, str] | None = None
    ) -> None:
        """The values of one more moment, and what the engine calls those that it shows."""
        self.times_s.append(time_s)
        self.values.append(values)
        self.sources |= sources or {}

    @property
    def window_s(self) -> float:
        """Between the first moment and the last."""
        return self.times_s[-1] - self.times_s[0] if self.times_s else 0.0

    def last(self, name: str) -> float | None:
        """The newest value; None: it is not shown."""
        return self.values[-1].get(name) if self.values else None

    def all(self, name: str) -> list[float]:
        """At each moment that has it."""
        return [each[name] for each in self.values if name in each]

    def mean(self, name: str) -> float | None:
        """Of a gauge, over the window."""
        found = self.all(name)
        return sum(found) / len(found) if found else None

    def gained(self, name: str) -> float | None:
        """How much a counter grew in the window; after a restart what it has since then."""
        found = self.all(name)
        return None if len(found) < 2 else growth(found[0], found[-1])

    def recent(self, name: str, of: str, least: float) -> Reading | None:
        """A counter in the window, if enough happened in it, else since the start.

        Args:
            name: Of the counter.
            of: The counter that says how much happened, such as `requests`.
            least: How much of it is enough.
        """
        happened = self.gained(of)
        if happened is not None and happened >= least:
            gained = self.gained(name)
            return None if gained is None else Reading(gained, f"in {self.window_s:.0f} s")
        total = self.last(name)
        return None if total is None else Reading(total, "since its start")

    def source(self, *names: str) -> str:
        """What the engine calls values."""
        return ", ".join(dict.fromkeys(self.sources.get(name, name) for name in names))


@dataclass(frozen=True, slots=True)
class Probe:
    """One request of ours to one worker, while nobody else of ours asked.

    Attributes:
        round: Requests of one round have the same length and were sent one after the other.
        ttft_s: To the first token.
        tpot_s: A token after the first.
    """

    round: int
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Worker:
    """One engine.

    Attributes:
        name: As the report calls it.
        host: Where it runs; empty: not known.
        config: What must be equal among workers, by our names: `version`, `model`, `dtype`, …
        probes: Requests sent to it directly.
        probe_error: Why there are none.
        fails: It failed one of them by its own fault: `probe_error` says how.
    """

    name: str
    engine: Engine
    role: Role = ""
    model: str = ""
    host: str = ""
    config: dict[str, str] = field(default_factory=dict)
    scrapes: Scrapes = field(default_factory=Scrapes)
    probes: list[Probe] = field(default_factory=list)
    probe_error: str = ""
    fails: bool = False


@dataclass(slots=True)
class Pair:
    """A decode worker and a prefill worker whose KV it reads.

    Attributes:
        transport: As Tasuki names it, such as `nixl/UCX/tcp`; empty: not shown.
        failures: Handoffs without their KV since the start, by cause.
        probe: Of a request split over the two by us: share of its prompt that decode loaded.
        probe_error: Why there is no share.
        probe_fault: Why the two cannot serve a split request, if that is their fault; and which
            side's it is.
    """

    prefill: Worker
    decode: Worker
    transport: str = ""
    scrapes: Scrapes = field(default_factory=Scrapes)
    failures: dict[str, float] = field(default_factory=dict)
    probe: float | None = None
    probe_error: str = ""
    probe_fault: tuple[str, Literal["prefill", "decode"]] | None = None

    @property
    def name(self) -> str:
        """As the report calls it."""
        return f"{self.prefill.name} → {self.decode.name}"


@dataclass(slots=True)
class Router:
    """What clients talk to.

    Attributes:
        engine: `tasuki`, or `other`: it shows no metrics that are known here.
        model: That it was asked for; empty: nothing was.
        by_reason: Counters with a reason, by metric and reason: at the beginning and the end.
        repeats: Of prompts that were sent twice: tokens that were cached the second time.
        repeat_tokens: Of such a prompt.
        repeat_error: Why none was sent.
        fails: One of them failed by the fleet's fault: `repeat_error` says how.
    """

    name: str
    engine: Literal["tasuki", "other"]
    model: str = ""
    scrapes: Scrapes = field(default_factory=Scrapes)
    by_reason: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    repeats: list[int] = field(default_factory=list)
    repeat_tokens: int = 0
    repeat_error: str = ""
    fails: bool = False


@dataclass(slots=True)
class Fleet:
    """All that was looked at.

    Attributes:
        silent: Addresses that did not answer, and why.
        unread: Addresses that answer, but whose metrics cannot be read, and why.
        expected: What a link must reach.
        advice: What another ratio would give, from the fleet's own log; empty: no log was given.
    """

    workers: list[Worker] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    expected: Expectation = field(default_factory=Expectation)
    advice: str = ""

    def of_role(self, *roles: Role) -> list[Worker]:
        """Workers of these roles."""
        return [worker for worker in self.workers if worker.role in roles]

    def peers(self) -> Sequence[list[Worker]]:
        """Workers that must be alike: of one engine and one model."""
        groups: dict[tuple[str, str], list[Worker]] = {}
        for worker in self.workers:
            groups.setdefault((worker.engine, worker.model), []).append(worker)
        return list(groups.values())
