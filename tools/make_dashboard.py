"""Makes the Grafana dashboard, examples/monitoring/tasuki.json, from the rows below.

python tools/make_dashboard.py            after a change of a panel or of a metric's name
python tools/make_dashboard.py --check    whether the file is that of the rows
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parents[1] / "examples" / "monitoring" / "tasuki.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time.

    Attributes:
        title: Above it.
        unit: One of Grafana's: `s`, `reqps`, `ops`, `percentunit`, `Bps`, `short`, or `suffix:` and
            a word of our own.
        queries: PromQL by legend.
    """

    title: str
    unit: str
    queries: dict[str, str]


def quantiles(metric: str) -> dict[str, str]:
    """p50, p90 and p99 of a histogram."""
    rate = f"sum by (le) (rate({metric}_bucket[$__rate_interval]))"
    return {f"p{q}": f"histogram_quantile(0.{q}, {rate})" for q in (50, 90, 99)}


def per_second(metric: str, by: str = "", where: str = "") -> str:
    """A counter's rate, summed."""
    of = f" by ({by})" if by else ""
    return f"sum{of} (rate({metric}{where}[$__rate_interval]))"


_PHASE = "tasuki_phase_seconds"
_FREE, _ALL = "tasuki_worker_free_blocks", "tasuki_worker_total_blocks"
_CACHED, _COMPUTED = (
    per_second(f"tasuki_worker_prompt_tokens_{kind}_total", "worker")
    for kind in ("cached", "computed")
)
WORKER = "{{role}} {{worker}}"
LINK = "{{peer}} → {{worker}} {{transport}}"

ROWS = {
    "What clients see": (
        Panel("Time to first token", "s", quantiles("tasuki_time_to_first_token_seconds")),
        Panel("Time to second token", "s", quantiles("tasuki_time_to_second_token_seconds")),
        Panel("Inter-token latency", "s", quantiles("tasuki_inter_token_latency_seconds")),
        Panel(
            "Requests by outcome",
            "reqps",
            {"{{outcome}}": per_second("tasuki_requests_total", "outcome")},
        ),
        Panel(
            "Tokens",
            "suffix: tok/s",
            {
                "prompt": per_second("tasuki_prompt_tokens_total"),
                "output": per_second("tasuki_output_tokens_total"),
            },
        ),
        Panel("Requests in flight", "short", {"requests": "sum (tasuki_requests_in_flight)"}),
    ),
    "Where the time goes": (
        Panel(
            "Mean of each phase",
            "s",
            {
                "{{phase}}": per_second(f"{_PHASE}_sum", "phase")
                + " / "
                + per_second(f"{_PHASE}_count", "phase")
            },
        ),
        Panel(
            "Handoffs: exposed transfer",
            "s",
            {
                f"p{q}": f"histogram_quantile(0.{q}, "
                + per_second(f"{_PHASE}_bucket", "le", '{phase="transfer_exposed"}')
                + ")"
                for q in (50, 90, 99)
            },
        ),
        Panel(
            "KV pulled",
            "Bps",
            {WORKER: per_second("tasuki_worker_kv_pulled_bytes_total", "role, worker")},
        ),
        Panel(
            "KV by link",
            "Bps",
            {LINK: per_second("tasuki_kv_pair_bytes_total", "peer, worker, transport")},
        ),
        Panel(
            "Time on the wire of a pull, by link",
            "s",
            {
                LINK: per_second("tasuki_kv_pair_wire_seconds_total", "peer, worker, transport")
                + " / "
                + per_second("tasuki_kv_pair_pulls_total", "peer, worker, transport")
            },
        ),
        Panel(
            "Handoffs without their KV, by cause",
            "ops",
            {"{{cause}}": per_second("tasuki_kv_pair_failures_total", "cause")},
        ),
    ),
    "Room": (
        Panel("KV blocks in use", "percentunit", {WORKER: f"1 - {_FREE} / {_ALL}"}),
        Panel(
            "Requests of each worker",
            "short",
            {
                f"{WORKER} running": "tasuki_worker_running",
                f"{WORKER} waiting": "tasuki_worker_waiting",
            },
        ),
        Panel(
            "Waiting to be placed",
            "short",
            {
                "requests": "sum (tasuki_admission_waiting_requests)",
                "sequences": "sum (tasuki_admission_waiting_sequences)",
            },
        ),
        Panel(
            "Refused, by reason",
            "reqps",
            {"{{reason}}": per_second("tasuki_admission_refusals_total", "reason")},
        ),
        Panel(
            "Prompt tokens found cached",
            "percentunit",
            {"worker {{worker}}": f"{_CACHED} / ({_CACHED} + {_COMPUTED})"},
        ),
        Panel("Decode step", "s", {WORKER: "tasuki_worker_decode_step_seconds"}),
    ),
    "Faults": (
        Panel("Workers up", "short", {"{{role}}": "sum by (role) (tasuki_worker_up)"}),
        Panel(
            "Retries, by reason",
            "ops",
            {"{{reason}} ({{kind}})": per_second("tasuki_retries_total", "reason, kind")},
        ),
        Panel(
            "Error answers",
            "reqps",
            {"{{code}} {{path}}": per_second("tasuki_http_errors_total", "code, path")},
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        top += 1
        for index, panel in enumerate(row):
            across, down = index % (COLUMNS // WIDTH), index // (COLUMNS // WIDTH)
            place = {"x": across * WIDTH, "y": top + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(graph(panel) | {"gridPos": place})
        top += HEIGHT * -(-len(row) // (COLUMNS // WIDTH))
    source = {
        "name": "source",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }
    return {
        "uid": "tasuki",
        "title": "Tasuki",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }


def graph(panel: Panel) -> dict[str, Any]:
    """One panel without its place."""
    targets = [
        {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def main() -> None:
    """Write the file, or compare it."""
    made = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(made)
    elif not TARGET.exists() or TARGET.read_text() != made:
        raise SystemExit(f"{TARGET.name} is not that of its rows: run tools/make_dashboard.py")


if __name__ == "__main__":
    main()
