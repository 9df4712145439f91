"""Whether a sweep's loads could be made, asked before anything is started.

`tasuki bench serve` knows its options: each load is a dry run of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasuki.bench.arguments import secrets_apart, words
from tasuki.bench.errors import BenchError
from tasuki.bench.plan import GOODPUT, Plan

_TIMEOUT_S = 300.0


def check_loads(plan: Plan, tokenizer: Path | None) -> None:
    """Dry-run every load of a plan, and the search's.

    Args:
        plan: The sweep.
        tokenizer: The model's folder; None: it is not on this machine yet, and
            what depends on it is not checked.

    Raises:
        BenchError: One of them cannot be made: its name, and the reason.
    """
    wanted: list[tuple[str, Mapping[str, Any]]] = [(load.name, load.options) for load in plan.loads]
    if plan.goal is not None:
        rate = {"request-rate": 1.0, "num-requests": 1, "slo": plan.goal.slo}
        wanted.append((GOODPUT, {**plan.goal.options, **rate}))
    known: dict[str, Any] = {"tokenizer": tokenizer}
    if tokenizer is None:
        wanted = [(name, _without(options, "prompt-as")) for name, options in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = pool.map(lambda each: _problem({**known, **each[1]}), wanted)
        for (name, _), reason in zip(wanted, reasons, strict=True):
            if reason is not None:
                raise BenchError(f"load {name}: {reason}")


def _problem(options: Mapping[str, Any]) -> str | None:
    options, secrets = secrets_apart(options)
    command = [sys.executable, "-m", "tasuki", "bench", "serve", "--dry-run", *words(options)]
    environment = {**os.environ, **secrets}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        return f"its dry run takes longer than {_TIMEOUT_S:g} s: ask for fewer or shorter requests"
    if done.returncode == 0:
        return None
    said = done.stderr.partition("\nUsage:")[0]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = "; ".join(lines) or f"exit code {done.returncode}"
    return reason.removeprefix("error: ").removeprefix("tasuki bench serve: ")


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {option: value for option, value in options.items() if option != name}
