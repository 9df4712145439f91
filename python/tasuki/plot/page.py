"""The frame of the HTML page, and the table of numbers at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from tasuki.plot.figures.common import number
from tasuki.plot.run import Results, Run

# A `string.Template`.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tasuki: results</title>
<link rel="icon" href="data:,">
<style>
body { margin: 0; background: #fff; color: #1f2328; font: 15px/1.5 $font; }
main { max-width: 1160px; margin: 0 auto; padding: 20px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 6px; }
h2 { font-size: 19px; margin: 44px 0 0; }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
a { color: #0072b2; text-decoration: none; }
a:hover { text-decoration: underline; }
.sub, .note { color: #636c76; margin: 2px 0 8px; font-size: 14px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #e6e8eb; }
th { color: #636c76; font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
</style>
<script>$plotly</script>
</head>
<body><main>
<h1>Results</h1>
<nav>$links</nav>
$sections
$table
</main></body>
</html>
"""

_COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("topology", lambda r: r.label),
    ("load", lambda r: r.load.text),
    ("answered", lambda r: number(r.completed)),
    ("failed", lambda r: number(r.failed)),
    ("requests/s", lambda r: number(r.request_throughput)),
    ("output tok/s", lambda r: number(r.output_throughput)),
    ("total tok/s", lambda r: number(r.total_throughput)),
    ("goodput/s", lambda r: number(r.goodput)),
    ("TTFT median", lambda r: number(r.ttft.median)),
    ("TTFT p99", lambda r: number(r.ttft.p99)),
    ("TTST median", lambda r: number(r.ttst.median)),
    ("TTST p99", lambda r: number(r.ttst.p99)),
    ("TPOT median", lambda r: number(r.tpot.median)),
    ("TPOT p99", lambda r: number(r.tpot.p99)),
    ("E2E median", lambda r: number(r.e2e.median)),
)


def table(results: Results) -> str:
    """Every run in a row: what the pictures show, in numbers; empty without runs."""
    if not results.runs:
        return ""
    order = sorted(results.runs, key=lambda r: (results.labels.index(r.label), r.load.order))
    head = "".join(f"<th>{escape(name)}</th>" for name, _ in _COLUMNS)
    return (
        "<section id=numbers><h2>The numbers</h2><p class=sub>Times in milliseconds.</p>"
        f"<div class=wide><table><tr>{head}</tr>{_rows(order)}</table></div></section>"
    )


def _rows(runs: Sequence[Run]) -> str:
    cells = ("".join(f"<td>{escape(text(run))}</td>" for _, text in _COLUMNS) for run in runs)
    return "".join(f"<tr>{row}</tr>" for row in cells)
