"""The real thing on a tiny model: a sweep with a crash in it, its resumption, a batch, steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

DEADLINE_S = 400.0  # of one command; a sweep starts ten processes that import torch
SWEEP = """
model: {model}
serve: {{dtype: float32, max-model-len: 256, kv-memory: 16MB}}
topologies: [1p1d, {{topology: 1m, name: broken, serve: {{max-model-len: 999999}}}}]
loads:
  - name: open
    arguments: {{input-tokens: 24, output-tokens: 5, num-requests: 6, slo: "ttft=60s"}}
    each: {{request-rate: [20]}}
  - name: wrong
    arguments: {{lengths: 9000:2}} # more than max-model-len
goodput:
  slo: ttft=1ms,ttst=1ms
  arguments: {{input-tokens: 24, output-tokens: 4}}
  start_rate: 50
  min_requests: 20
  min_probe_s: 0
  looks: 1
  max_probes: 2
  confidence: 0.6
warmup_requests: 1
"""


def tasuki(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tasuki", "bench", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_sweep_measures_what_it_can_and_resumes(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SWEEP.format(model=tiny_model))
    done = tasuki("sweep", "s.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    points = read(tmp_path / "out" / "sweep.json")["points"]
    assert {key: point["state"] for key, point in points.items()} == {
        "1p1d/open-request-rate-20": "done",
        "1p1d/wrong": "failed",
        "1p1d/goodput": "done",
        "broken/open-request-rate-20": "failed",
        "broken/wrong": "failed",
        "broken/goodput": "failed",
    }
    assert "may have 256 tokens" in points["1p1d/wrong"]["reason"]
    assert "999999" in points["broken/goodput"]["reason"]

    result = read(tmp_path / "out" / "1p1d" / "open-request-rate-20.json")
    assert result["label"] == "1p1d"
    assert result["topology"]["decode"] == 1
    assert result["metrics"]["completed"] == 6
    assert result["requests"]["met"] == [True] * 6
    assert result["requests"]["input_tokens"] == [24] * 6
    assert result["requests"]["output_tokens"] == [5] * 6
    assert "open-request-rate-20" in done.stdout

    # Nothing meets 1 ms: both probes fail, and the answer says so.
    found = read(tmp_path / "out" / "1p1d" / "goodput.json")
    assert [(p["rate"], p["meets"]) for p in found["points"]] == [(25.0, False), (50.0, False)]
    assert found["interval"] == [0.0, 25.0]
    assert found["slo"] == {"ttft_s": 0.001, "ttst_s": 0.001}

    written = (tmp_path / "out" / "1p1d" / "open-request-rate-20.json").stat().st_mtime_ns
    text = SWEEP.format(model=tiny_model).replace("lengths: 9000:2", "lengths: 8:2")
    (tmp_path / "s.yaml").write_text(text)
    again = tasuki("sweep", "s.yaml", "-o", "out", "--topologies", "1p1d", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "1p1d/open-request-rate-20: done before" in again.stderr
    state = read(tmp_path / "out" / "sweep.json")["points"]
    assert {point["state"] for point in state.values()} == {"done"}
    kept = tmp_path / "out" / "1p1d" / "open-request-rate-20.json"
    assert kept.stat().st_mtime_ns == written


def test_ctrl_c_ends_everything_and_keeps_what_was_measured(
    tiny_model: Path, tmp_path: Path
) -> None:
    text = SWEEP.format(model=tiny_model).replace(
        "lengths: 9000:2", "lengths: 24:5, request-rate: 0.01, num-requests: 20"
    )
    (tmp_path / "s.yaml").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-m", "tasuki", "bench", "sweep", "s.yaml", "-o", "out"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heed_sigint,
    )
    try:
        family = _when_a_load_runs(process, tmp_path / "out" / "1p1d" / "wrong.log")
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, said
    assert "the same command goes on from here" in said
    _, alive = psutil.wait_procs(family, timeout=30.0)
    assert not alive
    points = read(tmp_path / "out" / "sweep.json")["points"]
    assert points["1p1d/open-request-rate-20"]["state"] == "done"
    assert points["1p1d/wrong"]["state"] == "pending"
    assert [p.name for p in (tmp_path / "out" / "1p1d").glob("*.json")] == [
        "open-request-rate-20.json"
    ]


def _heed_sigint() -> None:
    """As in a terminal: what a shell starts in its background ignores Ctrl-C, tests too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _when_a_load_runs(process: subprocess.Popen[str], log: Path) -> list[psutil.Process]:
    """Waits until the load of `log` has begun; gives all processes that belong to the sweep."""
    end_s = time.monotonic() + DEADLINE_S
    while not (log.exists() and log.stat().st_size):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < end_s, "the load did not begin"
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 4  # serve, two workers, router, load
    return family


def test_a_batch_and_the_steps_of_a_worker(tiny_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(tiny_model), "--serve", "dtype=float32", "--serve", "kv-memory=16MB")
    done = tasuki(
        *("batch", *model, "--serve", "max-model-len=256", "--topology", "1p1d"),
        *(
            "--batch",
            "1,3",
            "--input-tokens",
            "16",
            "--output-tokens",
            "4",
            "--repeat",
            "1",
            "-o",
            "b.json",
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    table = read(tmp_path / "b.json")
    assert table["kind"] == "batch"
    assert [(row["batch"], row["input_tokens"]) for row in table["rows"]] == [(1, 16), (3, 16)]
    for row in table["rows"]:
        # Equal where a busy machine lets the client read all tokens at once.
        assert 0.0 < row["ttft_s"] <= row["latency_s"]
        expected = row["batch"] * 16 / row["ttft_s"]
        assert row["input_throughput"] == pytest.approx(expected)
    assert len(done.stdout.splitlines()) == 3

    done = tasuki(
        *("batch", "--steps", *model, "--repeat", "1", "-o", "s.json"),
        *("--prefill-tokens", "16,64", "--prefill-context", "0,32"),
        *("--decode-batch", "1,4", "--decode-context", "32", "--transfer-blocks", "2,8,999999"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    steps = read(tmp_path / "s.json")
    assert steps["kind"] == "steps"
    assert [(row["tokens"], row["context"]) for row in steps["prefill"]] == [
        *((16, 0), (64, 0)),
        *((16, 32), (64, 32)),
    ]
    assert [row["batch"] for row in steps["decode"]] == [1, 4]
    assert [(row["tokens"], row["batch"]) for row in steps["beside"]] == [(16, 1)]
    assert [row["blocks"] for row in steps["transfer"]] == [2, 8]
    assert "TransferPoint(blocks=999999)" in done.stderr
    block_bytes = steps["engine"]["block_bytes"]
    assert all(row["bytes"] == row["blocks"] * block_bytes for row in steps["transfer"])
    assert [row["batch"] for row in steps["between"]] == [1, 4]
    assert all(0.0 <= row["seconds"] < 1.0 for row in steps["between"])
    assert [row["batch"] for row in steps["messages"]] == [1]
    assert all(0.0 < row["seconds"] < 1.0 for row in steps["messages"])
    assert all(
        row["seconds"] > 0.0 for kind in ("prefill", "decode", "transfer") for row in steps[kind]
    )
