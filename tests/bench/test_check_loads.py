"""What a sweep's loads are asked before anything is started, and what is said of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.bench import check_loads as module
from tasuki.bench.check_loads import check_loads
from tasuki.bench.errors import BenchError
from tasuki.bench.plan import Plan


def plan_of(count: int = 1, **options: Any) -> Plan:
    loads: Any = [SimpleNamespace(name="chat", options=options)] * count
    plan: Any = SimpleNamespace(loads=loads, goal=None)
    return plan


class FakeProcess:
    """A dry run that succeeds."""

    returncode = 0

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        return "", ""

    def kill(self) -> None:
        pass


def test_no_command_line_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def start(command: list[str], **options: Any) -> Any:
        asked.append((command, options["env"]))
        return FakeProcess()

    monkeypatch.setattr(module.subprocess, "Popen", start)
    headers = ["x-api-key: K2", "x-tenant:a"]
    check_loads(plan_of(**{"api-key": "K1", "input-tokens": 5, "header": headers}), None)
    [(command, environment)] = asked
    assert command[-2:] == ["--input-tokens", "5"] and not {"K1", "--header"} & set(command)
    assert environment["OPENAI_API_KEY"] == "K1"
    assert environment["TASUKI_BENCH_HEADERS"] == "x-api-key: K2\nx-tenant:a"


def test_a_dry_run_that_takes_too_long_names_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(FakeProcess):
        def communicate(self, timeout: float | None = None) -> tuple[str, str]:
            if timeout is not None:
                raise subprocess.TimeoutExpired("tasuki", timeout)
            return "", ""

    monkeypatch.setattr(module.subprocess, "Popen", lambda *_, **__: Slow())
    with pytest.raises(BenchError, match="load chat: its dry run takes longer than 300 s: ask"):
        check_loads(plan_of(), None)


@pytest.mark.system
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num-requests": -1}, r"invalid value '-1' for '--num-requests <N>': .*\S$"),
        ({"arrival": "constant", "request-rate": "x"}, r"invalid value 'x' for '--request-rate .*"),
    ],
)
def test_a_load_is_refused_by_its_value(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BenchError, match=f"^load chat: {says}") as refused:
        check_loads(plan_of(**options), None)
    assert "--help" not in str(refused.value)


@pytest.mark.system
def test_ctrl_c_ends_the_dry_runs_and_starts_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n: >{tmp_path}/$$.pid\nexec sleep 600\n")
    python.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(python))
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def started() -> list[int]:
        return [int(path.stem) for path in tmp_path.glob("*.pid")]

    def interrupt() -> None:
        while len(started()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            check_loads(plan_of(count=4), None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started()) == 2
    for process in started():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, 0)
            pytest.fail(f"{process} still runs")
