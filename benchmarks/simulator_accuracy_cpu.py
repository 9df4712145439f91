"""How far the simulator is off on this machine: measured and simulated in one run.

    python benchmarks/simulator_accuracy_cpu.py               21 minutes, a quiet machine

A worker of SmolLM2 has the first core of this process, the client and the router the others: what
the simulator does not know, that they take the worker's time, does not happen. Each load is served
in a closed loop, and at two shares of the rate that this reached, in turns, and simulated with the
same requests, other ones in each turn. Before each load the steps are measured on the worker's
core, while it is idle: the pace of a machine that others use changes within minutes, and a queue
amplifies what the simulator is told wrong. The file also has how far the turns' figures are apart
(*spread*), the share of time that the host took (*steal*), and how long the steps take against
those of the first load (*pace*).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from candidates import CPU_GRID, CPU_LOADS
from programs import free_port, running
from simulator_accuracy import RESULTS, TASUKI, Pair, picked, row, simulate, write

from tasuki.bench.arguments import words
from tasuki.bench.errors import RunFailedError
from tasuki.models.fetch import resolve_model

MODEL = "smollm2-135m"
AT_A_TIME = 16
SHARES = (0.5, 0.85)  # of the closed loop's rate
READY_S = 120.0


def await_ready(url: str) -> None:
    """Until the router has a worker."""
    until = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        if time.monotonic() > until:
            raise RunFailedError(f"{url} serves nothing after {READY_S:g} s")
        time.sleep(0.2)


def run(command: Sequence[str], cores: list[int]) -> None:
    """A program on these cores, until its end."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    if done.returncode != 0:
        said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        raise RunFailedError(f"{' '.join(command)}\n{said}")


class OnThisMachine:
    """One worker on its own core."""

    def __init__(self, folder: Path, seconds: float, turns: int) -> None:
        cores = psutil.Process().cpu_affinity()
        if len(cores) < 2:
            raise SystemExit("one processor core: the worker needs one of its own, use 2 or more")
        self._own, self._others = cores[:1], cores[1:]
        self._folder, self._seconds, self._turns = folder, seconds, turns
        self._model = str(resolve_model(MODEL))
        self._steps = folder / "steps.json"
        self._first_steps: list[float] = []  # times of the first table's points
        self._seeds = itertools.count(1)  # another for each run: no prompt is cached

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every load: closed loop, then the shares of its rate."""
        with self._serving() as url:
            for lengths in CPU_LOADS.values():
                name = "{input-tokens}:{output-tokens}".format_map(lengths)
                closed = {**lengths, "arrival": "closed", "max-concurrency": AT_A_TIME}
                rate = statistics.median(
                    pair[0]["request_throughput"] for pair in self._pairs(url, closed)
                )
                yield self._row(f"{name}, {AT_A_TIME} at a time")
                for share in SHARES:
                    self._pairs(url, {**lengths, "request-rate": share * rate})
                    yield self._row(f"{name}, {share:g} of its rate")

    def _pairs(self, url: str, load: dict[str, Any]) -> list[Pair]:
        """The load's turns, measured and simulated; kept for `_row`."""
        self._pace = self._measure_steps()
        self._measured: list[Pair] = []
        before, began = psutil.cpu_times().steal, time.monotonic()
        for _ in range(self._turns):
            sent = {**load, "duration-s": self._seconds, "seed": next(self._seeds)}
            output = self._folder / "result.json"
            command = [*TASUKI, "bench", "serve", "--base-url", url, "--quiet", "--no-chunks"]
            command += words({**sent, "tokenizer": self._model, "temperature": 0})
            run([*command, "--output", str(output)], self._others)
            measured = json.loads(output.read_text())["metrics"]
            rate = {"request_throughput": float(measured["request_throughput"])}
            found = simulate({"mixed": 1, "steps": self._steps}, sent)
            self._measured.append(({**picked(measured), **rate}, picked(found)))
        passed = (time.monotonic() - began) * len(self._own + self._others)
        self._steal = (psutil.cpu_times().steal - before) / passed
        return self._measured

    def _measure_steps(self) -> float:
        """Write the table of steps; how long they take, as a multiple of the first table's."""
        command = [*TASUKI, "bench", "batch", "--steps", "--model", self._model]
        run([*command, *words({**CPU_GRID, "output": self._steps})], self._own)
        table = json.loads(self._steps.read_text())
        steps = [row["seconds"] for kind in ("prefill", "decode") for row in table[kind]]
        self._first_steps = self._first_steps or steps
        ratios = [now / first for now, first in zip(steps, self._first_steps, strict=True)]
        return statistics.geometric_mean(ratios)

    def _row(self, load: str) -> dict[str, Any]:
        spread = {
            metric: max(values) - min(values)
            for metric in self._measured[0][1]
            if (values := [measured[metric] for measured, _ in self._measured])
        }
        found = row("", "1 mixed", load, self._measured)
        return {**found, "spread": spread, "steal": self._steal, "pace": self._pace}

    @contextlib.contextmanager
    def _serving(self) -> Iterator[str]:
        """The router's URL."""
        port, worker_port = free_port(), free_port()
        worker = [*TASUKI, "worker", "--model", self._model, "--role", "mixed"]
        router = [*TASUKI, "router", "--model", self._model, "--port", str(port)]
        router += ["--worker", f"127.0.0.1:{worker_port}"]
        with (
            running([*worker, "--port", str(worker_port)], self._own),
            running(router, self._others),
        ):
            url = f"http://127.0.0.1:{port}"
            await_ready(url)
            yield url


def main() -> None:
    """Measure, simulate, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a run")
    parser.add_argument("--turns", type=int, default=3)
    default = RESULTS / "simulator_accuracy_cpu.json"
    parser.add_argument("--output", type=Path, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tasuki-accuracy-") as folder:
        machine = OnThisMachine(Path(folder), options.seconds, options.turns)
        write("simulator_accuracy_cpu", MODEL, options.output, machine.rows())


if __name__ == "__main__":
    main()
