"""What a link gives by block size: `tasuki linkbench`, beside what it is compared with."""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.plot.figures.common import number
from tasuki.plot.figures.marks import GREY, Axis, Curve, Figure, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import LinkRow, LinkTable, Results


def links(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """Rate and time of posting against block size, a row for each link measured."""
    del options, colors  # lines are payloads here, and nothing else can be chosen
    tables = [table for table in results.links if table.rows]
    if not tables:
        return []
    return [
        Figure(
            name="links",
            title="Rate of a link, and time to post its descriptors",
            subtitle="; ".join(f"{table.label}: {table.way}" for table in tables),
            panels=tuple(panel for table in tables for panel in _panels(table, len(tables) > 1)),
            columns=2,
        )
    ]


def _panels(table: LinkTable, labelled: bool) -> tuple[Panel, Panel]:
    payloads = sorted({row.payload_mb for row in table.rows})
    rates, posts = [], []
    for color, payload in enumerate(payloads):
        rows = sorted(
            (row for row in table.rows if row.payload_mb == payload), key=lambda row: row.block_kb
        )
        x = tuple(row.block_kb for row in rows)
        name, hover = f"{number(payload)} MB", tuple(_hover(row) for row in rows)
        rates.append(Curve(name, x, tuple(row.gb_per_s for row in rows), color, hover=hover))
        posts.append(
            Curve(name, x, tuple(row.post_ms for row in rows), color, hover=hover, in_legend=False)
        )
    ends = (min(row.block_kb for row in table.rows), max(row.block_kb for row in table.rows))
    for name, rate in table.rivals.items():
        rates.append(Curve(name, ends, (rate, rate), GREY, points=False, dashed=True))
    x_axis = Axis("KB in a block", log=ends[0] < ends[1], from_zero=False)
    prefix = f"{table.label}: " if labelled else ""
    return (
        Panel(x_axis, Axis("GB/s", from_zero=True), tuple(rates), title=f"{prefix}rate"),
        Panel(x_axis, Axis("ms", from_zero=True), tuple(posts), title=f"{prefix}posting"),
    )


def _hover(row: LinkRow) -> str:
    return "<br>".join(
        (
            f"<b>{number(row.payload_mb)} MB in {row.descriptors:,} blocks</b>",
            f"{number(row.gb_per_s)} GB/s",
            f"{number(row.p50_ms)} ms, p99 {number(row.p99_ms)} ms",
            f"posting {number(row.post_ms)} ms",
        )
    )
