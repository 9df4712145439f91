"""TTFT against the tokens of a batch: where the prefill side stops keeping up."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from tasuki.plot.figures.common import described, number, spread
from tasuki.plot.figures.marks import Axis, Curve, Figure, Guide, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import BatchRow, BatchTable, Results

# TTFT this many times its floor is where the floor ends.
_KNEE = 2.0


def ttft(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """One panel for each deployment, one line for each input length."""
    del options, colors  # lines are input lengths here, and nothing else can be chosen
    tables = [table for table in results.batches if table.rows]
    if not tables:
        return []
    lengths = sorted({row.input_tokens for table in tables for row in table.rows})
    return [
        Figure(
            name="ttft",
            title="Time to first token against batch x input length",
            subtitle=described(tables),
            panels=tuple(_panel(table, lengths, len(tables) > 1) for table in tables),
            columns=min(2, len(tables)),
            note=f"Dotted: from here on TTFT is more than {_KNEE:g} times its least value.",
        )
    ]


def knee(rows: tuple[BatchRow, ...]) -> int | None:
    """The fewest tokens of a batch beyond which TTFT stays above twice its floor.

    The floor is the least TTFT; None when it is never left.
    """
    of_size: dict[int, list[float]] = {}
    for row in rows:
        of_size.setdefault(row.batch * row.input_tokens, []).append(row.ttft_s)
    floor = min(row.ttft_s for row in rows)
    sizes = sorted(of_size)
    above = [median(of_size[size]) > _KNEE * floor for size in sizes]
    for i, size in enumerate(sizes):
        if all(above[i:]):
            return size
    return None


def _panel(table: BatchTable, lengths: list[int], titled: bool) -> Panel:
    curves = []
    for color, length in enumerate(lengths):
        rows = sorted(
            (row for row in table.rows if row.input_tokens == length), key=lambda row: row.batch
        )
        if rows:
            curves.append(
                Curve(
                    f"{length:,} tokens each",
                    tuple(float(row.batch * row.input_tokens) for row in rows),
                    tuple(row.ttft_s * 1e3 for row in rows),
                    color,
                    hover=tuple(_hover(table, row) for row in rows),
                )
            )
    start = knee(table.rows)
    guides = (Guide("x", start, f"{start:,} tokens"),) if start is not None else ()
    x_log = spread(v for curve in curves for v in curve.x)
    y_log = spread(v for curve in curves for v in curve.y)
    return Panel(
        x=Axis("batch x input tokens", log=x_log, from_zero=not x_log),
        y=Axis("TTFT (ms)", log=y_log, from_zero=not y_log),
        curves=tuple(curves),
        guides=guides,
        title=table.label if titled else "",
    )


def _hover(table: BatchTable, row: BatchRow) -> str:
    latency_ms = None if row.latency_s is None else row.latency_s * 1e3
    return "<br>".join(
        (
            f"<b>{table.label}</b>",
            f"batch {row.batch}, {row.input_tokens} tokens in, {row.output_tokens} out",
            f"TTFT {number(row.ttft_s * 1e3)} ms, latency {number(latency_ms)} ms",
            f"input {number(row.input_throughput)} tok/s",
            f"output {number(row.output_throughput)} tok/s",
        )
    )
