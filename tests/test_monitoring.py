"""The dashboard and the alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parents[1]
MONITORING = CHECKOUT / "examples" / "monitoring"
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)


def exported() -> set[str]:
    """Names of time series, by the generated page."""
    rows = _ROW.findall((CHECKOUT / "docs" / "metrics.md").read_text())
    names = set()
    for name, kind in rows:
        parts = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + part for part in parts}
    return names


def unknown(queries: list[str]) -> set[str]:
    """Names in them that are not exported."""
    return {name for query in queries for name in re.findall(r"tasuki_\w+", query)} - exported()


def queries_of(file: str) -> list[str]:
    """PromQL of the dashboard or of the rules."""
    text = (MONITORING / file).read_text()
    if file.endswith(".json"):
        panels = json.loads(text)["panels"]
        return [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("file", ["tasuki.json", "alerts.yaml"])
def test_every_metric_exists(file: str) -> None:
    queries = queries_of(file)
    assert len(queries) >= 9
    assert unknown(queries) == set()
    assert unknown([queries[0].replace("tasuki_", "tasuki_x_")])


@pytest.mark.system
def test_the_dashboard_is_made_of_its_rows() -> None:
    script = str(CHECKOUT / "tools" / "make_dashboard.py")
    subprocess.run([sys.executable, script, "--check"], check=True)
