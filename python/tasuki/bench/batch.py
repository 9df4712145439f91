"""One batch at a time: batch x input x output, in the rows of SGLang's bench_one_batch_server.

All requests of a batch are sent at once and nothing else runs. Prompts are
random and new in every run, so no prefix is ever cached.

- *latency*: from sending to the last token of all.
- *TTFT*: from sending to the first token of the request that gets it last.
- *input tok/s*: prompt tokens of the batch / TTFT.
- *output tok/s*: output tokens of the batch / (latency - TTFT).
- *last tok/s*: the rate at the batch's end, where every request decodes: tokens
  that came while the request that ended last got its last 40.

Source: SGLang, bench_one_batch_server, whose "last generation throughput" is
the server's own figure over its last 40 decode steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasuki.bench.errors import BenchError, RunFailedError

_LAST_TOKENS = 40
COLUMNS = (
    *("batch", "input", "output", "latency s", "TTFT s"),
    *("input tok/s", "output tok/s", "last tok/s"),
)


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """A batch of `batch` requests of one shape."""

    batch: int
    input_tokens: int
    output_tokens: int

    def options(self, seed: int) -> dict[str, Any]:
        """Of `tasuki bench serve`."""
        return {
            "workload": "fixed",
            "arrival": "all-at-once",
            "num-requests": self.batch,
            "input-tokens": self.input_tokens,
            "output-tokens": self.output_tokens,
            "seed": seed,
        }


@dataclass(frozen=True, slots=True)
class BatchRow:
    """What one batch took; rates in tokens per second, None where there is no decode."""

    batch: int
    input_tokens: int
    output_tokens: int
    latency_s: float
    ttft_s: float
    input_throughput: float
    output_throughput: float | None
    last_token_throughput: float | None

    def cells(self) -> list[str]:
        """As `COLUMNS` names them."""
        rates = (self.input_throughput, self.output_throughput, self.last_token_throughput)
        return [
            *(str(count) for count in (self.batch, self.input_tokens, self.output_tokens)),
            f"{self.latency_s:.3f}",
            f"{self.ttft_s:.3f}",
            *("-" if rate is None else f"{rate:.1f}" for rate in rates),
        ]

    def as_dict(self) -> dict[str, Any]:
        """As the result file has it."""
        return asdict(self)


def batch_points(
    batches: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]
) -> list[BatchPoint]:
    """Every combination, outputs slowest and batches fastest.

    Raises:
        BenchError: A number is below 1, or there are none.
    """
    for name, values in (
        ("batch", batches),
        ("input-tokens", inputs),
        ("output-tokens", outputs),
    ):
        if not values:
            raise BenchError(f"--{name} is empty: give sizes such as 1,8,32")
        if min(values) < 1:
            raise BenchError(f"--{name} has {min(values)}: use 1 or more")
    triples = itertools.product(outputs, inputs, batches)
    return [BatchPoint(batch, size_in, size_out) for size_out, size_in, batch in triples]


def batch_row(point: BatchPoint, result: Mapping[str, Any]) -> BatchRow:
    """The row of a run of `point.options`.

    Raises:
        RunFailedError: Not every request was answered whole.
    """
    requests = result["requests"]
    errors = [error for error in requests["error"] if error is not None]
    answered = [n for n in requests["output_tokens"] if n == point.output_tokens]
    if errors or len(answered) != point.batch:
        what = errors[0] if errors else f"output tokens are {requests['output_tokens']}"
        raise RunFailedError(
            f"{len(answered)} of {point.batch} requests gave {point.output_tokens} tokens: {what}"
        )
    begun_s = min(requests["sent_s"])
    latency_s = max(requests["end_s"]) - begun_s
    ttft_s = max(requests["first_s"]) - begun_s
    decodes = point.output_tokens > 1 and latency_s > ttft_s
    tokens = point.batch * point.output_tokens
    return BatchRow(
        batch=point.batch,
        input_tokens=point.input_tokens,
        output_tokens=point.output_tokens,
        latency_s=latency_s,
        ttft_s=ttft_s,
        input_throughput=point.batch * point.input_tokens / ttft_s,
        output_throughput=tokens / (latency_s - ttft_s) if decodes else None,
        last_token_throughput=_last_rate(requests) if decodes else None,
    )


def median_row(rows: Sequence[BatchRow]) -> BatchRow:
    """The run whose latency is the median (the lower one of two in the middle)."""
    return sorted(rows, key=lambda row: row.latency_s)[(len(rows) - 1) // 2]


def _last_rate(requests: Mapping[str, Any]) -> float | None:
    arrivals: list[list[float]] = [
        [at for at, count in zip(times, counts, strict=True) for _ in range(count)]
        for times, counts in zip(requests["chunk_s"], requests["chunk_tokens"], strict=True)
    ]
    slowest = max(arrivals, key=lambda times: times[-1])
    since_s, until_s = slowest[-min(_LAST_TOKENS + 1, len(slowest))], slowest[-1]
    if until_s <= since_s:
        return None
    came = sum(since_s < at <= until_s for times in arrivals for at in times)
    return came / (until_s - since_s)
