"""Puts labels beside points where they cover nothing; what finds no room is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasuki.plot.figures.marks import Curve
from tasuki.plot.palette import look

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_PT = 7.5
_CHARACTER_PT = 0.52 * _SIZE_PT  # the mean width of digits and small letters
# (x, y) offsets in points, horizontal and vertical alignment; the best first.
_PLACES = (
    (6.0, -3.0, "left", "top"),
    (6.0, 3.0, "left", "bottom"),
    (-6.0, 3.0, "right", "bottom"),
    (-6.0, -3.0, "right", "top"),
)
_ON_IT = (0.0, 0.0, "center", "center")
_MARKER_PT = 6.0  # half of its size, and some room

Box = tuple[float, float, float, float]  # left, bottom, right, top; in points


def place_labels(axes: Axes, curves: Sequence[Curve], phases: bool) -> None:
    """Label the curves' points; labels of curves without points stand on them.

    Args:
        axes: Laid out already: only then is it known what overlaps.
        curves: What is drawn on it.
        phases: Whether colours are phases.
    """
    to_points = 72.0 / axes.figure.dpi
    where = {}
    for curve in curves:
        if curve.x and (curve.points or curve.labels):
            pixels = axes.transData.transform(list(zip(curve.x, curve.y, strict=True)))
            where[id(curve)] = [(x * to_points, y * to_points) for x, y in pixels]
    taken: list[Box] = [
        (x - _MARKER_PT, y - _MARKER_PT, x + _MARKER_PT, y + _MARKER_PT)
        for curve in curves
        if id(curve) in where and curve.points
        for x, y in where[id(curve)]
    ]
    for curve in curves:
        if id(curve) not in where:
            continue
        color = look(curve.color, phases).color
        # The ends first: they say most.
        order = sorted(range(len(curve.labels)), key=lambda i: min(i, len(curve.labels) - 1 - i))
        for i in order:
            if curve.points:
                found = free_place(where[id(curve)][i], curve.labels[i], taken)
                if found is None:
                    continue
                (dx, dy, ha, va), box = found
                taken.append(box)
            else:
                dx, dy, ha, va = _ON_IT
            axes.annotate(
                curve.labels[i],
                (curve.x[i], curve.y[i]),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=ha,
                va=va,
                size=_SIZE_PT,
                color=color,
                zorder=4,
                annotation_clip=False,
            )


def free_place(
    point: tuple[float, float], text: str, taken: Sequence[Box]
) -> tuple[tuple[float, float, str, str], Box] | None:
    """The first place beside the point where the text covers nothing that is taken."""
    width, height = len(text) * _CHARACTER_PT, _SIZE_PT
    for dx, dy, ha, va in _PLACES:
        left = point[0] + dx - {"left": 0.0, "center": width / 2, "right": width}[ha]
        bottom = point[1] + dy - {"bottom": 0.0, "top": height}[va]
        box = (left, bottom, left + width, bottom + height)
        if not any(_overlap(box, other) for other in taken):
            return (dx, dy, ha, va), box
    return None


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
