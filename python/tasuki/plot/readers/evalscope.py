"""The folders of `evalscope perf`: a summary, percentiles, and a database of requests.

`benchmark_summary.json` is the run. `benchmark_percentile.json`, `benchmark_args.json` and
`benchmark_data.db` beside it are read if they are there. Versions name times in milliseconds
("TTFT (ms)") or, before, in seconds ("Average time to first token (s)").

Source: evalscope/perf/utils/perf_constants.py, perf_models.py, db_util.py (modelscope/evalscope).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers.fields import Fields
from tasuki.plot.run import Load, Request, Run, Stats

SUMMARY = "benchmark_summary.json"
# Read together with the summary.
PARTS = ("benchmark_percentile.json", "benchmark_args.json")

# Of each value, the key of today's versions and that of earlier ones.
_KEYS = {
    "duration_s": ("Test Duration (s)", "Time taken for tests (s)"),
    "concurrency": ("Concurrency", "Number of concurrency"),
    "rate": ("Request Rate (req/s)", "Request rate (req/s)"),
    "completed": ("Success Requests", "Succeed requests"),
    "failed": ("Failed Requests", "Failed requests"),
    "requests_per_s": ("Req Throughput (req/s)", "Request throughput (req/s)"),
    "input_tokens": ("Avg Input Tokens", "Average input tokens per request"),
    "output_tokens": ("Avg Output Tokens", "Average output tokens per request"),
    "output_per_s": ("Output Throughput (tok/s)", "Output token throughput (tok/s)"),
    "total_per_s": ("Total Throughput (tok/s)", "Total token throughput (tok/s)"),
}
_MEANS = {
    "ttft": ("TTFT (ms)", "Average time to first token (s)"),
    "tpot": ("TPOT (ms)", "Average time per output token (s)"),
    "itl": ("ITL (ms)", "Average inter-token latency (s)"),
    "e2e": ("Avg Latency (s)", "Average latency (s)"),
}
_PERCENTILES = {
    "ttft": ("TTFT (ms)", "TTFT (s)"),
    "tpot": ("TPOT (ms)", "TPOT (s)"),
    "itl": ("ITL (ms)", "ITL (s)"),
    "e2e": ("Latency (s)",),
}
_ROWS = {
    "min": "min",
    "50%": "median",
    "90%": "p90",
    "95%": "p95",
    "99%": "p99",
    "max": "max",
}
_COLUMNS = (
    "start_time",
    "completed_time",
    "success",
    "first_chunk_latency",
    "prompt_tokens",
    "completion_tokens",
    "inter_token_latencies",
)


def recognises(first: dict[str, Any]) -> bool:
    """Whether a file with this object in it is one of theirs."""
    return all(any(key in first for key in _KEYS[name]) for name in ("duration_s", "output_per_s"))


def read(path: Path, objects: list[dict[str, Any]], label: str) -> Iterator[Run]:
    """One run for each summary.

    Args:
        path: The file.
        objects: Its JSON objects.
        label: The line that the run belongs to.
    """
    if path.parent.name.startswith("parallel_"):  # one load of several
        label = path.parent.parent.name or label
    for data in objects:
        fields = Fields(path, data)
        percentiles = _percentiles(path.parent / PARTS[0])
        known = {name: _value(fields, keys) for name, keys in _KEYS.items()}
        stats = {name: _stats(fields, name, percentiles) for name in _PERCENTILES}
        arguments = _json(path.parent / PARTS[1])
        model = arguments.get("model") if isinstance(arguments, dict) else ""
        if known["output_per_s"] is None:
            raise ResultFileError(path, f"{_KEYS['output_per_s'][0]} is missing")
        requests = tuple(_requests(path.parent / "benchmark_data.db"))
        yield Run(
            path=path,
            tool="evalscope",
            label=label,
            model=model if isinstance(model, str) else "",
            load=_load(known),
            duration_s=known["duration_s"],
            completed=_count(known["completed"]),
            failed=_count(known["failed"]),
            request_throughput=known["requests_per_s"],
            output_throughput=known["output_per_s"],
            total_throughput=known["total_per_s"],
            input_tokens_mean=known["input_tokens"],
            output_tokens_mean=known["output_tokens"],
            requests=requests,
            timed=bool(requests),
            ttft=stats["ttft"],
            tpot=stats["tpot"],
            itl=stats["itl"],
            e2e=stats["e2e"],
        )


def _value(fields: Fields, keys: tuple[str, ...]) -> float | None:
    found = (fields.number(key) for key in keys if key in fields.data)
    return next(found, None)


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)


def _load(known: dict[str, float | None]) -> Load:
    """A rate of -1 is none: as many at once as `Concurrency` says."""
    rate, concurrency = known["rate"], _count(known["concurrency"])
    if rate is not None and rate > 0:
        return Load(rate=rate)
    return Load(concurrency=concurrency if concurrency and concurrency > 0 else None)


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultFileError(path, f"is not JSON: {error}") from error


def _percentiles(path: Path) -> list[Fields]:
    rows = _json(path) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ResultFileError(path, "should be a list of objects, one for each percentile")
    return [Fields(path, row, f"[{i}]") for i, row in enumerate(rows)]


def _stats(fields: Fields, name: str, percentiles: list[Fields]) -> Stats:
    """In milliseconds; a mean of -1, or of 0, is not known."""
    values: dict[str, float] = {}
    for row in percentiles:
        place = _ROWS.get(row.text("Percentiles"))
        value = _milliseconds(row, _PERCENTILES[name])
        if place is not None and value is not None:
            values[place] = value
    mean = _milliseconds(fields, _MEANS[name])
    if mean is not None and mean > 0:
        values["mean"] = mean
    return Stats(**values)


def _milliseconds(fields: Fields, keys: tuple[str, ...]) -> float | None:
    """A time, whose unit its key says."""
    for key in keys:
        if key in fields.data:
            value = fields.number(key)
            return None if value is None else value * (1e3 if key.endswith("(s)") else 1.0)
    return None


def _requests(path: Path) -> Iterator[Request]:
    """Of the database; its requests' and answers' texts are not looked at."""
    if not path.is_file():
        return
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            rows = database.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM result ORDER BY start_time"
            ).fetchall()
    except sqlite3.Error as error:
        raise ResultFileError(path, f"is no database of evalscope: {error}") from error
    began = min((row[0] for row in rows if row[0]), default=0.0)
    for start, completed, success, first, inputs, outputs, gaps in rows:
        sent_s = (start or began) - began
        if not success:
            yield Request(due_s=sent_s, sent_s=sent_s, error="failed")
            continue
        first_s = None if first is None else sent_s + first
        chunks = _chunks(path, first_s, gaps)
        yield Request(
            due_s=sent_s,
            sent_s=sent_s,
            first_s=first_s,
            second_s=chunks[1] if len(chunks) > 1 else None,
            end_s=completed - began,
            input_tokens=inputs,
            output_tokens=outputs,
            chunk_s=chunks,
            chunk_tokens=_spread(len(chunks), outputs),
        )


def _chunks(path: Path, first_s: float | None, gaps: str | None) -> tuple[float, ...]:
    if first_s is None:
        return ()
    try:
        found = json.loads(gaps or "[]")
        times = [first_s]
        for gap in found:
            times.append(times[-1] + float(gap))
    except (TypeError, ValueError) as error:
        raise ResultFileError(
            path, f"inter_token_latencies is no list of numbers: {error}"
        ) from error
    return tuple(times)


def _spread(chunks: int, tokens: float | None) -> tuple[float, ...]:
    """Tokens of each chunk: an average, as the database has their sum only."""
    return ((tokens or chunks) / chunks,) * chunks if chunks else ()
