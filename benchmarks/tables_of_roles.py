"""The tables of RESULTS.md about roles that follow the load."""

from __future__ import annotations

from collections.abc import Callable

from table_parts import load, number, rows, source

DECIDERS = ("round robin", "load loop", "prompt 4096", "prompt 16")


def roles() -> str:
    """Goodput of following roles, of the best static topology, and of other deciders."""
    result = load("roles_follow")
    lines = []
    for row in result["rows"]:
        goodput = {run["name"]: run["goodput"] for run in row["runs"]}
        follow = [run for run in row["runs"] if run["name"].startswith("follow")]
        worst = min(follow, key=lambda run: float(run["goodput"]))
        lines.append(
            [
                row["workers"],
                row["load"],
                row["best_static"],
                number(row["best_static_goodput"]),
                number(worst["goodput"]),
                f"{row['of_best_static']:.2f}",
                f"{min(row['of_best_in_phase']):.2f}" if len(row["phases"]) < 10 else "",
                worst["role_changes"],
                *(number(goodput[name]) for name in DECIDERS),
            ]
        )
    heads = ("workers", "load", "best static", "its goodput", "follow", "of it", "least of a phase")
    return source("roles_follow") + rows((*heads, "changes", *DECIDERS), lines)


def roles_paces() -> str:
    """Of the best static topology's goodput, the least that following roles reach, by pace."""
    result = load("roles_paces")
    paces: dict[tuple[float, ...], dict[str, list[float]]] = {}
    for row in result["rows"]:
        pace = (row["steps"], row["kv_reads"], row["prompts"])
        of_best = [case["of_best_static"] for case in row["cases"]]
        paces.setdefault(pace, {})[row["load"]] = of_best
    heads = ["steps", "KV reads", "prompts"]
    for name in paces[next(iter(paces))]:
        heads += [f"{name}: least", "below 0.95"]
    lines = []
    for pace, loads in paces.items():
        line: list[object] = [f"{factor:g}" for factor in pace]
        for of_best in loads.values():
            lost = sum(value < 0.95 for value in of_best)
            line += [f"{min(of_best):.2f}", f"{lost} of {len(of_best)}"]
        lines.append(line)
    return source("roles_paces") + rows(tuple(heads), lines)


def roles_served(name: str) -> Callable[[], str]:
    """The same on real workers: goodput by phase of every topology."""

    def table() -> str:
        result = load(name)
        lines = [
            [
                run["name"],
                *(number(phase["goodput"]) for phase in run["phases"]),
                number(run["goodput"], 2),
                f"{run['goodput'] / result['best_static_goodput']:.2f}",
                run["changes"],
            ]
            for run in result["runs"]
        ]
        phases = [phase["load"] for phase in result["runs"][0]["phases"]]
        heads = ("roles", *phases, "whole", "of the best static", "changes")
        return source(name) + rows(heads, lines)

    return table
