"""Draws a figure as a PNG with matplotlib, readable at the width of a README."""

from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from matplotlib import font_manager, rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator, NullFormatter
from PIL import Image

from tasuki.plot.figures.common import joined
from tasuki.plot.figures.marks import Axis, Bars, Curve, Figure, Guide, Panel, Spans
from tasuki.plot.labels import place_labels
from tasuki.plot.palette import FAINT_INK, FRONTIER, GRID, INK, PAPER, Look, look

_DPI = 150
_WIDTH_IN = 9.0
_PANEL_HEIGHT_IN = {1: 4.4, 2: 3.4, 3: 2.7}  # by columns of the grid
_TIMELINE_HEIGHT_IN = 7.5
_THIN_ROWS = 130
_TITLE_IN = 0.66
_LEGEND_ROW_IN = 0.22
_LEGEND_CHARACTERS = 128
_FONTS = ("Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans")


def write_png(figure: Figure, path: Path) -> None:
    """Draw the figure into a file.

    Args:
        figure: What to draw; of its choices only the one that it begins with.
        path: Of the PNG; its folder exists.
    """
    with rc_context(_style()):
        canvas = draw(figure)
        image = BytesIO()
        canvas.savefig(image, format="png", dpi=_DPI, facecolor=PAPER)
    # Few colours are in it: a palette takes a third of the bytes.
    few = Image.open(image).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def draw(figure: Figure) -> Canvas:
    """The matplotlib figure, laid out."""
    rows = figure.rows
    handles = _handles(figure)
    columns = _legend_columns(list(handles))
    head_in = _TITLE_IN + (_LEGEND_ROW_IN * -(-len(handles) // columns) if handles else 0.0)
    height = (
        _TIMELINE_HEIGHT_IN
        if figure.heights
        else head_in + 0.6 + rows * _PANEL_HEIGHT_IN[figure.columns]
    )
    below_head = (0.005, 0.0, 0.99, 1.0 - head_in / height)
    canvas = Canvas(
        figsize=(_WIDTH_IN, height), layout=ConstrainedLayoutEngine(rect=below_head, h_pad=0.06)
    )
    FigureCanvasAgg(canvas)
    grid = canvas.add_gridspec(
        rows, figure.columns, height_ratios=list(figure.heights or (1.0,) * rows)
    )
    all_axes: list[Axes] = []
    for i, panel in enumerate(figure.panels):
        cell = grid[i // figure.columns, i % figure.columns]
        shared = all_axes[0] if figure.share_x and all_axes else None
        axes = canvas.add_subplot(cell, sharex=shared)
        all_axes.append(axes)
        _panel(axes, panel, figure)
        if figure.share_x and i < len(figure.panels) - 1:
            axes.tick_params(labelbottom=False)
    subtitle = joined((figure.subtitle, figure.choice and f"at {figure.choice}"))
    canvas.text(0.012, 1 - 0.12 / height, figure.title, va="top", size=13, weight="bold", color=INK)
    canvas.text(0.012, 1 - 0.38 / height, subtitle, va="top", size=9, color=FAINT_INK)
    if figure.note:
        canvas.supxlabel(figure.note, x=0.012, ha="left", size=8, color=FAINT_INK)
    if handles:
        order = [name for i in range(columns) for name in list(handles)[i::columns]]
        canvas.legend(
            [handles[name] for name in order],
            order,
            loc="upper left",
            bbox_to_anchor=(0.006, 1 - (_TITLE_IN - 0.06) / height),
            ncols=columns,
            frameon=False,
            borderaxespad=0.0,
            handlelength=1.6,
            columnspacing=1.4,
            fontsize=9,
        ).set_in_layout(False)
    canvas.draw_without_rendering()  # labels go where the final axes have room
    for axes, panel in zip(all_axes, figure.panels, strict=True):
        place_labels(axes, [c for c in panel.curves if figure.shows(c)], figure.phases)
    return canvas


def _style() -> dict[Any, Any]:
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    known = set(font_manager.get_font_names())
    return {
        "font.family": next((name for name in _FONTS if name in known), "sans-serif"),
        "font.size": 9,
        "axes.edgecolor": FAINT_INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": FAINT_INK,
        "ytick.color": FAINT_INK,
        "text.parse_math": False,
        "lines.solid_capstyle": "round",
    }


def _panel(axes: Axes, panel: Panel, figure: Figure) -> None:
    ticks = 5 if figure.columns > 2 else 7
    _scale(axes, panel.x, "x", ticks)
    _scale(axes, panel.y, "y", 7)
    for span in panel.spans:
        _spans(axes, span, figure.phases)
    for bars in panel.bars:
        _bars(axes, bars, figure.phases)
    for curve in panel.curves:
        if figure.shows(curve):
            _curve(axes, curve, figure.phases, clip=panel.y.limits is not None)
    for guide in panel.guides:
        if panel.near(guide):
            _line(axes, guide)
    _limits(axes, panel)
    for guide in panel.guides:
        _text(axes, guide, panel.near(guide))
    axes.set_title(panel.title)


def _scale(axes: Axes, axis: Axis, which: str, ticks: int) -> None:
    ours = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xlabel if which == "x" else axes.set_ylabel)(axis.title)
    if axis.categories:
        ours.set_ticks(range(len(axis.categories)), list(axis.categories))
        ours.grid(visible=False)
        if which == "x":
            axes.set_xlim(-0.6, len(axis.categories) - 0.4)
            crowded = sum(len(name) for name in axis.categories) > 24
            if crowded:
                for label in axes.get_xticklabels():
                    label.set(rotation=30, ha="right", rotation_mode="anchor")
        return
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        ours.set_major_formatter(_Plain(labelOnlyBase=False))
        ours.set_minor_formatter(_Plain(labelOnlyBase=False, minor_thresholds=(1.3, 0.5)))
    else:
        ours.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10], integer=axis.reverse))
        ours.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        ours.set_minor_formatter(NullFormatter())


class _Plain(LogFormatter):
    """Logarithmic ticks in plain numbers: "1,000", not "10³"."""

    def _num_to_string(self, x: float, vmin: float, vmax: float) -> str:
        del vmin, vmax
        return f"{x:,.10g}"


def _limits(axes: Axes, panel: Panel) -> None:
    """After everything is drawn: zero in sight, room for labels."""
    axes.margins(x=0.06, y=0.08)
    axes.autoscale_view()
    if panel.x.limits:
        axes.set_xlim(*panel.x.limits)
    elif panel.x.from_zero:
        axes.set_xlim(0, _room(axes.dataLim.x1))
    if panel.y.limits:
        axes.set_ylim(*panel.y.limits)
    elif panel.y.from_zero:
        axes.set_ylim(0, max(axes.get_ylim()[1], _room(axes.dataLim.y1)))
    if panel.y.reverse:
        axes.invert_yaxis()


def _stroke(curve: Curve, style: Look) -> Literal["none", "--", ":", "-"]:
    if not curve.line:
        return "none"
    return "--" if curve.dashed else ":" if style.dotted else "-"


def _room(top: float) -> float:
    """The end of an axis that begins at zero."""
    return 1.07 * top if top > 0 else 1.0


def _curve(axes: Axes, curve: Curve, phases: bool, clip: bool) -> None:
    style = look(curve.color, phases)
    frontier = curve.name == "frontier"
    axes.plot(
        curve.x,
        curve.y,
        color=FRONTIER if frontier else style.color,
        linestyle=_stroke(curve, style),
        linewidth=6.0 if frontier else 1.8,
        alpha=0.6 if frontier else 1.0,
        drawstyle="steps-post" if curve.step else "default",
        marker=style.matplotlib_marker if curve.points else None,
        markersize=6,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        zorder=1.5 if frontier else 3,
        clip_on=clip or not curve.points,
    )
    if curve.filled:
        axes.fill_between(curve.x, curve.y, step="post", color=style.color, alpha=0.15, lw=0)


def _bars(axes: Axes, bars: Bars, phases: bool) -> None:
    colors = [look(color, phases).color for color in bars.colors]
    base = bars.base or (0.0,) * len(bars.x)
    axes.bar(bars.x, bars.height, bottom=base, width=0.62, color=colors, zorder=2)
    tops = [b + h for b, h in zip(base, bars.height, strict=True)]
    if bars.low:
        below = [max(0.0, top - low) for top, low in zip(tops, bars.low, strict=True)]
        above = [max(0.0, high - top) for top, high in zip(tops, bars.high, strict=True)]
        axes.errorbar(
            bars.x, tops, yerr=[below, above], fmt="none", ecolor=INK, elinewidth=1.2, capsize=4
        )
        tops = [max(top, high) for top, high in zip(tops, bars.high, strict=True)]
    for x, top, text in zip(bars.x, tops, bars.labels, strict=False):
        axes.annotate(
            text,
            (x, top),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            size=8,
            color=INK,
        )


def _spans(axes: Axes, spans: Spans, phases: bool) -> None:
    color = look(spans.color, phases).color
    failed = [i for i, length in enumerate(spans.length) if length <= 0]
    thin = (
        max(spans.row) > _THIN_ROWS * spans.height
    )  # then gaps between rows would only be an interference
    axes.barh(
        spans.row,
        spans.length,
        left=spans.begin,
        height=spans.height * (1.0 if thin else 0.9),
        color=color,
        lw=0.3 if thin else 0.0,
        snap=not thin,
        zorder=2,
    )
    if failed:
        axes.plot(
            [spans.begin[i] for i in failed],
            [spans.row[i] for i in failed],
            color=color,
            marker="x",
            linestyle="none",
            markersize=5,
        )


def _line(axes: Axes, guide: Guide) -> None:
    across = axes.axvline if guide.axis == "x" else axes.axhline
    across(guide.value, color=FAINT_INK, linestyle=(0, (2, 3)), linewidth=1.2)


def _text(axes: Axes, guide: Guide, near: bool) -> None:
    """The guide's words beside it; with an arrow at the edge when it is out of sight."""
    style: dict[str, Any] = {"size": 8, "color": FAINT_INK, "textcoords": "offset points"}
    if guide.axis == "y":
        axes.annotate(
            guide.text if near else f"{guide.text} ↑",
            (0.0, guide.value if near else axes.get_ylim()[1]),
            xycoords=("axes fraction", "data"),
            xytext=(4, 3 if near else -2),
            va="bottom" if near else "top",
            **style,
        )
        return
    in_pixels = axes.transData.transform((guide.value, axes.get_ylim()[1]))
    left = near and axes.transAxes.inverted().transform(in_pixels)[0] <= 0.75
    axes.annotate(
        guide.text if near else f"{guide.text} →",
        (guide.value if near else axes.get_xlim()[1], 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4 if left else -4, -2),
        ha="left" if left else "right",
        va="top",
        **style,
    )


def _legend_columns(names: list[str]) -> int:
    """How many names fit beside one another."""
    if not names:
        return 1
    widest = max(len(name) for name in names) + 5
    if sum(len(name) + 5 for name in names) <= _LEGEND_CHARACTERS:
        return len(names)
    return max(1, min(len(names), _LEGEND_CHARACTERS // widest))


def _handles(figure: Figure) -> dict[str, Line2D | Patch]:
    """What the one legend for all panels shows; nothing when there is but one thing."""
    handles: dict[str, Line2D | Patch] = {}
    for panel in figure.panels:
        for span in panel.spans:
            handles.setdefault(span.name, Patch(color=look(span.color, figure.phases).color))
        for bars in panel.bars:
            if bars.in_legend:
                color = look(bars.colors[0], figure.phases).color
                handles.setdefault(bars.name, Patch(color=color))
        for curve in panel.curves:
            if figure.shows(curve) and curve.in_legend:
                handles.setdefault(curve.name, _handle(curve, figure.phases))
    return handles if len(handles) > 1 else {}


def _handle(curve: Curve, phases: bool) -> Line2D:
    style = look(curve.color, phases)
    return Line2D(
        [],
        [],
        color=FRONTIER if curve.name == "frontier" else style.color,
        linestyle=_stroke(curve, style),
        linewidth=6.0 if curve.name == "frontier" else 1.8,
        marker=style.matplotlib_marker if curve.points else None,
        markersize=6,
        markeredgecolor=PAPER,
    )
