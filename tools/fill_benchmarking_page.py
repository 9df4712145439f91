"""Puts what benchmarking_pictures.sh measured into docs/benchmarking.md, between its marks.

Usage: fill_benchmarking_page.py RESULTS
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
PAGE = CHECKOUT / "docs" / "benchmarking.md"
SWEEP = CHECKOUT / "benchmarks" / "sweep.yaml"
# Left out of the report, to keep the page short.
_LINES = ("P90 ", "P95 ", "Max ITL", "Result file")
_BLOCKS = ("chunks split evenly", "- Client -", "Inter-Token Latency -")


def main() -> int:
    """Fill the page."""
    results = Path(sys.argv[1])
    texts = {
        "report": _report((results / "one" / "report.txt").read_text()),
        "batch": (results / "batch" / "report.txt").read_text(),
        "sweep.yaml": re.sub(r"^#.*\n", "", SWEEP.read_text(), flags=re.M),
        "sweep": (results / "sweep.txt").read_text(),
    }
    page = PAGE.read_text()
    for name, text in texts.items():
        page, count = re.subn(
            rf"(<!-- {re.escape(name)} -->\n```\w*\n).*?(\n```)", _between(text), page, flags=re.S
        )
        if count != 1:
            print(f"{PAGE} has {count} marks <!-- {name} -->: it needs one", file=sys.stderr)
            return 1
    PAGE.write_text(page)
    return 0


def _between(text: str) -> Callable[[re.Match[str]], str]:
    return lambda match: match[1] + text.strip("\n") + match[2]


def _report(text: str) -> str:
    """The report without progress lines, without the rows and blocks that are left out."""
    kept = []
    inside = shown = False
    for line in text.splitlines():
        inside = inside or line.startswith("====")
        if line.startswith(("--", "==")):
            shown = not any(block in line for block in _BLOCKS)
        if inside and shown and not line.startswith(_LINES):
            kept.append(line.rstrip())
    return "\n".join(kept)


if __name__ == "__main__":
    sys.exit(main())
