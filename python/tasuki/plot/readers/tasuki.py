"""Our own result files, schema "tasuki.bench/1"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers.fields import MOST_TOKENS, Fields, divide
from tasuki.plot.run import (
    BatchRow,
    BatchTable,
    GoodputPoint,
    GoodputSearch,
    LinkRow,
    LinkTable,
    Load,
    Request,
    RolesTimeline,
    Run,
    StepRow,
    StepTables,
    Topology,
)

_SCHEMA = "tasuki.bench/1"
# How much was asked and in what form; runs that differ only here share a line.
_NOT_WORKLOAD = ("seed", "num_requests", "prompt_form", "exact_output")
_SAID_FIRST = ("kind", "input_tokens", "output_tokens")


def recognises(first: dict[str, Any]) -> bool:
    """Whether a file with this object in it is one of ours."""
    return str(first.get("schema", "")).startswith("tasuki.bench/")


def read(
    path: Path, objects: list[dict[str, Any]], label: str
) -> Iterator[Run | BatchTable | GoodputSearch | StepTables | LinkTable | RolesTimeline]:
    """What the file holds; nothing for kinds that have no picture.

    Args:
        path: The file.
        objects: Its JSON objects.
        label: Used where the file has no label of its own.
    """
    for data in objects:
        if data.get("schema") != _SCHEMA:
            raise ResultFileError(
                path, f"schema is {data.get('schema')!r}, this version reads {_SCHEMA!r}"
            )
        fields = Fields(path, data)
        label = fields.text("label") or fields.inner("topology").text("name") or label
        if data.get("kind") == "serve":
            yield _serve(fields, label)
        elif data.get("kind") == "batch":
            yield _batch(fields, label)
        elif data.get("kind") == "goodput":
            yield _goodput(fields, label)
        elif data.get("kind") == "steps":
            yield _steps(fields, label)
        elif data.get("kind") == "linkbench":
            yield _link(fields, label)
        elif data.get("kind") == "roles_follow":
            yield from _roles(fields)


def _topology(fields: Fields) -> Topology:
    inner = fields.inner("topology")
    return Topology(workers=inner.count("workers") or None, gpus=inner.count("gpus") or None)


def _slo_ms(fields: Fields) -> dict[str, float]:
    slo = fields.inner("slo")
    limits = {key.removesuffix("_s"): slo.number(key) for key in slo.data if key.endswith("_s")}
    return {name: limit * 1e3 for name, limit in limits.items() if limit is not None}


def _serve(fields: Fields, label: str) -> Run:
    metrics = fields.inner("metrics")
    phases = metrics.inner("phases")
    machine = fields.inner("machine")
    requests = tuple(_requests(fields.inner("requests")))
    completed = metrics.count("completed")
    return Run(
        path=fields.path,
        tool="tasuki",
        label=label,
        workload=workload_text(fields.inner("workload").data),
        model=fields.text("model"),
        machine=", ".join(dict.fromkeys(map(str, machine.column("gpus")))) or machine.text("cpu"),
        load=_load(fields.inner("arrival")),
        topology=_topology(fields),
        duration_s=metrics.number("duration_s"),
        completed=completed,
        failed=metrics.count("failed"),
        request_throughput=metrics.number("request_throughput"),
        input_throughput=metrics.number("input_throughput"),
        output_throughput=metrics.need("output_throughput"),
        total_throughput=metrics.number("total_throughput"),
        goodput=metrics.number("goodput"),
        attainment=metrics.number("attainment"),
        slo_ms=_slo_ms(fields),
        ttft=metrics.inner("ttft_ms").stats("{}"),
        ttst=metrics.inner("ttst_ms").stats("{}"),
        tpot=metrics.inner("tpot_ms").stats("{}"),
        itl=metrics.inner("itl_ms").stats("{}"),
        e2e=metrics.inner("e2e_ms").stats("{}"),
        phases={
            **{name: phases.inner(name).stats("{}") for name in phases.data if phases.data[name]},
            "client_queue_ms": metrics.inner("client_queue_ms").stats("{}"),
        }
        if phases.data
        else {},
        input_tokens_mean=divide(metrics.number("input_tokens"), completed),
        output_tokens_mean=divide(metrics.number("output_tokens"), completed),
        requests=requests,
        timed=bool(requests),
        ttft_from="due",
    )


def workload_text(workload: Mapping[str, Any]) -> str:
    """A workload in few words: "random 512:128, range_ratio=0.5, range_convention=vllm"."""
    words = [str(workload.get("kind") or "")]
    lengths = workload.get("input_tokens"), workload.get("output_tokens")
    if None not in lengths:
        words.append(f"{lengths[0]}:{lengths[1]}")
    rest = [
        f"{key}={Path(value).name if isinstance(value, str) else value}"
        for key, value in workload.items()
        if key not in (*_NOT_WORKLOAD, *_SAID_FIRST)
        and (isinstance(value, int | float) or (isinstance(value, str) and value))
    ]
    return ", ".join([" ".join(word for word in words if word), *rest]).strip(", ")


def _load(arrival: Fields) -> Load:
    kind = arrival.text("kind")
    known = {"": "all at once", "all": "all at once", "all-at-once": "all at once"}
    return Load(
        rate=arrival.number("rate"),
        concurrency=arrival.count("max_concurrency"),
        name=known.get(kind, kind),
    )


def _requests(columns: Fields) -> Iterator[Request]:
    count = len(columns.column("due_s"))
    inside = columns.inner("phases")
    phases = {key: inside.numbers(key, count) for key in inside.data}
    chunk_s = columns.number_lists("chunk_s", count)
    chunk_tokens = columns.number_lists("chunk_tokens", count, MOST_TOKENS)
    in_window, errors = columns.column("in_window", count), columns.column("error", count)
    names = ("due_s", "sent_s", "first_s", "second_s", "end_s", "input_tokens", "output_tokens")
    plain = {name: columns.numbers(name, count) for name in names}
    for i in range(count):
        if len(chunk_s[i]) != len(chunk_tokens[i]):
            raise ResultFileError(
                columns.path,
                f"request {i} has {len(chunk_s[i])} chunk times"
                f" but {len(chunk_tokens[i])} chunk token counts",
            )
        yield Request(
            **{name: values[i] for name, values in plain.items()},
            error=None if errors[i] is None else str(errors[i]),
            in_window=in_window[i] is not False,
            chunk_s=tuple(chunk_s[i]),
            chunk_tokens=tuple(chunk_tokens[i]),
            phases_ms={k: v[i] for k, v in phases.items() if v[i] is not None},
        )


def _batch(fields: Fields, label: str) -> BatchTable:
    rows = tuple(
        BatchRow(
            batch=round(row.need("batch")),
            input_tokens=round(row.need("input_tokens")),
            output_tokens=round(row.need("output_tokens")),
            ttft_s=row.need("ttft_s"),
            latency_s=row.number("latency_s"),
            input_throughput=row.number("input_throughput"),
            output_throughput=row.number("output_throughput"),
        )
        for row in fields.rows("rows")
    )
    return BatchTable(fields.path, label, rows, fields.text("model"), _topology(fields))


def _open(low: float | None, high: float | None) -> tuple[float, float]:
    """An interval of which an end may not be known."""
    return low or 0.0, math.inf if high is None else high


def _goodput(fields: Fields, label: str) -> GoodputSearch:
    points = tuple(
        GoodputPoint(
            rate=point.need("rate"),
            attainment=point.need("attainment"),
            goodput=point.number("goodput") or 0.0,
            requests=point.count("requests") or 0,
            meets=bool(point.data.get("meets")),
        )
        for point in fields.rows("points")
    )
    interval = fields.numbers("interval")
    return GoodputSearch(
        path=fields.path,
        label=label,
        rate=fields.number("rate"),
        interval=_open(*interval) if len(interval) == 2 else None,
        confidence=fields.number("confidence"),
        points=points,
        slo_ms=_slo_ms(fields),
        model=fields.text("model"),
        topology=_topology(fields),
        finished=not fields.text("failed"),
    )


def _steps(fields: Fields, label: str) -> StepTables:
    # What a row's size is called, and by what it is divided.
    sizes = {"prefill": ("tokens", 1.0), "decode": ("batch", 1.0), "transfer": ("bytes", 1e6)}
    tables = {
        name: tuple(
            StepRow(
                row.above_zero(size) / unit, row.count("context") or 0, row.above_zero("seconds")
            )
            for row in fields.rows(name)
        )
        for name, (size, unit) in sizes.items()
    }
    return StepTables(fields.path, label, tables, fields.text("model"), _topology(fields))


def _roles(fields: Fields) -> Iterator[RolesTimeline]:
    for row in fields.rows("rows"):
        for run in row.rows("runs"):
            parts = run.rows("timeline")
            if not parts:
                continue

            def values(name: str, parts: list[Fields] = parts) -> tuple[float, ...]:
                return tuple(part.need(name) for part in parts)

            said = f"{row.count('workers')} workers, {row.text('load')} load: {run.text('name')}"
            yield RolesTimeline(
                path=fields.path,
                label=said,
                at_s=values("at_s"),
                offered=values("offered"),
                good=values("good"),
                prefill=values("prefill"),
                decode=values("decode"),
                mixed=values("mixed"),
            )


def _link(fields: Fields, label: str) -> LinkTable:
    rows = tuple(
        LinkRow(
            payload_mb=row.need("payload_bytes") / 1e6,
            block_kb=row.need("block_bytes") / 1e3,
            descriptors=round(row.need("descriptors")),
            gb_per_s=row.need("bytes_per_s") / 1e9,
            p50_ms=row.need("p50_s") * 1e3,
            p99_ms=row.need("p99_s") * 1e3,
            post_ms=row.need("post_p50_s") * 1e3,
        )
        for row in fields.rows("rows")
    )
    rivals: dict[str, float] = {}
    for beside in fields.rows("rivals"):  # in the order of payloads: the largest is last
        found = beside.inner("bytes_per_s")
        rivals = {name: found.need(name) / 1e9 for name in found.data}
    return LinkTable(fields.path, label, fields.text("way") or "way unknown", rows, rivals)
