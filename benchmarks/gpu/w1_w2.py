"""W1 and W2: two workloads that `serve_w1_w2.py` and the peers' scripts send alike.

W1: 1,000 requests, inputs and outputs uniform in 5..1019 tokens, 100 at a time. W2:
300 requests of 5,000 in and 250 out, 48 at a time. `tasuki bench serve` sends them,
after as many unmeasured requests as run at once. Answers have all their tokens
(ignore_eos). Prompts are random and differ between repeats, so that no prefix is cached.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.errors import RunFailedError

COLUMNS = (
    ("output tok/s", "output_throughput"),
    ("total tok/s", "total_throughput"),
    ("TTFT mean ms", "ttft_mean_ms"),
    ("p99", "ttft_p99_ms"),
    ("TTST-TTFT p99", "second_gap_p99_ms"),
    ("TPOT mean", "tpot_mean_ms"),
    ("ITL p99", "itl_p99_ms"),
    ("E2E mean", "e2e_mean_ms"),
    ("exposed p50", "exposed_p50_ms"),
    ("p99", "exposed_p99_ms"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """How many requests, how many at a time, and further options of `tasuki bench serve`."""

    requests: int
    at_a_time: int
    options: tuple[str, ...]


WORKLOADS = {
    "w1": Workload(
        1_000,
        100,
        ("--input-tokens", "512", "--output-tokens", "512", "--range-ratio", "0.99"),
    ),
    "w2": Workload(300, 48, ("--lengths", "5000:250")),
}
TINY_WORKLOADS = {
    "w1": Workload(24, 8, ("--input-tokens", "32", "--output-tokens", "16")),
    "w2": Workload(8, 4, ("--lengths", "300:8")),
}


def measure(
    url: str,
    model: str,
    tokenizer: Path,
    workload: Workload,
    *,
    label: str,
    seed: int,
    out: Path,
    sampling: Sequence[str] = (),
    warmup: int | None = None,
) -> dict[str, float]:
    """One run of `tasuki bench serve`, its result in `out`.

    Args:
        url: Of the server.
        model: As requests call it.
        tokenizer: Folder.
        workload: What to send.
        label: Of the result.
        seed: Draws the prompts.
        out: The result file.
        sampling: Further options; none: greedy.
        warmup: Unmeasured requests before it; None: as many as run at once.

    Returns:
        See `figures`.

    Raises:
        RunFailedError: The client failed; with the end of what it printed.
    """
    command = [sys.executable, "-m", "tasuki", "bench", "serve", "--base-url", url]
    command += ["--model", model, "--tokenizer", str(tokenizer), *workload.options]
    warmup = workload.at_a_time if warmup is None else warmup
    command += ["--num-requests", str(workload.requests), "--warmup", str(warmup)]
    command += ["--max-concurrency", str(workload.at_a_time), "--answers", "exact", "--quiet"]
    command += ["--no-chunks", "--label", label, "--output", str(out), "--seed", str(seed)]
    done = subprocess.run([*command, *sampling], capture_output=True, text=True)
    if done.returncode != 0:
        said = f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        raise RunFailedError(f"{shlex.join(command)}\n{said}")
    return figures(json.loads(out.read_text()))


def figures(result: dict[str, Any]) -> dict[str, float]:
    """What the tables show of a result file; milliseconds and tokens a second."""
    metrics, requests = result["metrics"], result["requests"]
    gaps = [
        1e3 * (second - first)
        for first, second in zip(requests["first_s"], requests["second_s"], strict=True)
        if first is not None and second is not None
    ]
    exposed = (metrics.get("phases") or {}).get("transfer_exposed_ms") or {}
    found = {
        "output_throughput": metrics["output_throughput"],
        "total_throughput": metrics["total_throughput"],
        "ttft_mean_ms": metrics["ttft_ms"]["mean"],
        "ttft_p99_ms": metrics["ttft_ms"]["p99"],
        "second_gap_p99_ms": percentile(gaps, 0.99),
        "tpot_mean_ms": metrics["tpot_ms"]["mean"],
        "itl_p99_ms": metrics["itl_ms"]["p99"],
        "e2e_mean_ms": metrics["e2e_ms"]["mean"],
        "exposed_p50_ms": exposed.get("median"),
        "exposed_p99_ms": exposed.get("p99"),
        "failed": metrics["failed"],
        "duration_s": metrics["duration_s"],
    }
    return {key: value for key, value in found.items() if value is not None}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that `share` of them do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each figure over the repeats."""
    keys = [key for key, value in rows[0].items() if not isinstance(value, str)]
    return {key: statistics.median(row[key] for row in rows if key in row) for key in keys}


def show(workload: str, table: dict[str, dict[str, float]]) -> None:
    """Print the table of one workload, a line for each system."""
    print(f"\n{workload.upper()}".ljust(24) + "".join(f"{title:>15}" for title, _ in COLUMNS))
    for label, row in table.items():
        cells = (f"{row[key]:>15,.1f}" if key in row else f"{'-':>15}" for _, key in COLUMNS)
        failed = f"   {row['failed']:.0f} FAILED" if row.get("failed") else ""
        print(label.ljust(23) + "".join(cells) + failed, flush=True)
