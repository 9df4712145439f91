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
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| ([\w, ]*) \|", re.MULTILINE)
_SELECTORS = re.compile(r"tasuki_\w+\{([^}]*)\}")
_GROUPS = re.compile(r"by \(([^)]*)\)")
# Of Grafana's legends and of Prometheus' annotations.
_SHOWN = re.compile(r"\{\{ *(?:\$labels\.)?([a-z_]+) *\}\}")


def exported() -> dict[str, set[str]]:
    """Labels of each time series, by the generated page."""
    rows = _ROW.findall((CHECKOUT / "docs" / "metrics.md").read_text())
    names = {}
    for name, kind, labels in rows:
        known = set(filter(None, labels.split(", ")))
        if kind == "histogram":
            names |= {f"{name}_{part}": known for part in ("sum", "count")}
            names[f"{name}_bucket"] = known | {"le"}
        else:
            names[name] = known
    return names


def unknown(queries: list[str]) -> set[str]:
    """Names in them that are not exported."""
    found = {name for query in queries for name in re.findall(r"tasuki_\w+", query)}
    return found - exported().keys()


def strange_labels(query: str, shown: str) -> set[str]:
    """Labels that the query or its legend has, and its metrics or its groups have not."""
    series = exported()
    known = set().union(*(series[name] for name in re.findall(r"tasuki_\w+", query)))
    selected = {
        part.split("=")[0].rstrip("!~ ")
        for selector in _SELECTORS.findall(query)
        for part in selector.split(",")
    }
    groups = {name.strip() for group in _GROUPS.findall(query) for name in group.split(",")}
    left = groups if groups or query.startswith(("sum", "histogram_quantile")) else known
    return ((selected | groups) - known) | (set(_SHOWN.findall(shown)) - left)


def queries_of(file: str) -> list[tuple[str, str]]:
    """PromQL of the dashboard or of the rules, and what is written beside its result."""
    text = (MONITORING / file).read_text()
    if file.endswith(".json"):
        panels = json.loads(text)["panels"]
        targets = [target for panel in panels for target in panel.get("targets", ())]
        return [(target["expr"], target["legendFormat"]) for target in targets]
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    return [(rule["expr"], rule["annotations"]["summary"]) for rule in rules]


@pytest.mark.parametrize("file", ["tasuki.json", "alerts.yaml"])
def test_every_metric_exists(file: str) -> None:
    queries = [query for query, _ in queries_of(file)]
    assert len(queries) >= 9
    assert unknown(queries) == set()
    assert unknown([queries[0].replace("tasuki_", "tasuki_x_")])


@pytest.mark.parametrize("file", ["tasuki.json", "alerts.yaml"])
def test_every_label_exists(file: str) -> None:
    strange = {query: strange_labels(query, shown) for query, shown in queries_of(file)}
    assert not any(strange.values()), strange


@pytest.mark.parametrize(
    ("query", "shown", "strange"),
    [
        ('sum (rate(tasuki_requests_total{outcame!="done"}[5m]))', "", {"outcame"}),
        ("sum by (phases) (tasuki_phase_seconds_sum)", "{{phases}}", {"phases"}),
        ("sum by (phase) (tasuki_phase_seconds_sum)", "{{role}}", {"role"}),
        ("tasuki_worker_up == 0", "{{ $labels.worker }} {{ $labels.reason }}", {"reason"}),
    ],
)
def test_a_label_that_is_none_is_found(query: str, shown: str, strange: set[str]) -> None:
    assert strange_labels(query, shown) == strange


@pytest.mark.system
def test_the_dashboard_is_made_of_its_rows() -> None:
    script = str(CHECKOUT / "tools" / "make_dashboard.py")
    subprocess.run([sys.executable, script, "--check"], check=True)
