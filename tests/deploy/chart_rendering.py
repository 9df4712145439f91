"""Helm, where there is one, and what it says of the chart."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CHART = REPOSITORY / "deploy/helm/tasuki"
TOOLS = Path(os.environ.get("TASUKI_CLUSTER_TOOLS", Path.home() / ".cache/tasuki/cluster-tools"))


def helm() -> str:
    """The program. Skips the test where there is none."""
    found = TOOLS / "helm"
    program = str(found) if found.exists() else shutil.which("helm")
    if program is None:
        pytest.skip(f"no helm on the path or in {TOOLS}: `make cluster-tools` builds one")
    return program


def render(
    release: str, values: Path, *more: str, chart: Path = CHART
) -> subprocess.CompletedProcess[str]:
    """Render a chart with a file of values; `more` are arguments of Helm."""
    command = [helm(), "template", release, str(chart), "--kube-version", "1.37.2"]
    return subprocess.run(
        [*command, "--values", str(values), *more],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
