"""What a sweep's loads are asked before anything is started, and what is said of them."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from tasuki.bench import check_loads as module
from tasuki.bench.check_loads import check_loads
from tasuki.bench.errors import BenchError
from tasuki.bench.plan import Plan


def plan_of(**options: Any) -> Plan:
    load: Any = SimpleNamespace(name="chat", options=options)
    plan: Any = SimpleNamespace(loads=[load], goal=None)
    return plan


def test_no_command_line_has_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append((command, options["env"]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(module.subprocess, "run", run)
    headers = ["x-api-key: K2", "x-tenant:a"]
    check_loads(plan_of(**{"api-key": "K1", "input-tokens": 5, "header": headers}), None)
    [(command, environment)] = asked
    assert command[-2:] == ["--input-tokens", "5"] and not {"K1", "--header"} & set(command)
    assert environment["OPENAI_API_KEY"] == "K1"
    assert environment["TASUKI_BENCH_HEADERS"] == "x-api-key: K2\nx-tenant:a"


def test_a_dry_run_that_takes_too_long_names_its_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], *, timeout: float, **_: Any) -> Any:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(module.subprocess, "run", run)
    with pytest.raises(BenchError, match="load chat: its dry run takes longer than 300 s: ask"):
        check_loads(plan_of(), None)
