"""The tables of RESULTS.md about roles that follow the load."""

from __future__ import annotations

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


def roles_served() -> str:
    """The same on real workers: goodput by phase of every topology."""
    result = load("roles_follow_served")
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
    return source("roles_follow_served") + rows(heads, lines)
