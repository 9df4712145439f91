"""How quick a transfer must be: a rate, or a file of what was measured before."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tasuki.preflight.result import Check, PreflightError, warn

_RATE = re.compile(r"(\d+(?:\.\d+)?) *([kMGT]?)(i?)(B|b|bit)/s")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_SHARE_OF_BEFORE = 0.8  # of an earlier measurement; two of one link differ by less


@dataclass(frozen=True, slots=True)
class Expectation:
    """Bytes a second that each peer must reach.

    Attributes:
        default: For peers that `by_peer` has not; 0: nothing is expected.
        by_peer: For each peer of an earlier report.
        report: Where that report is; empty: there is none.
        rows: Of a result of `tasuki linkbench`: bytes of a transfer, bytes of its blocks, rate.
    """

    default: float = 0.0
    by_peer: dict[str, float] = field(default_factory=dict)
    report: str = ""
    rows: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, said: str | None) -> Expectation:
        """From `20GB/s`, `100Gb/s`, or a file.

        The file is what `tasuki preflight --json` wrote, or `tasuki linkbench --save`: then the
        best of its rows counts for every peer.

        Raises:
            PreflightError: It is neither, or a report without transfers.
        """
        if said is None:
            return cls()
        found = _RATE.fullmatch(said.strip())
        if found:
            number, power, binary, unit = found.groups()
            base = 1024 if binary else 1000
            scale = base ** _POWERS[power] / (1 if unit == "B" else 8)
            return cls(float(number) * scale)
        try:
            file = json.loads(Path(said).read_text())
            if "rows" in file:
                names = "payload_bytes", "block_bytes", "bytes_per_s"
                rows = [tuple(float(row[name]) for name in names) for row in file["rows"]]
                best = max(rate for _, _, rate in rows)
                return cls(_SHARE_OF_BEFORE * best, rows=tuple(rows))
            checks = file["checks"]
            before = {
                check["name"].removeprefix("transfer "): float(check["figures"]["bytes_per_s"])
                for check in checks
                if "bytes_per_s" in check["figures"]
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, OSError):
                reason = f"no rate, and no file: {error.strerror}"
            else:
                reason = "a file of another kind"
            raise PreflightError(
                f"--expect is {said!r} ({reason}): give a rate such as 20GB/s or 100Gb/s, or a"
                " file of `tasuki preflight --json` or `tasuki linkbench --save`"
            ) from error
        if not before:
            raise PreflightError(
                f"--expect {said} has no transfer from a peer: write it with"
                " `tasuki preflight --json --peer HOST:PORT`"
            )
        return cls(0.0, {peer: _SHARE_OF_BEFORE * rate for peer, rate in before.items()}, said)

    def of_peer(self, peer: str) -> float:
        """Bytes a second; 0: nothing is expected."""
        return self.by_peer.get(peer, self.default)

    def of_transfer(self, size: float, block: float | None) -> float:
        """Bytes a second of a transfer of so many bytes in blocks of so many; None: not known.

        Of a result of `tasuki linkbench` the next smaller transfer counts, in the next smaller
        blocks, or in the smallest ones. 0: nothing is expected, or all that it has are larger.
        """
        if not self.rows:
            return self.default
        smaller = [row for row in self.rows if row[0] <= size and row[1] <= (block or size)]
        if not smaller:
            return 0.0
        payload = max(smaller)[0]
        blocks = sorted(row for row in smaller if row[0] == payload)
        return _SHARE_OF_BEFORE * blocks[0 if block is None else -1][2]

    def unknown(self, peers: Sequence[str]) -> list[Check]:
        """A check for each peer of which nothing is expected, though there is a report."""
        return [
            warn(
                f"expect {peer}",
                f"{self.report} has no transfer from it, so any rate is taken",
                f"one of {', '.join(self.by_peer)}",
                "name peers as in the report, or write it again (--json)",
            )
            for peer in dict.fromkeys(peers)
            if self.report and peer not in self.by_peer
        ]
