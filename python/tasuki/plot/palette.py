"""Colours, marker shapes and ink, for both renderers.

Source: the eight colours that stay apart for every common colour vision are
M. Okabe and K. Ito's, "Color Universal Design" (2008); their yellow is left out,
it is too pale on white. Shapes and dashes repeat what the colour says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """How one line looks: its colour, its marker's name in each library, whether it is dotted."""

    color: str
    matplotlib_marker: str
    plotly_marker: str
    dotted: bool = False


_LINES = (
    Look("#0072B2", "o", "circle"),
    Look("#D55E00", "s", "square"),
    Look("#009E73", "^", "triangle-up"),
    Look("#CC79A7", "D", "diamond"),
    Look("#E69F00", "v", "triangle-down"),
    Look("#56B4E9", "P", "cross"),
    Look("#4D4D4D", "X", "x"),
)
_GREY = Look("#8A8A8A", "o", "circle")
# Phases of a request, in the order of its life: waiting is pale, work is strong.
_PHASES = (
    *("#D9D9D9", "#B8B8B8", "#0072B2", "#56B4E9", "#CC79A7"),
    *("#D55E00", "#E69F00", "#009E73", "#000000"),
)

INK = "#1F2328"
FAINT_INK = "#636C76"
GRID = "#E6E8EB"
FRONTIER = "#C9CED4"
PAPER = "#FFFFFF"


def look(index: int, phases: bool = False) -> Look:
    """How line (or phase) `index` looks; below 0: grey.

    Beyond the palette's end colours repeat, dotted and with other shapes.
    """
    if index < 0:
        return _GREY
    if phases:
        return Look(_PHASES[index % len(_PHASES)], "o", "circle")
    turn, place = divmod(index, len(_LINES))
    shape = _LINES[(place + turn) % len(_LINES)]
    return Look(_LINES[place].color, shape.matplotlib_marker, shape.plotly_marker, turn > 0)
