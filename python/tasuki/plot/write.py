"""From results to files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tasuki.plot.errors import PlotError
from tasuki.plot.figures.marks import Figure
from tasuki.plot.figures.registry import figures
from tasuki.plot.html import write_html
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options
from tasuki.plot.page import table
from tasuki.plot.png import write_png

_PAGE = "index.html"


def write(figure: str, words: Sequence[str], options: Options, out: Path) -> list[Path]:
    """Read, draw and write; skipped files are named on stderr.

    Args:
        figure: The one to draw; empty: all that the results allow.
        words: Results, as on the command line.
        options: What the command line chooses.
        out: A folder, or one file that ends in .png or .html.

    Returns:
        The files written.

    Raises:
        PlotError: Nothing to draw, or `out` cannot hold it.
    """
    results = load([Source.parse(word) for word in words])
    drawn = figures(results, options, figure)
    if results.skipped:
        names = ", ".join(path.name for path in results.skipped[:3])
        more = ", …" if len(results.skipped) > 3 else ""
        print(
            f"tasuki: {len(results.skipped)} files are no results: {names}{more}", file=sys.stderr
        )
    try:
        return _write(drawn, table(results), figure, out)
    except OSError as error:
        raise PlotError(f"{error.filename or out}: {error.strerror}") from error


def _write(drawn: list[Figure], numbers: str, figure: str, out: Path) -> list[Path]:
    if out.suffix.lower() == ".png":
        if len(drawn) != 1:
            names = ", ".join(each.name for each in drawn)
            raise PlotError(f"{out}: one PNG holds one figure, not {len(drawn)} ({names})")
        out.parent.mkdir(parents=True, exist_ok=True)
        write_png(drawn[0], out)
        return [out]
    if out.suffix.lower() == ".html":
        out.parent.mkdir(parents=True, exist_ok=True)
        write_html(drawn, numbers, out)
        return [out]
    out.mkdir(parents=True, exist_ok=True)
    page = out / (f"{figure}.html" if figure else _PAGE)
    write_html(drawn, numbers, page)
    pictures = [out / f"{each.name}.png" for each in drawn]
    for each, picture in zip(drawn, pictures, strict=True):
        write_png(each, picture)
    return [page, *pictures]
