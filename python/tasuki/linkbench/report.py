"""A measured link as a table, as a result file, and beside an earlier one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.bench.header import header, read_result
from tasuki.kv.backends import ALIASES
from tasuki.linkbench.points import LinkbenchError, Point
from tasuki.linkbench.run import Measured, Row, Setup, p99

KIND = "linkbench"
SLOWER = 0.9  # of the baseline's rate: less is told as a loss

HEAD = (
    f"{'payload':>10}{'block':>10}{'descriptors':>13}{'GB/s':>8}{'p50 ms':>10}{'p99 ms':>10}"
    f"{'post ms':>10}{'post p99':>10}"
)


def line(row: Row) -> str:
    """One row of the table."""
    said = row.to_json()
    return (
        f"{size_text(row.point.payload_bytes):>10}{size_text(row.point.block_bytes):>10}"
        f"{row.point.descriptors:>13,}{row.bytes_per_s / 1e9:>8.2f}{1e3 * said['p50_s']:>10.3f}"
        f"{1e3 * said['p99_s']:>10.3f}{1e3 * said['post_p50_s']:>10.3f}"
        f"{1e3 * p99(row.post_s):>10.3f}"
    )


def rivals_lines(measured: Measured) -> list[str]:
    """What the rivals reach, and the best of the link beside them."""
    lines = []
    for payload, found in measured.rivals.items():
        best = max(r.bytes_per_s for r in measured.rows if r.point.payload_bytes == payload)
        shares = [
            f"{best / rate:.2f} of {name} ({rate / 1e9:.2f} GB/s)" for name, rate in found.items()
        ]
        lines.append(f"{size_text(payload):>10}  {best / 1e9:.2f} GB/s: {', '.join(shares)}")
    return lines


def size_text(size_bytes: int) -> str:
    """A size in the unit that leaves least, powers of 1,024."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def result(measured: Measured, setup: Setup) -> dict[str, Any]:
    """What is saved."""
    said = header(KIND, label=KIND, topology=None, model="")
    return said | {
        **_conditions(setup),
        "way": None if measured.way is None else str(measured.way),
        "warning": measured.warning,
        "rows": [row.to_json() for row in measured.rows],
        "rivals": [
            {"payload_bytes": payload, "bytes_per_s": found}
            for payload, found in measured.rivals.items()
        ],
    }


@dataclass(frozen=True, slots=True)
class Baseline:
    """A saved result of the same kind of link.

    Attributes:
        rates: Bytes per second by payload and block bytes.
        way: How its reads travelled; None: unknown.
    """

    rates: Mapping[tuple[int, int], float]
    way: str | None


def read_baseline(path: Path, points: Sequence[Point], setup: Setup) -> Baseline:
    """A saved result that a run may be compared with. Call it before the run, which takes long.

    Args:
        path: Of the result.
        points: That the run measures.
        setup: Of the run.

    Raises:
        RunFailedError: The file is no result of this command.
        LinkbenchError: It was measured by another transport, on other devices or on another
            number of hosts, or it has none of the points.
    """
    saved = read_result(path, KIND)
    saved["transport"] = _full_name(str(saved.get("transport")))
    for name, now in _conditions(setup).items():
        if saved.get(name) != now:
            raise LinkbenchError(
                f"--against {path} was measured with {_text(name, saved.get(name))}, this run uses"
                f" {_text(name, now)}: repeat it with the same, or compare with another file"
            )
    try:
        rates = {_key(row): float(row["bytes_per_s"]) for row in saved["rows"]}
    except (KeyError, TypeError, ValueError) as error:
        raise LinkbenchError(
            f"--against {path} has rows that are none of this command: measure it again (--save)"
        ) from error
    for (payload, block), rate in rates.items():
        if not 0.0 < rate < math.inf:
            raise LinkbenchError(
                f"--against {path} has a rate of {rate:g} bytes/s for {payload} bytes in blocks of"
                f" {block}: measure it again (--save)"
            )
    if not any((point.payload_bytes, point.block_bytes) in rates for point in points):
        raise LinkbenchError(
            f"--against {path} has none of these payloads and blocks: measure the same ones"
        )
    return Baseline(rates, saved.get("way"))


def against(baseline: Baseline, measured: Measured) -> tuple[list[str], bool]:
    """Each row beside the same one of a saved result.

    Returns:
        Lines, and whether any rate is below `SLOWER` of what it was.
    """
    lines, lost = [], False
    for row in measured.rows:
        rate = baseline.rates.get(_key(row.to_json()))
        if rate is None:
            continue
        share = row.bytes_per_s / rate
        lost |= share < SLOWER
        lines.append(
            f"{size_text(row.point.payload_bytes):>10}{size_text(row.point.block_bytes):>10}"
            f"  {row.bytes_per_s / 1e9:.2f} GB/s, was {rate / 1e9:.2f}: {share:.2f}"
            + (f"  slower than {SLOWER} of the baseline" if share < SLOWER else "")
        )
    way = None if measured.way is None else str(measured.way)
    if way != baseline.way:
        lines.append(f"way {way or 'unknown'}, was {baseline.way or 'unknown'}")
    return lines, lost


def _conditions(setup: Setup) -> dict[str, Any]:
    """What two runs must have in common, so that their rates can be compared."""
    return {
        "transport": _full_name(setup.transport),
        "devices": list(setup.devices),
        "hosts": 2 if setup.peer else 1,
    }


def _full_name(transport: str) -> str:
    return ALIASES.get(transport, transport)


def _text(name: str, value: Any) -> str:
    """A condition for people, such as `devices cpu, cuda:0`."""
    return f"{name} {', '.join(value) if isinstance(value, list) else value}"


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return int(row["payload_bytes"]), int(row["block_bytes"])
