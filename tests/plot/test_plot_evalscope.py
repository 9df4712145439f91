"""evalscope's folders: hand-written after its source, not made by a run of it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest

from tasuki.plot.errors import ResultFileError
from tasuki.plot.load import Source, load
from tasuki.plot.run import Run

FIXTURES = Path(__file__).parent / "fixtures"


def only(path: Path) -> Run:
    (run,) = load([Source(path)]).runs
    return run


def test_a_run_of_today() -> None:
    run = only(FIXTURES / "evalscope")
    assert (run.tool, run.label, run.model) == ("evalscope", "qwen", "Qwen/Qwen3-4B")
    assert (run.load.text, run.completed, run.failed) == ("c=8", 63, 1)
    assert (run.duration_s, run.output_throughput, run.total_throughput) == (12.5, 645.12, 3225.6)
    assert (run.ttft.mean, run.ttft.median, run.ttft.p99) == (210.4, 205.0, 392.5)
    assert (run.itl.max, run.tpot.p90) == (44.0, 11.3)
    assert run.e2e.mean == pytest.approx(1543.2) and run.e2e.p95 == pytest.approx(1740.0)
    assert (run.input_tokens_mean, run.output_tokens_mean) == (512.0, 128.0)
    assert not run.timed


def test_a_run_of_an_earlier_version_is_in_seconds() -> None:
    run = only(FIXTURES / "evalscope_old" / "benchmark_summary.json")
    assert (run.load.text, run.completed, run.label) == ("4/s", 500, "benchmark_summary")
    assert run.ttft.mean == pytest.approx(64.1) and run.ttft.p99 == pytest.approx(110.0)
    assert run.itl.median == pytest.approx(4.7) and run.e2e.mean == pytest.approx(553.9)


def test_a_mean_has_the_unit_of_its_own_name(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "evalscope_old", tmp_path / "run")
    (folder / "benchmark_percentile.json").unlink()
    run = only(folder)
    assert (run.ttft.mean, run.ttft.median) == (pytest.approx(64.1), None)
    assert run.e2e.mean == pytest.approx(553.9)


def write_database(path: Path, gaps: str = "[0.01, 0.02]") -> None:
    """The table as evalscope makes it; texts are there, and are not read."""
    columns = (
        "request TEXT, start_time REAL, inter_token_latencies TEXT, success INTEGER,"
        " response_messages TEXT, completed_time REAL, latency REAL, first_chunk_latency REAL,"
        " prompt_tokens INTEGER, completion_tokens INTEGER, max_gpu_memory_cost REAL,"
        " time_per_output_token REAL"
    )
    rows = [
        ("{}", 1000.5, gaps, 1, "?", 1000.73, 0.23, 0.2, 512, 3, 0.0, 0.015),
        ("{}", 1000.0, "[]", 1, "?", 1000.1, 0.1, 0.1, 16, 1, 0.0, 0.0),
        ("{}", 1001.0, "[]", 0, "?", 1001.4, None, None, None, None, None, None),
    ]
    with sqlite3.connect(path) as database:
        database.execute(f"CREATE TABLE result({columns})")
        database.executemany(f"INSERT INTO result VALUES ({', '.join('?' * 12)})", rows)


def test_requests_come_from_the_database(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "evalscope_old", tmp_path / "run")
    write_database(folder / "benchmark_data.db")
    run = only(folder)
    assert run.timed and run.label == "run"
    early, late, failed = run.requests
    assert (early.due_s, early.latency_ms("ttft")) == (0.0, pytest.approx(100.0))
    assert late.latency_ms("ttft") == pytest.approx(200.0)
    assert list(late.gaps_ms()) == pytest.approx([10.0, 20.0])
    assert late.latency_ms("tpot") == pytest.approx(15.0)
    assert failed.error == "failed" and not failed.measured


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "evalscope_old", tmp_path / "run")
    write_database(folder / "benchmark_data.db", gaps="[1, {}]")
    with pytest.raises(ResultFileError, match="inter_token_latencies"):
        only(folder)
    (folder / "benchmark_data.db").write_bytes(b"no database at all, and long enough to be read")
    with pytest.raises(ResultFileError, match="no database of evalscope"):
        only(folder)
    (folder / "benchmark_data.db").unlink()
    (folder / "benchmark_percentile.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ResultFileError, match="list of objects"):
        only(folder)
