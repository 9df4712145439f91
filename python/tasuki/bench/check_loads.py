"""Whether a sweep's loads could be made, asked before anything is started.

`tasuki bench serve` knows its options: each load is a dry run of it. Some run at a time, each
waited for by a thread; the first load that cannot be made, and Ctrl-C, end all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tasuki.bench.arguments import secrets_apart, words
from tasuki.bench.errors import BenchError
from tasuki.bench.plan import GOODPUT, Plan
from tasuki.launch.parent_death import PARENT_VARIABLE

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
    runs = _DryRuns()
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        reasons = pool.map(lambda each: runs.problem({**known, **each[1]}), wanted)
        for (name, _), reason in zip(wanted, reasons, strict=True):
            if reason is not None:
                raise BenchError(f"load {name}: {reason}")
    finally:
        runs.end()
        pool.shutdown(cancel_futures=True)


class _DryRuns:
    """The processes that run, from any thread, until `end`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the others
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def end(self) -> None:
        """Kill what runs, and let nothing start."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()

    def problem(self, options: Mapping[str, Any]) -> str | None:
        """Why a load with these options cannot be made; None: it can."""
        options, secrets = secrets_apart(options)
        command = [sys.executable, "-m", "tasuki", "bench", "serve", "--dry-run", *words(options)]
        environment = {**os.environ, **secrets, PARENT_VARIABLE: str(os.getpid())}
        with self._lock:
            if self._ended:
                return None
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            self._running.add(process)
        try:
            _, said = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return (
                f"its dry run takes longer than {_TIMEOUT_S:g} s: ask for fewer or shorter requests"
            )
        finally:
            with self._lock:
                self._running.discard(process)
        if process.returncode == 0:
            return None
        said = said.partition("\nUsage:")[0].partition("\nFor more information,")[0]
        lines = [line.strip() for line in said.splitlines()]
        reason = "; ".join(line for line in lines if line) or f"exit code {process.returncode}"
        return reason.removeprefix("error: ").removeprefix("tasuki bench serve: ")


def _without(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {option: value for option, value in options.items() if option != name}
