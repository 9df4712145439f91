"""Results as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_COLUMNS = (
    ("topology", lambda r: r["label"]),
    ("load", lambda r: r["load"]),
    ("req/s", lambda r: _number(r["metrics"]["request_throughput"], 2)),
    ("out tok/s", lambda r: _number(r["metrics"]["output_throughput"], 1)),
    ("TTFT p50", lambda r: _number(_of(r, "ttft_ms", "median"), 0)),
    ("p99", lambda r: _number(_of(r, "ttft_ms", "p99"), 0)),
    ("TTST p50", lambda r: _number(_of(r, "ttst_ms", "median"), 0)),
    ("TPOT p50", lambda r: _number(_of(r, "tpot_ms", "median"), 1)),
    ("p99", lambda r: _number(_of(r, "tpot_ms", "p99"), 1)),
    ("failed", lambda r: _number(r["metrics"]["failed"], 0)),
    ("met SLO", lambda r: _share(r["metrics"]["attainment"])),
)


def one_line(result: Mapping[str, Any]) -> str:
    """A run's result in short; times in milliseconds."""
    metrics = result["metrics"]
    parts = [
        f"{metrics['completed']} of {metrics['sent']} requests",
        f"{_number(metrics['output_throughput'], 1)} tok/s",
        f"TTFT {_number(_of(result, 'ttft_ms', 'median'), 0)} ms",
        f"TTST {_number(_of(result, 'ttst_ms', 'median'), 0)} ms",
        f"TPOT {_number(_of(result, 'tpot_ms', 'median'), 1)} ms",
    ]
    if metrics.get("attainment") is not None:
        parts.append(f"{_share(metrics['attainment'])} met the SLO")
    return ", ".join(parts)


def sweep_table(results: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """All runs of a sweep, one row each.

    Args:
        results: Name of the load and result.
    """
    rows = [[cell({**result, "load": load}) for _, cell in _COLUMNS] for load, result in results]
    return table([name for name, _ in _COLUMNS], rows, left=2)


def goodput_table(results: Iterable[Mapping[str, Any]]) -> str:
    """What each search found, one row each."""
    rows = []
    for result in results:
        low, high = result["interval"]
        sure = f"{100 * result['confidence']:g}%"
        rows.append([result["label"], _number(low, 2), _number(high, 2), sure])
    return table(["topology", "goodput from req/s", "to", "confidence"], rows, left=1)


def table(names: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Columns as wide as they must be; the first `left` flush left, the rest right."""
    lines = [list(names), *map(list, rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(names))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _of(result: Mapping[str, Any], name: str, which: str) -> float | None:
    """One figure of a spread, which is null where there is nothing to tell."""
    spread = result["metrics"].get(name)
    return None if spread is None else spread[which]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"
