"""`tasuki bench sweep --on ray`: ratios, transports and spreads in one file, measured and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.on_ray import RayCluster, workers
from support.processes import environment

pytestmark = [pytest.mark.system, pytest.mark.cluster, pytest.mark.timeout(1800)]

REQUESTS = 6
SWEEP = """
model: {model}
serve: {{dtype: float32, device: cpu, kv-memory: 8MB, strict-roles: true}}
topologies: [1p1d, 2p1d]
transport: [nixl-ucx, tcp]
spread: [pack, strict-spread]
loads:
  - name: chat
    arguments: {{input-tokens: 24, output-tokens: 5, num-requests: {requests}}}
    each: {{request-rate: [20]}}
"""


def test_a_sweep_compares_ratios_transports_and_spreads(
    ray_cluster: Callable[..., RayCluster], tiny_model: Path, tmp_path: Path
) -> None:
    """Two nodes: three workers, each on a node of its own, have no room."""
    cluster = ray_cluster(2, 1)

    def tasuki(*words: str) -> subprocess.CompletedProcess[str]:
        return cluster.namespace.run(
            subprocess.run,
            [sys.executable, "-m", "tasuki", *words],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=1500,
        )

    (tmp_path / "s.yaml").write_text(SWEEP.format(model=tiny_model, requests=REQUESTS))
    address = f"ray://{cluster.address}"
    done = tasuki("bench", "sweep", "s.yaml", "--on", address, "-o", "out")
    points = json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]
    found = {key.partition("/")[0]: point for key, point in points.items()}
    assert len(found) == 8, done.stderr
    for name, point in found.items():
        if name.startswith("2p1d") and name.endswith("strict-spread"):
            assert point["state"] == "failed", name
            assert "the Ray cluster has no room for" in point["reason"], point
            continue
        assert point["state"] == "done", (name, point, done.stderr)
        result = json.loads((tmp_path / "out" / name / "chat-request-rate-20.json").read_text())
        assert (result["label"], result["metrics"]["completed"]) == (name, REQUESTS)
    assert done.returncode == 1, "some had no room"
    assert not workers()
    drawn = tasuki("plot", "out", "--out", "plots")
    assert drawn.returncode == 0, drawn.stderr
    assert list((tmp_path / "plots").glob("*.png"))
