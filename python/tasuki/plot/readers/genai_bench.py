"""The experiment folders of genai-bench: one JSON for each scenario and concurrency.

The file `experiment_metadata.json` beside them names model and server.

Source: genai_bench/metrics/metrics.py, analysis/experiment_loader.py (0.0.5).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasuki.plot.errors import ResultFileError
from tasuki.plot.readers.fields import Fields
from tasuki.plot.run import Load, Request, Run, Stats, Topology

_METADATA = "experiment_metadata.json"


def recognises(first: dict[str, Any]) -> bool:
    """Whether a file with this object in it is one of theirs."""
    aggregated = first.get("aggregated_metrics")
    return isinstance(aggregated, dict) and "stats" in aggregated


def read(path: Path, objects: list[dict[str, Any]], label: str) -> Iterator[Run]:
    """One run for each file.

    Args:
        path: The file.
        objects: Its JSON objects.
        label: The line that the run belongs to.
    """
    metadata = _metadata(path.parent)
    gpus = metadata.text("server_gpu_count")
    for data in objects:
        fields = Fields(path, data)
        metrics = fields.inner("aggregated_metrics")
        stats = metrics.inner("stats")
        to_ms = 1.0 if fields.text("_time_unit") == "ms" else 1e3
        requests = tuple(_requests(fields, to_ms))
        yield Run(
            path=path,
            tool="genai-bench",
            label=label,
            workload=metrics.text("scenario"),
            model=metadata.text("model"),
            machine=metadata.text("server_gpu_type"),
            load=_load(metrics),
            topology=Topology(gpus=int(gpus) if gpus.isdigit() else None),
            duration_s=metrics.number("run_duration"),
            completed=metrics.count("num_completed_requests"),
            failed=metrics.count("num_error_requests"),
            request_throughput=metrics.number("requests_per_second"),
            input_throughput=metrics.number("mean_input_throughput_tokens_per_s"),
            output_throughput=metrics.need("mean_output_throughput_tokens_per_s"),
            total_throughput=metrics.number("mean_total_tokens_throughput_tokens_per_s"),
            ttft=_stats(stats.inner("ttft"), to_ms),
            tpot=_stats(stats.inner("tpot"), to_ms),
            e2e=_stats(stats.inner("e2e_latency"), to_ms),
            input_tokens_mean=stats.inner("num_input_tokens").number("mean"),
            output_tokens_mean=stats.inner("num_output_tokens").number("mean"),
            requests=requests,
        )


def _metadata(folder: Path) -> Fields:
    path = folder / _METADATA
    if not path.is_file():
        return Fields(path, {})
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ResultFileError(path, f"is not JSON: {error}") from error
    return Fields(path, data if isinstance(data, dict) else {})


def _load(metrics: Fields) -> Load:
    if metrics.text("iteration_type") == "batch_size":
        return Load(name=f"batch {metrics.count('batch_size')}")
    return Load(concurrency=metrics.count("num_concurrency"))


def _stats(fields: Fields, to_ms: float) -> Stats:
    names = {"median": "p50", "std": "stddev"}
    known = {
        name: fields.number(names.get(name, name))
        for name in ("mean", "median", "std", "min", "max", "p90", "p95", "p99")
    }
    return Stats(**{name: v * to_ms for name, v in known.items() if v is not None})


def _requests(fields: Fields, to_ms: float) -> Iterator[Request]:
    """Latencies only: the files do not say when a request was sent."""
    for each in fields.rows("individual_request_metrics"):
        if each.data.get("error_code") is not None:
            error = each.text("error_message") or str(each.data["error_code"])
            yield Request(error=error)
            continue
        first, end = each.number("ttft"), each.number("e2e_latency")
        yield Request(
            due_s=0.0,
            sent_s=0.0,
            first_s=None if first is None else first * to_ms / 1e3,
            end_s=None if end is None else end * to_ms / 1e3,
            input_tokens=each.number("num_input_tokens"),
            output_tokens=each.number("num_output_tokens"),
        )
