"""`tasuki bench serve` as a user meets it: a child process, its output, file and exit code."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

TASUKI = [sys.executable, "-m", "tasuki", "bench"]
DEADLINE_S = 60


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A fake server: 20 ms to the first token, 10 ms to each further one."""
    command = [*TASUKI, "fake-server", "--port", "0", "--ttft-ms", "20", "--itl-ms", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
        server.terminate()
        assert server.wait(DEADLINE_S) == 0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*TASUKI, "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_run_prints_the_table_and_writes_the_file(url: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    done = run(
        *("--base-url", url, "--endpoint", "chat", "--max-concurrency", "4", "--quiet"),
        *("--num-requests", "12", "--input-tokens", "32", "--output-tokens", "5"),
        *("--slo", "ttft=10s,tpot=10s", "--label", "mine", "--api-key", "sk-secret"),
        *("--topology", '{"name": "1p1d", "workers": 2}', "--output", str(path)),
    )
    assert done.returncode == 0, done.stderr
    for row in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     12",
        "Failed requests:                         0",
        "Total generated tokens:                  60",
        "-------------- Time to First Token ---------------",
        "-------------- Time to Second Token --------------",
        "Requests that met it (%):                100.00",
    ):
        assert row in done.stdout.splitlines(), done.stdout
    assert "sk-secret" not in path.read_text()
    result = json.loads(path.read_text())
    assert result["schema"] == "tasuki.bench/1" and result["kind"] == "serve"
    assert (result["label"], result["topology"]["name"]) == ("mine", "1p1d")
    assert result["command"][:3] == ["tasuki", "bench", "serve"]
    assert (result["model"], result["endpoint"]) == ("fake", "/v1/chat/completions")
    assert result["arrival"]["kind"] == "closed"
    metrics, requests = result["metrics"], result["requests"]
    assert (metrics["completed"], metrics["output_tokens"]) == (12, 60)
    # The server never sends earlier than it says; how much later is the machine's affair.
    assert metrics["ttft_ms"]["min"] >= 20
    assert metrics["tpot_ms"]["min"] >= 5
    assert metrics["goodput"] == pytest.approx(metrics["request_throughput"])
    assert requests["index"] == list(range(12))
    assert all(len(array) == 12 for array in requests.values() if array is not None)
    assert [sum(tokens) for tokens in requests["chunk_tokens"]] == [5] * 12


def test_an_interrupt_still_reports_what_was_measured(url: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = [
        *(*TASUKI, "serve", "--base-url", url, "--output", str(path)),
        # The two users begin apart, else both may just be between two requests when it ends.
        *("--max-concurrency", "2", "--ramp-s", "0.06", "--duration-s", "3600"),
        *("--input-tokens", "8", "--output-tokens", "5"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as bench:
        assert bench.stderr is not None
        line = bench.stderr.readline()  # progress, as there is no terminal
        assert "tok/s" in line and "in flight" in line, line
        bench.send_signal(signal.SIGINT)
        out, _ = bench.communicate(timeout=DEADLINE_S)
        assert bench.returncode == 130
    assert re.search(r"^Interrupted requests: +[12]$", out, re.MULTILINE), out
    result = json.loads(path.read_text())
    assert result["interrupted"] and result["metrics"]["completed"] > 10
    assert result["metrics"]["failed"] == 0


def test_failures_have_exit_codes_and_say_what_to_do(url: str) -> None:
    refused = run("--base-url", "http://127.0.0.1:9", "--ready-timeout-s", "0.1", "--no-output")
    assert refused.returncode == 1
    assert "nobody listens at 127.0.0.1:9" in refused.stderr
    assert "--ready-timeout-s" in refused.stderr
    warmup = run("--base-url", f"{url}/nowhere", "--model", "x", "--no-output")
    assert warmup.returncode == 1
    assert "the warm-up failed, so the run was not begun: HTTP 404" in warmup.stderr
    foreign = run("--base-url", url, "--turns", "3", "--no-output")
    assert foreign.returncode == 1 and "--turns" in foreign.stderr
    assert run("--slo", "ttft=2").returncode == 2


@pytest.mark.parametrize("form", ["--tokenizer {}", "--tokenizer={}"])
def test_a_tokenizer_is_a_folder_or_a_name(
    form: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are those of `tasuki model fetch`; the default model's folder is made up here."""
    from tasuki.models import default_model

    monkeypatch.setenv("TASUKI_CACHE", str(tmp_path))
    named = default_model.folder()
    shutil.copytree(tiny_model, named)
    (named / "tasuki-receipt.json").write_text('{"recipe": 1, "files_bytes": {}}')
    assert default_model.is_present(named)
    for name in (str(tiny_model), "smollm2-135m"):
        done = run("--dry-run", *form.format(name).split(), "--prompt-as", "tokens")
        assert done.returncode == 0, done.stderr
        assert '"prompt_form":"tokens"' in done.stdout
    done = run("--dry-run", *form.format("no-such-model").split())
    assert done.returncode == 1
    assert "no model 'no-such-model'" in done.stderr
