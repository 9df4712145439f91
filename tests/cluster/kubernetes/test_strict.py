"""Every render is accepted by a real API server that refuses unknown fields."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from control_plane import TOOLS

GOLDEN = sorted((Path(__file__).parents[2] / "deploy/golden").glob("*.yaml"))
# Of operators, whose schemas this API server does not have.
FOREIGN = {"ScaledObject", "PodMonitor"}


def apply(cluster: Cluster, text: str) -> subprocess.CompletedProcess[str]:
    words = ["apply", "--dry-run=server", "--validate=strict", "--filename=-"]
    command = [str(TOOLS / "kubectl"), f"--kubeconfig={cluster.plane.kubeconfig}", *words]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("path", GOLDEN, ids=[path.stem for path in GOLDEN])
def test_a_render_is_accepted(cluster: Cluster, path: Path) -> None:
    text = path.read_text().replace("namespace: ml", "namespace: default")
    objects = [each for each in yaml.safe_load_all(text) if each and each["kind"] not in FOREIGN]
    # As JSON: YAML of PyYAML leaves "1e3" without quotes, and Kubernetes reads a number.
    done = apply(cluster, json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(server dry run)") == len(objects)


def test_a_typing_error_is_refused(cluster: Cluster) -> None:
    text = GOLDEN[0].read_text().replace("startupProbe", "startupProb")
    done = apply(cluster, text.replace("namespace: ml", "namespace: default"))
    assert done.returncode != 0
    assert 'unknown field "spec.template.spec.containers[0].startupProb"' in done.stderr
