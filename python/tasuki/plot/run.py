"""What every result file becomes, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Stats:
    """A latency over the requests of a run, in milliseconds; None where it is not known."""

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values_ms: Iterable[float | None]) -> Stats:
        """Reckoned from the requests' own values; None among them counts for nothing."""
        known = np.array([value for value in values_ms if value is not None], dtype=float)
        if not known.size:
            return cls()
        median, p90, p95, p99 = (float(v) for v in np.percentile(known, (50, 90, 95, 99)))
        mean, std = float(known.mean()), float(known.std())
        low, high = float(known.min()), float(known.max())
        return cls(mean, median, std, low, high, p90, p95, p99)

    def quantiles(self) -> tuple[tuple[float, float], ...]:
        """The known points (milliseconds, share of requests) of the distribution."""
        known = (
            (self.min, 0.0),
            (self.median, 0.5),
            (self.p90, 0.9),
            (self.p95, 0.95),
            (self.p99, 0.99),
            (self.max, 1.0),
        )
        return tuple((value, share) for value, share in known if value is not None)


@dataclass(frozen=True, slots=True)
class Topology:
    """What served: how many workers on how many GPUs; None where the file does not say."""

    workers: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """How hard a run pushed.

    Attributes:
        rate: Requests per second, open loop; None when requests came as others ended.
        concurrency: Most requests at once; None when unlimited.
        name: What to call a load that has neither.
    """

    rate: float | None = None
    concurrency: int | None = None
    name: str = "all at once"

    @property
    def text(self) -> str:
        """For a label beside a point: "4/s", "c=32"."""
        if self.rate is not None:
            capped = f", c≤{self.concurrency}" if self.concurrency is not None else ""
            return f"{self.rate:g}/s{capped}"
        return f"c={self.concurrency}" if self.concurrency is not None else self.name

    @property
    def order(self) -> tuple[bool, float, float, str]:
        """Sorts loads from light to heavy; rates before concurrencies before the rest."""
        unlimited = float("inf")
        return (
            self.rate is None,
            unlimited if self.rate is None else self.rate,
            unlimited if self.concurrency is None else self.concurrency,
            self.name,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run: seconds after the run's start, None where not known.

    Attributes:
        chunk_s: When each piece of the answer came.
        chunk_tokens: Tokens in each; an average where a tool gives only their sum.
        phases_ms: The server's own account, names as in a response's `timings`.
    """

    due_s: float | None = None
    sent_s: float | None = None
    first_s: float | None = None
    second_s: float | None = None
    end_s: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    error: str | None = None
    in_window: bool = True
    chunk_s: tuple[float, ...] = ()
    chunk_tokens: tuple[float, ...] = ()
    phases_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether it counts: answered, and inside the measured window."""
        return self.error is None and self.in_window

    def latency_ms(self, name: str) -> float | None:
        """The request's "ttft", "ttst", "tpot" or "e2e"; None when it has none."""
        if name == "tpot":
            tokens = self.output_tokens or 0
            if self.first_s is None or self.end_s is None or tokens <= 1:
                return None
            return (self.end_s - self.first_s) * 1e3 / (tokens - 1)
        moment = {"ttft": self.first_s, "ttst": self.second_s, "e2e": self.end_s}[name]
        return None if moment is None or self.due_s is None else (moment - self.due_s) * 1e3

    def gaps_ms(self) -> Iterator[float]:
        """Gaps between successive tokens; n tokens in one chunk are one gap and n - 1 of zero."""
        before: float | None = None
        for moment, tokens in zip(self.chunk_s, self.chunk_tokens, strict=True):
            if tokens <= 0:
                continue
            if before is not None:
                yield (moment - before) * 1e3
            yield from (0.0 for _ in range(round(tokens) - 1))
            before = moment


@dataclass(frozen=True, slots=True)
class Run:
    """One load against one deployment.

    Attributes:
        path: The file that it came from.
        tool: What wrote the file: "tasuki", "vllm", "sglang", "genai-bench",
            "evalscope", "aiperf".
        label: The line in the pictures that it belongs to; a topology's name.
        workload: What was asked, in words; runs of different workloads share no line.
            Empty where the file does not say.
        request_throughput: Per second, as the other three in tokens.
        goodput: Requests per second that met every limit of `slo_ms`; None without any.
        attainment: The share of all requests sent that did.
        slo_ms: Limits by metric name.
        phases: The server's own account, by phase ("queue_ms", …).
        requests: Empty when the file keeps none.
        timed: Whether the requests' times are on one clock, so that a timeline can be drawn.
        ttft_from: Where TTFT starts: "due" or "sent".
    """

    path: Path
    tool: str
    label: str
    workload: str = ""
    model: str = ""
    machine: str = ""
    load: Load = Load()
    topology: Topology = Topology()
    duration_s: float | None = None
    completed: int | None = None
    failed: int | None = None
    request_throughput: float | None = None
    input_throughput: float | None = None
    output_throughput: float | None = None
    total_throughput: float | None = None
    goodput: float | None = None
    attainment: float | None = None
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    ttft: Stats = Stats()
    ttst: Stats = Stats()
    tpot: Stats = Stats()
    itl: Stats = Stats()
    e2e: Stats = Stats()
    phases: Mapping[str, Stats] = field(default_factory=dict)
    input_tokens_mean: float | None = None
    output_tokens_mean: float | None = None
    requests: tuple[Request, ...] = ()
    timed: bool = False
    ttft_from: str = "sent"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One batch of equal requests, sent together."""

    batch: int
    input_tokens: int
    output_tokens: int
    ttft_s: float
    latency_s: float | None = None
    input_throughput: float | None = None
    output_throughput: float | None = None


@dataclass(frozen=True, slots=True)
class BatchTable:
    """What `tasuki bench batch` measured."""

    path: Path
    label: str
    rows: tuple[BatchRow, ...]
    model: str = ""
    topology: Topology = Topology()


@dataclass(frozen=True, slots=True)
class GoodputPoint:
    """One probe of the search for the highest rate that meets the SLO."""

    rate: float
    attainment: float
    goodput: float
    requests: int
    meets: bool


@dataclass(frozen=True, slots=True)
class GoodputSearch:
    """The answer of `tasuki bench sweep --find-goodput` for one topology.

    Attributes:
        rate: Highest requests per second that met the SLO; None when no rate did.
        interval: Where that rate lies with `confidence`.
        finished: False: a probe failed, and higher rates may meet the SLO.
    """

    path: Path
    label: str
    rate: float | None
    interval: tuple[float, float] | None
    confidence: float | None
    points: tuple[GoodputPoint, ...]
    slo_ms: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
    topology: Topology = Topology()
    finished: bool = True


@dataclass(frozen=True, slots=True)
class StepRow:
    """One measured step or transfer.

    Attributes:
        size: Tokens of a prefill step, sequences of a decode step, MB of a transfer.
        context: Tokens before the step's; 0 for a transfer.
    """

    size: float
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepTables:
    """What `tasuki bench batch --steps` measured: rows by "prefill", "decode", "transfer"."""

    path: Path
    label: str
    all: Mapping[str, tuple[StepRow, ...]]
    model: str = ""
    topology: Topology = Topology()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tables that have rows."""
        return tuple(name for name, rows in self.all.items() if rows)


@dataclass(frozen=True, slots=True)
class LinkRow:
    """Reads of one payload in blocks of one size, by `tasuki linkbench`."""

    payload_mb: float
    block_kb: float
    descriptors: int
    gb_per_s: float
    p50_ms: float
    p99_ms: float
    post_ms: float


@dataclass(frozen=True, slots=True)
class LinkTable:
    """One link.

    Attributes:
        way: By which the reads travelled.
        rivals: GB/s of what it is compared with, for the largest payload.
    """

    path: Path
    label: str
    way: str
    rows: tuple[LinkRow, ...]
    rivals: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PlanPoint:
    """A design at one simulated rate, in requests per second."""

    rate: float
    goodput: float
    attainment: float
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None


@dataclass(frozen=True, slots=True)
class PlanDesign:
    """A design that `tasuki plan` simulated.

    Attributes:
        points: From low rates to high.
        rate: The highest that met the objectives; 0: none did.
    """

    name: str
    points: tuple[PlanPoint, ...]
    rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of `tasuki plan`.

    Attributes:
        best: Name of the design that was chosen.
        expected: What it sees at the rate that is expected.
        steps: Where step times are from.
    """

    path: Path
    label: str
    designs: tuple[PlanDesign, ...]
    best: str
    expected: PlanPoint
    slo_ms: Mapping[str, float]
    steps: str


@dataclass(frozen=True, slots=True)
class RolesTimeline:
    """Workers by role while a load changed, in parts of equal length.

    Attributes:
        at_s: Where each part begins.
        offered: Requests a second that were due in it.
        good: Of these, requests a second that met the objectives.
        prefill, decode, mixed: Workers of the role at its end.
    """

    path: Path
    label: str
    at_s: tuple[float, ...]
    offered: tuple[float, ...]
    good: tuple[float, ...]
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    mixed: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was found.

    Attributes:
        skipped: Files looked at that hold no result.
    """

    runs: tuple[Run, ...] = ()
    batches: tuple[BatchTable, ...] = ()
    searches: tuple[GoodputSearch, ...] = ()
    steps: tuple[StepTables, ...] = ()
    links: tuple[LinkTable, ...] = ()
    plans: tuple[Plan, ...] = ()
    roles: tuple[RolesTimeline, ...] = ()
    skipped: tuple[Path, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Every line of the pictures, in order of first appearance; fixes its colour."""
        runs, others = (r.label for r in self.runs), (s.label for s in self.searches)
        return tuple(dict.fromkeys((*runs, *others, *(b.label for b in self.batches))))
