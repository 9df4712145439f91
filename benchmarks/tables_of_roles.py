"""The table of RESULTS.md about roles that follow the load."""

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
