"""What engine steps and KV transfers take: the tables that a planner reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasuki.plot.figures.common import described, number, spread
from tasuki.plot.figures.marks import GREY, Axis, Curve, Figure, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import Results, StepRow, StepTables


def steps(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """Prefill, decode and transfer side by side, a row for each engine measured."""
    del options, colors  # lines are context lengths here, and nothing else can be chosen
    all_tables = [tables for tables in results.steps if tables.names]
    if not all_tables:
        return []
    contexts = sorted({row.context for t in all_tables for rows in t.all.values() for row in rows})
    are_alike = len({tables.names for tables in all_tables}) == 1
    return [
        Figure(
            name="steps",
            title="Time of a step, and of a KV transfer",
            subtitle=described(all_tables),
            panels=tuple(
                _panel(name, tables, contexts, len(all_tables) > 1)
                for tables in all_tables
                for name in tables.names
            ),
            columns=len(all_tables[0].names) if are_alike else 1,
        )
    ]


_AXES = {
    "prefill": ("prefill step", "tokens computed", "tokens"),
    "decode": ("decode step", "sequences", "sequences"),
    "transfer": ("KV transfer", "MB", "MB"),
}


def _panel(name: str, tables: StepTables, contexts: Sequence[int], labelled: bool) -> Panel:
    title, x_title, unit = _AXES[name]
    curves = []
    for color, context in enumerate(contexts):
        rows = sorted(
            (row for row in tables.all[name] if row.context == context), key=lambda row: row.size
        )
        if rows:
            curves.append(
                Curve(
                    title if name == "transfer" else f"context {context:,}",
                    tuple(row.size for row in rows),
                    tuple(row.seconds * 1e3 for row in rows),
                    GREY if name == "transfer" else color,
                    in_legend=name != "transfer",
                    hover=tuple(_hover(tables.label, title, unit, row) for row in rows),
                )
            )
    x_log = spread(x for curve in curves for x in curve.x)
    y_log = spread(y for curve in curves for y in curve.y)
    return Panel(
        x=Axis(x_title, log=x_log, from_zero=not x_log),
        y=Axis("ms", log=y_log, from_zero=not y_log),
        curves=tuple(curves),
        title=f"{tables.label}: {title}" if labelled else title,
    )


def _hover(label: str, title: str, unit: str, row: StepRow) -> str:
    return "<br>".join(
        (
            f"<b>{label}</b>",
            f"{title}: {number(row.size)} {unit}" + (f" at {row.context:,}" if row.context else ""),
            f"{number(row.seconds * 1e3)} ms, {number(row.size / row.seconds)} {unit}/s",
        )
    )
