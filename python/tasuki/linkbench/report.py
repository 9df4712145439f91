"""A measured link as a table, as a result file, and beside an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasuki.bench.header import header, read_result
from tasuki.linkbench.points import LinkbenchError
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
        "transport": setup.transport,
        "way": None if measured.way is None else str(measured.way),
        "devices": list(setup.devices),
        "hosts": 2 if setup.peer else 1,
        "warning": measured.warning,
        "rows": [row.to_json() for row in measured.rows],
        "rivals": [
            {"payload_bytes": payload, "bytes_per_s": found}
            for payload, found in measured.rivals.items()
        ],
    }


def against(path: Path, rows: Sequence[Row]) -> tuple[list[str], bool]:
    """Each row beside the same one of a saved result.

    Returns:
        Lines, and whether any rate is below `SLOWER` of what it was.

    Raises:
        RunFailedError: The file is no result of this command.
        LinkbenchError: It has none of these rows.
    """
    saved = read_result(path, KIND)
    before = {_key(row): float(row["bytes_per_s"]) for row in saved["rows"]}
    lines, lost = [], False
    for row in rows:
        rate = before.get(_key(row.to_json()))
        if rate is None:
            continue
        share = row.bytes_per_s / rate
        lost |= share < SLOWER
        lines.append(
            f"{size_text(row.point.payload_bytes):>10}{size_text(row.point.block_bytes):>10}"
            f"  {row.bytes_per_s / 1e9:.2f} GB/s, was {rate / 1e9:.2f}: {share:.2f}"
            + (f"  slower than {SLOWER} of the baseline" if share < SLOWER else "")
        )
    if not lines:
        raise LinkbenchError(f"{path} has none of these payloads and blocks: measure the same ones")
    return lines, lost


def _key(row: Mapping[str, Any]) -> tuple[int, int]:
    return int(row["payload_bytes"]), int(row["block_bytes"])
