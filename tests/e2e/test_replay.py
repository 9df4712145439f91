"""A router's request log, from a load on `tasuki serve` to the replay and the plan made from it."""

from __future__ import annotations

import json
import math
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.client import Client
from support.serving import Serve, wait_for_url
from support.waiting import until

from tasuki import _native
from tasuki.doctor.advice import advice
from tasuki.plot.figures.registry import figures
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options

CHUNK_TOKENS = 128
SHARED_TOKENS = 2 * CHUNK_TOKENS
REQUESTS = 24
# The tenant of every request: the log must not name it.
SECRET = "somebody-known"


def prompts() -> list[list[int]]:
    """Two groups of prompts that begin alike for two chunks, and differ then."""
    rng = random.Random(5)
    tokens = range(5, 200)
    begin = [rng.choices(tokens, k=SHARED_TOKENS) for _ in range(2)]
    return [begin[i % 2] + rng.choices(tokens, k=40 + 3 * i) for i in range(REQUESTS)]


def send(client: Client, prompt: list[int]) -> int:
    """Cached tokens of the answer."""
    answer = client.complete(prompt, max_tokens=12, user=SECRET, ignore_eos=True)
    assert answer.usage is not None
    return int(answer.usage["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture
def log(serve: Serve, tiny_model: Path, tmp_path: Path) -> tuple[Path, list[int]]:
    """The log of a load, and the cached tokens that clients were told of."""
    path = tmp_path / "requests.log"
    words = ["--model", str(tiny_model), "--dtype", "float32", "--mixed", "1", "--decode", "1"]
    words += ["--max-model-len", "1024", "--port", "0", "--request-log", str(path)]
    process = serve(*words)
    client = Client(wait_for_url(process), "")
    until(lambda: client.http.get("/ready").status_code == 200, "readiness", deadline_s=60)
    client.model = str(client.http.get("/v1/models").json()["data"][0]["id"])
    # The first of each group is computed before others ask for it.
    told = [send(client, prompt) for prompt in prompts()[:2]]
    with ThreadPoolExecutor(3) as pool:
        told += pool.map(lambda prompt: send(client, prompt), prompts()[2:])
    assert "tasuki_request_log_dropped_total{" not in client.http.get("/metrics").text
    client.close()
    process.signal(signal.SIGINT)
    assert process.wait(deadline_s=60) == 0, process.tail()
    return path, told


def report(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `tasuki simulate --json` says."""
    capfd.readouterr()
    assert _native.run_simulate([*words, "--json"]) == 0
    printed = capfd.readouterr().out
    return dict(json.loads(printed[: printed.rindex("}") + 1]))


def test_a_load_is_logged_replayed_and_planned(
    log: tuple[Path, list[int]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, told = log
    lines = path.read_text().splitlines()
    assert SECRET not in path.read_text() and "127.0.0.1" not in path.read_text()
    records = [r for line in lines[1:] if "t" in (r := json.loads(line))]
    assert len(records) == REQUESTS
    assert max(len(line) for line in lines if line.startswith('{"t"')) < 200
    assert sorted(record.get("c", 0) for record in records) == sorted(told)
    # All but the first of each group begin like another one.
    assert sum("s" in record for record in records) == REQUESTS - 2
    assert {record["s"][1] for record in records if "s" in record} == {SHARED_TOKENS}

    # What really ran, and its error.
    said = report(capfd, str(path))
    assert said["requests"] == REQUESTS and said["what_if"] is None
    for name, off in said["off_percent"].items():
        assert math.isfinite(off), name
    assert math.isfinite(said["trust"]["worst_percent"])
    # Prefix hits are those of the real run: by the tokens that were cached.
    real, replayed = said["measured"]["cached_percent"], said["replayed"]["cached_percent"]
    assert real > 50 and abs(replayed - real) < 10, said

    # Another deployment beside it, its result file, and the picture of both.
    output = tmp_path / "replayed.json"
    then = report(capfd, str(path), "--mixed", "3", "--output", str(output))
    assert then["replayed"] == said["replayed"]
    assert set(then["what_if"]) == set(then["replayed"]) and then["what_if"] != then["replayed"]
    results = load([Source(path), Source(output)])
    drawn = {figure.name: figure for figure in figures(results, Options())}
    assert {len(panel.curves) for panel in drawn["compare"].panels} == {2}

    # What the doctor makes of it.
    assert "2 mixed workers would give" in advice(path, 1, 1)

    # The log as the workload of a plan.
    plan = tmp_path / "plan.json"
    words = ["--from", str(path), "--gpus", "2", "--slo", "ttft=5s,tpot=500ms", "--designs", "3"]
    words += ["--probe-requests", "60", "--no-variations", "--output", str(plan)]
    assert _native.run_plan(words) == 0
    assert json.loads(plan.read_text())["best"]["rate"] > 0
    capfd.readouterr()
    assert _native.run_plan([*words, "--lengths", "100:10"]) == 1
    assert "--lengths says what is sent" in capfd.readouterr().err
