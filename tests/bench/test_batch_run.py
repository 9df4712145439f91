"""Rounds of batches against a client that answers as told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from tasuki.bench import batch_command
from tasuki.bench.batch import batch_points
from tasuki.bench.batch_run import BatchTarget, run_batches
from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import read_result
from tasuki.bench.load import LoadRun
from tasuki.plot.load import Source, load

TARGET = BatchTarget("http://fake", None, None, "here", seed=40, log=Path("/dev/null"))


class FakeClient:
    """Every batch takes (inputs + number of the run) seconds to its first tokens, then one."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.runs: list[LoadRun] = []
        self.fails_at = fails_at

    def measure(self, run: LoadRun) -> Mapping[str, Any]:
        self.runs.append(run)
        count, tokens = run.options["num-requests"], run.options["output-tokens"]
        if count == self.fails_at:
            raise RunFailedError("out of memory")
        first_s = float(run.options["input-tokens"] + len(self.runs))
        return {
            "model": "found-out",
            "requests": {
                "sent_s": [0.0] * count,
                "first_s": [first_s] * count,
                "end_s": [first_s + 1.0] * count,
                "output_tokens": [tokens] * count,
                "error": [None] * count,
                "chunk_s": [[first_s, first_s + 1.0]] * count,
                "chunk_tokens": [[1, tokens - 1]] * count,
            },
        }


def test_medians_of_rounds_over_all_points_with_prompts_never_sent_before() -> None:
    client = FakeClient()
    points = batch_points([1, 4], [100], [8])
    news: list[str] = []
    result, rows = run_batches(points, 3, TARGET, client.measure, news.append)
    assert [(row.batch, row.input_tokens) for row in rows] == [(1, 100), (4, 100)]
    assert len(client.runs) == 1 + 3 * 2  # a warm-up of the smallest, then three rounds
    assert client.runs[0].options["num-requests"] == 1
    seeds = [run.options["seed"] for run in client.runs]
    assert seeds == list(range(40, 47))
    assert all(run.options["warmup"] == 0 for run in client.runs)
    # Rounds take 102..103, 104..105 and 106..107 s: each median is of the second.
    assert all(104 <= row.ttft_s <= 105 for row in rows)
    assert result["kind"] == "batch"
    assert result["model"] == "found-out"
    assert client.runs[-1].model == "found-out"
    assert result["rows"] == [row.as_dict() for row in rows]
    assert (result["failed"], result["interrupted"]) == ([], False)
    assert news[-1] == "round 3 of 3 done"


def test_a_point_that_fails_is_left_out_and_named() -> None:
    client = FakeClient(fails_at=4)
    result, rows = run_batches(
        batch_points([1, 4], [100], [8]), 2, TARGET, client.measure, lambda line: None
    )
    assert [row.batch for row in rows] == [1]
    failed = {"batch": 4, "input_tokens": 100, "output_tokens": 8, "reason": "out of memory"}
    assert result["failed"] == [failed]
    assert sum(run.options["num-requests"] == 4 for run in client.runs) == 1


def test_what_was_measured_before_the_server_ended_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient()

    def measure(run: LoadRun, defaults: object) -> Mapping[str, Any]:
        if len(client.runs) == 4:  # a warm-up, a round, and one batch more
            raise RunFailedError("connection refused")
        return client.measure(run)

    monkeypatch.setattr("tasuki.bench.load.run_load", measure)
    path = tmp_path / "batch.json"
    table = batch_command._Table(batch_points([1, 4], [100], [8]), 3, tmp_path, path)
    with pytest.raises(typer.Exit) as ended:
        batch_command._measure(table, "http://fake", "m", lambda _: None, lambda: "it was killed")
    assert ended.value.exit_code == 1
    result = read_result(path, "batch")
    assert [row["batch"] for row in result["rows"]] == [1, 4]
    assert [point["reason"] for point in result["failed"]] == ["it was killed"] * 2
    [shown] = load([Source(path)]).batches
    assert [row.batch for row in shown.rows] == [1, 4]


@pytest.mark.parametrize("runs", [1, 3, 4])
def test_ctrl_c_keeps_the_batches_that_were_measured(runs: int) -> None:
    client = FakeClient()

    def measure(run: LoadRun) -> Mapping[str, Any]:
        if len(client.runs) == runs:
            raise KeyboardInterrupt
        return client.measure(run)

    points = batch_points([1, 4], [100], [8])
    if runs == 1:  # the warm-up alone
        with pytest.raises(KeyboardInterrupt):
            run_batches(points, 3, TARGET, measure, lambda line: None)
        return
    result, rows = run_batches(points, 3, TARGET, measure, lambda line: None)
    assert result["interrupted"]
    assert [row["batch"] for row in result["rows"]] == [row.batch for row in rows] == [1, 4]


def test_nothing_measured_is_an_error() -> None:
    client = FakeClient(fails_at=1)
    with pytest.raises(RunFailedError, match="out of memory"):
        run_batches(batch_points([1], [8], [4]), 1, TARGET, client.measure, lambda line: None)


@pytest.mark.parametrize("error", [RunFailedError("connection refused"), OSError(28, "no space")])
def test_the_end_of_the_server_is_the_reason_of_what_fails_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    ended = "tasuki serve ended (signal SIGKILL)"

    class Dead(SimpleNamespace):
        url, model = "http://fake", "m"

        def ended(self) -> str:
            return ended

        def stop(self) -> None:
            pass

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("tasuki.bench.serving.Serving", lambda *_: Dead())
    monkeypatch.setattr("tasuki.bench.load.run_load", fail)
    points = batch_points([1], [100], [8])
    table = batch_command._Table(points, 1, tmp_path, tmp_path / "batch.json")
    with pytest.raises(RunFailedError, match=re.escape(ended)):
        batch_command._start_and_measure(table, "1m", {"model": "m"}, lambda _: None)
