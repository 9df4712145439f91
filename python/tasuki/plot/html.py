"""Draws figures as one HTML page with Plotly: self-contained, nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from tasuki.plot.figures.marks import Axis, Bars, Curve, Figure, Guide, Panel, Spans
from tasuki.plot.page import PAGE
from tasuki.plot.palette import FAINT_INK, FRONTIER, GRID, INK, PAPER, look

_FONT = "Inter, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
_PANEL_HEIGHT_PX = {1: 460, 2: 370, 3: 320}
_TIMELINE_HEIGHT_PX = 860
_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}


def write_html(figures: Sequence[Figure], table: str, path: Path) -> None:
    """Write the page.

    Args:
        figures: Its sections, in order.
        table: HTML of the numbers, at its end; may be empty.
        path: Of the page; its folder exists.
    """
    sections = "\n".join(_section(figure) for figure in figures)
    links = "".join(f'<a href="#{f.name}">{escape(f.title)}</a>' for f in figures)
    if table:
        links += '<a href="#numbers">The numbers</a>'
    page = Template(PAGE).substitute(
        plotly=get_plotlyjs(), links=links, sections=sections, table=table, font=_FONT
    )
    path.write_text(page, encoding="utf-8")


def _section(figure: Figure) -> str:
    drawing = plotly.io.to_html(
        draw(figure), full_html=False, include_plotlyjs=False, config=_CONFIG, div_id=_id(figure)
    )
    note = f"<p class=note>{escape(figure.note)}</p>" if figure.note else ""
    return (
        f"<section id={figure.name}><h2>{escape(figure.title)}</h2>"
        f"<p class=sub>{escape(figure.subtitle)}</p>{drawing}{note}</section>"
    )


def _id(figure: Figure) -> str:
    return f"plot-{figure.name}"


def draw(figure: Figure) -> go.Figure:
    """The Plotly figure, laid out."""
    gap = 0.06 if figure.share_x else 0.30 / max(figure.rows, 2)
    canvas = make_subplots(
        rows=figure.rows,
        cols=figure.columns,
        subplot_titles=[escape(panel.title) for panel in figure.panels],
        shared_xaxes=figure.share_x,
        row_heights=list(figure.heights) or None,
        vertical_spacing=gap,
        horizontal_spacing=0.24 / figure.columns if figure.columns > 1 else 0.0,
    )
    canvas.update_annotations(font={"size": 14, "color": INK})  # the panels' titles
    named: set[tuple[str, str]] = set()
    choices: list[str] = []
    for i, panel in enumerate(figure.panels):
        where = {"row": i // figure.columns + 1, "col": i % figure.columns + 1}
        traces = [
            *((_spans(span, figure.phases), "") for span in panel.spans),
            *((trace, "") for bars in panel.bars for trace in _bars(bars, figure.phases)),
            *((_curve(curve, figure.phases), curve.choice) for curve in panel.curves),
        ]
        for trace, choice in traces:
            key = (trace.legendgroup, choice)
            trace.showlegend = trace.showlegend and key not in named
            if trace.showlegend:
                named.add(key)
            trace.visible = choice in ("", figure.choice)
            choices.append(choice)
            canvas.add_trace(trace, **where)
        for guide in panel.guides:
            _guide(canvas, panel, guide, where)
        canvas.update_xaxes(_axis(panel.x), **where)
        canvas.update_yaxes(_axis(panel.y), **where)
    if figure.share_x:
        canvas.update_xaxes(matches="x")
    height = (
        _TIMELINE_HEIGHT_PX
        if figure.heights
        else 90 + figure.rows * _PANEL_HEIGHT_PX[figure.columns]
    )
    canvas.update_layout(
        template="none",
        height=height,
        margin={"l": 70, "r": 20, "t": 64, "b": 56},
        font={"family": _FONT, "size": 13, "color": INK},
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        barmode="overlay",
        bargap=0.1 if figure.heights else 0.35,
        hoverlabel={
            "align": "left",
            "namelength": -1,
            "bgcolor": PAPER,
            "font": {"family": _FONT, "color": INK},
        },
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top"},
    )
    if len(figure.choices) > 1:
        canvas.update_layout(updatemenus=[_menu(figure, choices)])
    return canvas


def _menu(figure: Figure, choices: Sequence[str]) -> dict[str, Any]:
    """A menu that shows the traces of one choice.

    Args:
        figure: Whose choices.
        choices: Of each trace, which it belongs to.
    """
    return {
        "buttons": [
            {
                "label": escape(name),
                "method": "restyle",
                "args": [{"visible": [choice in ("", name) for choice in choices]}],
            }
            for name in figure.choices
        ],
        "active": figure.choices.index(figure.choice),
        "x": 1.0,
        "xanchor": "right",
        "y": 1.0,
        "yanchor": "bottom",
        "pad": {"b": 24, "r": 0},
        "bgcolor": PAPER,
        "bordercolor": GRID,
    }


def _axis(axis: Axis) -> dict[str, Any]:
    layout: dict[str, Any] = {
        "title": {"text": escape(axis.title), "standoff": 10, "font": {"size": 13}},
        "gridcolor": GRID,
        "linecolor": FAINT_INK,
        "tickcolor": FAINT_INK,
        "zeroline": False,
        "automargin": True,
    }
    if axis.categories:
        ticks = list(range(len(axis.categories)))
        return layout | {
            "tickvals": ticks,
            "ticktext": [escape(name) for name in axis.categories],
            "range": [-0.6, len(ticks) - 0.4],
            "showgrid": False,
        }
    if axis.log:
        # Every power of ten, and 2 and 5 between them, in plain numbers.
        return layout | {"type": "log", "dtick": "D2", "tickformat": ",~r"}
    if axis.limits:
        low, high = axis.limits
        layout["range"] = [high, low] if axis.reverse else [low, high]
    elif axis.from_zero:
        layout["rangemode"] = "tozero"
    return layout | {"separatethousands": True}


def _curve(curve: Curve, phases: bool) -> go.Scatter:
    style = look(curve.color, phases)
    frontier = curve.name == "frontier"
    modes = [("lines", curve.line), ("markers", curve.points), ("text", bool(curve.labels))]
    return go.Scatter(
        name=escape(curve.name),
        legendgroup=curve.name,
        x=curve.x,
        y=curve.y,
        mode="+".join(mode for mode, wanted in modes if wanted),
        text=[escape(text) for text in curve.labels] or None,
        textposition="bottom right" if curve.points else "middle center",
        textfont={"size": 11, "color": style.color},
        hovertext=curve.hover or None,
        hoverinfo="text" if curve.hover else ("skip" if frontier else "x+y+name"),
        line={
            "color": FRONTIER if frontier else style.color,
            "width": 9 if frontier else 2.2,
            "dash": "dash" if curve.dashed else "dot" if style.dotted else "solid",
            "shape": "hv" if curve.step else "linear",
        },
        marker={
            "color": style.color,
            "symbol": style.plotly_marker,
            "size": 9,
            "line": {"color": PAPER, "width": 1},
        },
        fill="tozeroy" if curve.filled else None,
        fillcolor=f"{style.color}26" if curve.filled else None,
        showlegend=curve.in_legend,
        cliponaxis=not curve.points,
    )


def _bars(bars: Bars, phases: bool) -> Iterator[go.Bar | go.Scatter]:
    error = None
    if bars.low:
        tops = bars.height
        error = {
            "type": "data",
            "array": [max(0.0, high - top) for high, top in zip(bars.high, tops, strict=True)],
            "arrayminus": [max(0.0, top - low) for low, top in zip(bars.low, tops, strict=True)],
            "color": INK,
            "thickness": 1.4,
        }
    yield go.Bar(
        name=escape(bars.name),
        legendgroup=bars.name,
        x=bars.x,
        y=bars.height,
        base=bars.base or None,
        marker={"color": [look(color, phases).color for color in bars.colors]},
        error_y=error,
        hovertext=bars.hover or None,
        hoverinfo="text" if bars.hover else "y",
        showlegend=bars.in_legend,
    )
    if bars.labels:  # above the error bars, where a bar's own text would not be
        yield go.Scatter(
            x=bars.x,
            y=[max(pair) for pair in zip(bars.height, bars.high or bars.height, strict=True)],
            mode="text",
            text=[escape(text).replace("\n", "<br>") for text in bars.labels],
            textposition="top center",
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
        )


def _spans(spans: Spans, phases: bool) -> go.Bar:
    color = look(spans.color, phases).color
    return go.Bar(
        name=spans.name,
        legendgroup=spans.name,
        orientation="h",
        y=spans.row,
        x=spans.length,
        base=spans.begin,
        width=0.9 * spans.height,
        marker={"color": color, "line": {"color": color, "width": 0}},
        hovertext=spans.hover or None,
        hoverinfo="text",
        showlegend=True,
    )


def _guide(canvas: go.Figure, panel: Panel, guide: Guide, where: dict[str, int]) -> None:
    """A line and its words; only the words, at the edge, when it is out of sight."""
    near, upright = panel.near(guide), guide.axis == "x"
    if near:
        add = canvas.add_vline if upright else canvas.add_hline
        add(guide.value, line={"color": FAINT_INK, "width": 1.4, "dash": "dot"}, **where)
    axis = panel.x if upright else panel.y
    # Unlike lines, annotations of a logarithmic axis are placed by the logarithm.
    place = math.log10(guide.value) if axis.log else guide.value
    if upright:
        at = {"x": place} if near else {"x": 1.0, "xref": "x domain"}
        at |= {"y": 1.0, "yref": "y domain", "yanchor": "top"}
        at["xanchor"] = "left" if near else "right"
    else:
        at = {"y": place} if near else {"y": 1.0, "yref": "y domain"}
        at |= {"x": 0.0, "xref": "x domain", "xanchor": "left"}
        at["yanchor"] = "bottom" if near else "top"
    text = guide.text if near else f"{guide.text} {'→' if upright else '↑'}"
    font = {"size": 12, "color": FAINT_INK}
    canvas.add_annotation(
        text=escape(text), font=font, name="guide", showarrow=False, **at, **where
    )
