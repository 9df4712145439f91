"""The artifacts of AIPerf: a summary (JSON or CSV) and one record for each request (JSONL).

The files of one run lie in one folder; together they are one `Run`. The summary
JSON is read, with the records beside it; the CSV or the records alone are read
where there is no JSON. AIPerf's "inter token latency" is an average over each
request, so our TPOT; its "inter chunk latency" is what comes nearest to our ITL.

Source: aiperf/common/models/export_models.py and record_models.py (0.13), and
its tutorial "Working with Profile Export Files".
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers import aiperf_records
from tasuki.plot.readers.aiperf_records import TO_MS, UNKNOWN_LOAD
from tasuki.plot.readers.fields import Fields, summed
from tasuki.plot.run import Load, Request, Run, Stats

_SLO_NAMES = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "request_latency": "e2e",
}
_STATS = {"mean": "avg", "median": "p50"}


def recognises(first: dict[str, Any]) -> bool:
    """Whether a file with this object in it is a summary or records of AIPerf's."""
    return _is_summary(first) or aiperf_records.recognises(first)


def _is_summary(first: dict[str, Any]) -> bool:
    latency, throughput = first.get("request_latency"), first.get("request_throughput")
    return all(isinstance(each, dict) and "unit" in each for each in (latency, throughput))


def read(path: Path, objects: list[dict[str, Any]], label: str) -> Iterator[Run]:
    """The run; nothing when the file is only a part of one that another file begins.

    Args:
        path: The file.
        objects: Its JSON objects.
        label: The line that the run belongs to.
    """
    if aiperf_records.recognises(objects[0]):
        if not _beside(path, ".json"):
            yield aiperf_records.run(path, objects, label)
        return
    records = _beside(path, ".jsonl")
    requests: tuple[Request, ...] = ()
    if records:
        requests = aiperf_records.load(records)
    yield _from_summary(Fields(path, objects[0]), label, requests)


def read_csv(path: Path, label: str) -> Iterator[Run]:
    """The run of a summary CSV, unless there is a JSON beside it.

    Args:
        path: The file.
        label: The line that the run belongs to.
    """
    if path.with_suffix(".json").is_file():
        return
    data: dict[str, Any] = {}
    names: list[str] = []
    with path.open(newline="") as file:
        for row in csv.reader(file):
            if row and row[0] == "Metric":
                names = [{"Value": "avg"}.get(name, name) for name in row[1:]]
            elif row and names and len(row) == len(names) + 1:
                header, _, unit = row[0].removesuffix(")").partition(" (")
                try:
                    values = {k: float(v) for k, v in zip(names, row[1:], strict=True) if v}
                except ValueError as error:
                    raise ResultFileError(path, f"{header}: {error}") from error
                data[header.lower().replace(" ", "_")] = {"unit": unit, **values}
    if not _is_summary(data):
        raise ResultFileError(path, "is a table, but has no Request Latency and Request Throughput")
    yield _from_summary(Fields(path, data), label, ())


def is_summary_csv(path: Path) -> bool:
    """Whether a CSV file begins as AIPerf's does."""
    with path.open(errors="replace") as file:
        return file.readline().startswith("Metric,avg,")


def _beside(path: Path, suffix: str) -> Path | None:
    """The other file of the same run: AIPerf's standard names, or one base name."""
    standard = {".json": "profile_export_aiperf.json", ".jsonl": "profile_export.jsonl"}
    for other in (path.with_name(standard[suffix]), path.with_suffix(suffix)):
        if other.is_file() and (path.stem.startswith("profile_export") or other.stem == path.stem):
            return other
    return None


def _stats(fields: Fields) -> Stats:
    to_ms = TO_MS.get(fields.text("unit"), 1.0)
    names = ("mean", "median", "std", "min", "max", "p90", "p95", "p99")
    known = {name: fields.number(_STATS.get(name, name)) for name in names}
    return Stats(**{name: v * to_ms for name, v in known.items() if v is not None})


def _from_summary(fields: Fields, label: str, requests: tuple[Request, ...]) -> Run:
    def value(tag: str) -> float | None:
        return fields.inner(tag).number("avg")

    inputs, outputs = value("input_sequence_length"), value("output_sequence_length")
    request_throughput = fields.inner("request_throughput").need("avg")
    output_throughput = value("output_token_throughput")
    total_throughput = value("total_token_throughput")
    input_throughput = value("input_token_throughput")
    if input_throughput is None and inputs is not None:  # before 0.13
        input_throughput = inputs * request_throughput
    config = fields.inner("input_config")
    model, load = _model(config), _load(config)
    slos = config.inner("slos")
    limits = {name: slos.number(tag) for tag, name in _SLO_NAMES.items()}
    completed = value("request_count")
    return Run(
        path=fields.path,
        tool="aiperf",
        label=label,
        model=model,
        load=load,
        duration_s=value("benchmark_duration"),
        completed=None if completed is None else round(completed),
        failed=round(value("error_request_count") or 0),
        request_throughput=request_throughput,
        input_throughput=input_throughput,
        output_throughput=output_throughput,
        total_throughput=total_throughput or summed(input_throughput, output_throughput),
        goodput=value("goodput"),
        slo_ms={name: limit for name, limit in limits.items() if limit is not None},
        ttft=_stats(fields.inner("time_to_first_token")),
        ttst=Stats.of(
            r.latency_ms("ttst") for r in requests if r.measured
        ),  # theirs: since the first
        tpot=_stats(fields.inner("inter_token_latency")),
        itl=_stats(fields.inner("inter_chunk_latency")),
        e2e=_stats(fields.inner("request_latency")),
        input_tokens_mean=inputs,
        output_tokens_mean=outputs,
        requests=requests,
        timed=bool(requests),
    )


def _model(config: Fields) -> str:
    names = config.inner("endpoint").column("model_names")  # before 0.8
    items = config.inner("models").rows("items")
    return str(names[0]) if names else items[0].text("name") if items else ""


def _load(config: Fields) -> Load:
    phases = config.rows("phases")
    measured = [phase for phase in phases if phase.data.get("name") == "profiling"] or phases
    last = measured[-1] if measured else config.inner("loadgen")  # before 0.8
    if not last.data:
        return UNKNOWN_LOAD
    rate = last.data.get("rate", last.data.get("request_rate"))
    return Load(
        rate=float(rate) if isinstance(rate, int | float) else None,
        concurrency=last.count("concurrency"),
    )
