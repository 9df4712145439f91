"""From results to files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tasuki.plot.errors import PlotError
from tasuki.plot.figures.marks import Figure
from tasuki.plot.figures.registry import figures
from tasuki.plot.html import write_html
from tasuki.plot.load import Source, load
from tasuki.plot.options import Options
from tasuki.plot.page import table
from tasuki.plot.png import write_png
from tasuki.whole_file import write_whole

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
            f"tasuki: no results, and left out: {names}{more} ({len(results.skipped)})",
            file=sys.stderr,
        )
    return _write(drawn, table(results), figure, out)


def _write(drawn: list[Figure], numbers: str, figure: str, out: Path) -> list[Path]:
    if out.suffix.lower() == ".png":
        if len(drawn) != 1:
            names = ", ".join(each.name for each in drawn)
            raise PlotError(
                f"{out}: one PNG holds one figure, not {len(drawn)} ({names}): give a figure's"
                " name, or --load, that leaves one, or a folder or a .html to --out"
            )
        return [_whole(out, partial(write_png, drawn[0]))]
    page = partial(write_html, drawn, numbers)
    if out.suffix.lower() == ".html":
        return [_whole(out, page)]
    written = [_whole(out / (f"{figure}.html" if figure else _PAGE), page)]
    return written + [_whole(out / f"{each.name}.png", partial(write_png, each)) for each in drawn]


def _whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Have a file written, or leave what is there as it is.

    Raises:
        PlotError: It cannot be written.
    """
    try:
        write_whole(path, write)
    except OSError as error:
        raise PlotError(
            f"{path} cannot be written ({error.strerror or error}): choose another --out"
        ) from error
    return path
