"""The tables of RESULTS.md about the simulator: its speed, and how far it is off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from table_parts import load, number, rows, source

SHOWN = {
    "output_throughput": "output tok/s",
    "ttft_mean_ms": "TTFT mean",
    "ttft_p99_ms": "p99",
    "tpot_mean_ms": "TPOT mean",
    "itl_p99_ms": "ITL p99",
    "e2e_mean_ms": "E2E mean",
}


def simulator() -> str:
    """Simulated requests for each second of a core."""
    result = load("simulator")
    lines = [
        [
            row["case"],
            row.get("simulator", "tasuki"),
            f"{row['requests']:,}",
            number(row["requests_per_s"], 0),
            number(row["cpu_s"], 2),
            number(row["simulated_s"], 0),
            *(f"{row[name]:,}" if name in row else "" for name in ("steps", "events")),
        ]
        for row in result["rows"]
    ]
    heads = (
        "workers",
        "simulator",
        "requests",
        "requests/s",
        "seconds",
        "simulated s",
        "steps",
        "events",
    )
    return source("simulator") + rows(heads, lines)


def simulator_accuracy() -> str:
    """Errors of the simulator against measured runs."""
    result = load("simulator_accuracy")
    lines = []
    for row in result["rows"]:
        off = (row["error"].get(name) for name in SHOWN)
        errors = ["" if error is None else f"{100 * error:+.0f}%" for error in off]
        lines.append([row.get("measured_in", ""), row["topology"], row["load"], *errors])
    for which in ("median", "worst"):
        all_rows = (result["summary"].get(name, {}).get(which) for name in SHOWN)
        errors = ["" if error is None else f"{100 * error:.0f}%" for error in all_rows]
        lines.append([f"{which} of all", "", "", *errors])
    return source("simulator_accuracy") + rows(("file", "topology", "load", *SHOWN.values()), lines)


ON_CPU = {
    "output_throughput": "output tok/s",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p95_ms": "p95",
    "tpot_mean_ms": "TPOT mean",
    "itl_p99_ms": "ITL p99",
}
WORST, NEAR_MS, SPREADS = 0.2, 5.0, 1.5  # errors that are small enough, by any of them


def simulator_accuracy_cpu() -> str:
    """The same on one machine's CPU, and how many points are near enough."""
    result = load("simulator_accuracy_cpu")
    lines = []
    for row in result["rows"]:
        errors = [f"{100 * row['error'][name]:+.0f}%" for name in ON_CPU]
        lines.append([row["load"], *errors])
    for which in ("median", "worst"):
        lines.append(
            [f"{which} of all", *(f"{100 * result['summary'][n][which]:.0f}%" for n in ON_CPU)]
        )
    near = [sum(_is_near(row, name) for row in result["rows"]) for name in ON_CPU]
    lines.append(["near enough", *(f"{count} of {len(result['rows'])}" for count in near)])
    return source("simulator_accuracy_cpu") + rows(("load", *ON_CPU.values()), lines)


def _is_near(row: Mapping[str, Any], name: str) -> bool:
    apart = abs(row["simulated"][name] - row["measured"][name])
    return (
        abs(row["error"][name]) <= WORST
        or (name.endswith("_ms") and apart <= NEAR_MS)
        or apart <= SPREADS * row["spread"][name]
    )


def published_shapes() -> str:
    """What was published elsewhere, and whether the simulator gives the same shape."""
    columns = (
        ("output_throughput", "output tok/s", 0),
        ("ttft_mean_ms", "TTFT ms", 0),
        ("tpot_mean_ms", "TPOT ms", 1),
        ("itl_p99_ms", "ITL p99 ms", 1),
    )
    lines: list[list[str]] = []
    for row in load("published_shapes")["rows"]:
        verdict = "holds" if row["holds"] else "does not hold"
        lines.append([f"**{row['shape']}**: {verdict}", *[""] * len(columns)])
        for name, found in row["figures"].items():
            other = row.get("published", {}).get(name, {})
            cells = [
                number(found[key], digits) + (f" ({other[key]:,})" if key in other else "")
                for key, _, digits in columns
            ]
            lines.append([name, *cells])
    heads = ("deployment", *(head for _, head, _ in columns))
    return source("published_shapes") + rows(heads, lines)


def plan_regret(name: str) -> Callable[[], str]:
    """What the planner's choice lacks of the best measured topology, from one result file."""

    def table() -> str:
        lines = []
        for verdict in load(name)["verdicts"]:
            measured, simulated = verdict["measured"], verdict["simulated"]
            goodput = (
                f"{design}: {number(good)}"
                + (f" ({number(simulated[design])})" if design in simulated else "")
                for design, good in measured.items()
            )
            lines.append(
                [
                    verdict["load"],
                    verdict["objectives"],
                    verdict["recommended"],
                    verdict["best"],
                    f"{100 * verdict['regret']:.0f}%",
                    f"{100 * verdict['regret_random']:.0f}%",
                    ", ".join(goodput),
                ]
            )
        heads = ("load", "objectives", "planned", "best", "regret", "of a random choice")
        return source(name) + rows((*heads, "goodput/s"), lines)

    return table


def planned_rates() -> str:
    """Whether planned rates are served for long."""
    lines = [
        [
            row["load"],
            row["objectives"],
            row["design"],
            number(row["rate"]),
            f"{row['served']:.2f}" if row["served"] else "less",
        ]
        for row in load("planned_rates")["rows"]
    ]
    heads = ("load", "objectives", "design", "planned requests/s", "served")
    return source("planned_rates") + rows(heads, lines)


def open_loops(*names: str) -> Callable[[], str]:
    """Measured and simulated latencies at rates of a campaign of `plan_regret.py`."""
    columns = [(kind, key) for kind in ("ttft_ms", "tpot_ms") for key in ("median", "p95")]

    def table() -> str:
        lines, sources = [], []
        for name in names:
            result = load(name)
            sources.append(source(name).rstrip())
            for run in (run for run in result["runs"] if "simulated" in run):
                both = [run[way] for way in ("measured", "simulated")]
                shares = [f"{100 * way['loose']['attainment']:.0f}%" for way in both]
                cells = [_beside(number(way[kind][key]) for way in both) for kind, key in columns]
                gpus = result["machine"]["gpus"]
                heads = [f"{len(gpus)} x {gpus[0]}", run["load"], run["design"]]
                lines.append([*heads, number(run["rate"]), _beside(shares), *cells])
        columns_ms = ("TTFT p50 ms", "p95", "TPOT p50 ms", "p95")
        heads = ("GPUs", "load", "topology", "requests/s", "in time", *columns_ms)
        return "\n\n".join(sources) + "\n\n" + rows(heads, lines)

    return table


def open_loop_errors(name: str) -> Callable[[], str]:
    """How far the simulator is off at each rate of a campaign of `plan_regret.py`."""
    columns = [(kind, key) for kind in ("ttft_ms", "tpot_ms") for key in ("median", "p95")]

    def table() -> str:
        by_rate: dict[float, list[list[float]]] = {}
        for run in (run for run in load(name)["runs"] if "simulated" in run):
            pairs = [
                (run["simulated"][kind][key], run["measured"][kind][key]) for kind, key in columns
            ]
            errors = [abs(simulated / measured - 1.0) for simulated, measured in pairs]
            by_rate.setdefault(round(run["rate"], 1), []).append(errors)
        lines = []
        for rate, errors in sorted(by_rate.items()):
            each = zip(*errors, strict=True)
            cells = [f"{100 * median(column):.0f}% ({100 * max(column):.0f}%)" for column in each]
            lines.append([number(rate), str(len(errors)), *cells])
        heads = ("requests/s", "topologies", "TTFT p50: median (worst)", "p95", "TPOT p50", "p95")
        return source(name) + rows(heads, lines)

    return table


def simulated_again() -> str:
    """How far this simulator is off under loads that were measured before, and that one's was."""
    keys = [f"{kind}_{part}_ms" for kind in ("ttft", "tpot") for part in ("median", "p95")]
    by_file: dict[tuple[str, str], list[Any]] = {}
    for run in load("simulated_again")["runs"]:
        by_file.setdefault((run["file"], run["load"]), []).append(run)
    lines = []
    for (name, of), runs in by_file.items():
        for way, when in (("simulated", "then"), ("again", "now"), ("finer", "now, finer table")):
            cells = []
            for key in keys:
                errors = [abs(run[way][key] / run["measured"][key] - 1.0) for run in runs]
                cells.append(f"{100 * median(errors):.0f}% ({100 * max(errors):.0f}%)")
            lines.append([name, of, str(len(runs)), when, *cells])
    heads = (
        "file",
        "load",
        "runs",
        "simulator",
        "TTFT p50: median (worst)",
        "p95",
        "TPOT p50",
        "p95",
    )
    return source("simulated_again") + rows(heads, lines)


def _beside(values: Iterable[str]) -> str:
    """Measured, and in brackets simulated."""
    measured, simulated = (value.strip() for value in values)
    return f"{measured} ({simulated})"
