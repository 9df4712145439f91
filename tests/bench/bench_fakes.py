"""A deployment and a load client that do what a test says, and results of known numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasuki.bench.errors import RunFailedError
from tasuki.bench.header import SCHEMA
from tasuki.bench.load import LoadRun
from tasuki.bench.topologies import Target

SUMMARY = ("mean", "median", "std", "min", "max", "p90", "p95", "p99")


def serve_result(label: str = "1p1d", **requests: Any) -> dict[str, Any]:
    """A result of kind "serve"; `requests` are per-request arrays."""
    times = dict.fromkeys(SUMMARY, 12.5)
    metrics: dict[str, Any] = dict.fromkeys(
        ("duration_s", "request_throughput", "output_throughput", "goodput", "attainment"), 1.0
    )
    metrics |= dict.fromkeys(("ttft_ms", "ttst_ms", "tpot_ms", "itl_ms", "e2e_ms"), times)
    metrics |= {"sent": 4, "completed": 4, "failed": 0}
    return {
        "schema": SCHEMA,
        "kind": "serve",
        "label": label,
        "slo": {"ttft_s": 1.0},
        "workload": {"kind": "random"},
        "metrics": metrics,
        "requests": requests,
    }


class FakeDeployment:
    """Serves until `dies`."""

    def __init__(self, target: Target, log: Path) -> None:
        self.target = target
        self.url = "http://fake"
        self.model = "fake-model"
        self.reason: str | None = None
        self.stopped = False

    def ended(self) -> str | None:
        return self.reason

    def stop(self) -> None:
        self.stopped = True


class FakeSystem:
    """Deploys and measures; every call is written down.

    Attributes:
        deployed: All deployments so far.
        runs: All runs so far, warm-ups left out.
        warmups: Of the warm-ups.
        broken: Targets that do not come up, by name.
        on_run: Called in each run; may raise, or give another result.
    """

    def __init__(self) -> None:
        self.deployed: list[FakeDeployment] = []
        self.runs: list[LoadRun] = []
        self.warmups: list[LoadRun] = []
        self.broken: set[str] = set()
        self.on_run: Callable[[LoadRun], Mapping[str, Any] | None] = lambda run: None

    def deploy(self, target: Target, log: Path) -> FakeDeployment:
        if target.name in self.broken:
            raise RunFailedError(f"{target.name} did not come up")
        self.deployed.append(FakeDeployment(target, log))
        return self.deployed[-1]

    def measure(self, run: LoadRun) -> Mapping[str, Any]:
        if run.log.stem == "warmup":
            self.warmups.append(run)
            return serve_result()
        self.runs.append(run)
        result = self.on_run(run) or serve_result(run.label)
        run.result.parent.mkdir(parents=True, exist_ok=True)
        run.result.write_text(json.dumps(result))
        return result

    @property
    def names(self) -> list[str]:
        """Runs as `topology/load`."""
        return [f"{run.label}/{run.log.stem}" for run in self.runs]
