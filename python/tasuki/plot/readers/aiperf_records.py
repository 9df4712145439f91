"""AIPerf's records, one JSON object for each request (`profile_export.jsonl`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers.fields import Fields, divide
from tasuki.plot.run import Load, Request, Run, Stats

UNKNOWN_LOAD = Load(name="load not in the file")
# From AIPerf's unit names to milliseconds.
TO_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}


def recognises(first: dict[str, Any]) -> bool:
    """Whether a JSON object is such a record."""
    metadata = first.get("metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and "metrics" in first


def load(path: Path) -> tuple[Request, ...]:
    """The requests of a file of records."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except ValueError as error:
        raise ResultFileError(path, f"is not JSON lines: {error}") from error
    return tuple(_requests(path, lines))


def run(path: Path, objects: list[dict[str, Any]], label: str) -> Run:
    """A run without a summary: its numbers are reckoned from the records.

    Args:
        path: The file.
        objects: Its records.
        label: The line that the run belongs to.
    """
    requests = tuple(_requests(path, objects))
    answered = [r for r in requests if r.measured]
    begin = min((r.sent_s for r in requests if r.sent_s is not None), default=0.0)
    end = max((r.end_s for r in answered if r.end_s is not None), default=begin)
    duration_s = end - begin

    def rate(amount: float) -> float | None:
        return divide(amount, duration_s)

    def stats(name: str) -> Stats:
        return Stats.of(r.latency_ms(name) for r in answered)

    inputs = sum(r.input_tokens or 0 for r in answered)
    outputs = sum(r.output_tokens or 0 for r in answered)
    return Run(
        path=path,
        tool="aiperf",
        label=label,
        load=UNKNOWN_LOAD,
        duration_s=duration_s,
        completed=len(answered),
        failed=len(requests) - len(answered),
        request_throughput=rate(len(answered)),
        input_throughput=rate(inputs),
        output_throughput=rate(outputs),
        total_throughput=rate(inputs + outputs),
        ttft=stats("ttft"),
        ttst=stats("ttst"),
        tpot=stats("tpot"),
        e2e=stats("e2e"),
        input_tokens_mean=divide(inputs, len(answered)),
        output_tokens_mean=divide(outputs, len(answered)),
        requests=requests,
        timed=bool(requests),
    )


def _requests(path: Path, objects: list[dict[str, Any]]) -> Iterator[Request]:
    profiled = [o for o in objects if o["metadata"].get("benchmark_phase") in (None, "profiling")]
    begin = min((o["metadata"]["request_start_ns"] for o in profiled), default=0)
    for i, each in enumerate(profiled):
        fields = Fields(path, each, f"record {i}")
        sent_s = (each["metadata"]["request_start_ns"] - begin) / 1e9
        metrics = fields.inner("metrics")
        if each.get("error") is not None:
            error = fields.inner("error").text("type") or "failed"
            yield Request(due_s=sent_s, sent_s=sent_s, error=error)
            continue
        ttft_ms = _metric_ms(metrics, "time_to_first_token")
        latency_ms = _metric_ms(metrics, "request_latency")
        tokens = metrics.inner("output_sequence_length").number("value")
        first_s = None if ttft_ms is None else sent_s + ttft_ms / 1e3
        chunk_s: tuple[float, ...] = ()
        if first_s is not None:
            gaps = metrics.inner("inter_chunk_latency")
            to_s = TO_MS.get(gaps.text("unit"), 1.0) / 1e3
            chunk_s = tuple(accumulate((g * to_s for g in gaps.column("value")), initial=first_s))
        yield Request(
            due_s=sent_s,
            sent_s=sent_s,
            first_s=first_s,
            second_s=chunk_s[1] if len(chunk_s) > 1 else None,
            end_s=None if latency_ms is None else sent_s + latency_ms / 1e3,
            input_tokens=metrics.inner("input_sequence_length").number("value"),
            output_tokens=tokens,
            chunk_s=chunk_s,
            chunk_tokens=((tokens or len(chunk_s)) / len(chunk_s),) * len(chunk_s)
            if chunk_s
            else (),
        )


def _metric_ms(metrics: Fields, tag: str) -> float | None:
    inner = metrics.inner(tag)
    value = inner.number("value")
    return None if value is None else value * TO_MS.get(inner.text("unit"), 1.0)
