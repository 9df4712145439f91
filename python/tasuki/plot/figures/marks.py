"""A picture as data: what `png.py` and `html.py` both draw.

A figure is a grid of panels; a panel has two axes and the marks on them. Colours
are numbers into the palette (`palette.py`): one for each line's label, the same
in every figure.
"""

from __future__ import annotations

from dataclasses import dataclass

GREY = -1  # the colour of what belongs to no line
_NEAR = 2.0


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis.

    Attributes:
        categories: Names in place of numbers: values are then indices into these.
        from_zero: Whether zero must be in sight.
        limits: What is in sight; None: what the marks need.
    """

    title: str
    log: bool = False
    from_zero: bool = False
    reverse: bool = False
    categories: tuple[str, ...] = ()
    limits: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Points, a line through them, or both.

    Attributes:
        labels: Beside each point; empty: none.
        hover: All there is to say of each point, "<br>" between lines; empty: x and y.
        step: Whether the line keeps its height until the next point.
        choice: Which of the figure's choices it belongs to; empty: all.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: int
    labels: tuple[str, ...] = ()
    hover: tuple[str, ...] = ()
    line: bool = True
    points: bool = True
    dashed: bool = False
    step: bool = False
    filled: bool = False
    choice: str = ""
    in_legend: bool = True


@dataclass(frozen=True, slots=True)
class Bars:
    """Upright bars over categories.

    Attributes:
        x: Index of each bar's category.
        base: Where each bar begins.
        low: The error bar's lower end for each bar; empty: no error bars.
        high: Its upper end.
        labels: Above each bar.
    """

    name: str
    x: tuple[float, ...]
    height: tuple[float, ...]
    colors: tuple[int, ...]
    base: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    hover: tuple[str, ...] = ()
    in_legend: bool = False


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of time, each on a row of its own.

    Attributes:
        height: Rows that each takes: more than one where not every row is drawn.
    """

    name: str
    row: tuple[int, ...]
    begin: tuple[float, ...]
    length: tuple[float, ...]
    color: int
    height: int = 1
    hover: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Guide:
    """A line across the panel at a value of the "x" or "y" axis: a limit, a threshold."""

    axis: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Two axes and what is drawn on them."""

    x: Axis
    y: Axis
    curves: tuple[Curve, ...] = ()
    bars: tuple[Bars, ...] = ()
    spans: tuple[Spans, ...] = ()
    guides: tuple[Guide, ...] = ()
    title: str = ""

    def near(self, guide: Guide) -> bool:
        """Whether the guide lies where the marks are, so that both can be in sight."""
        if guide.axis == "x":
            values = [x for curve in self.curves for x in curve.x]
        else:
            values = [y for curve in self.curves for y in curve.y]
        return bool(values) and guide.value <= _NEAR * max(values)


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture.

    Attributes:
        name: Of its file, without suffix.
        subtitle: What was measured on what, in one line.
        note: How to read it, below; may be empty.
        heights: The rows' shares of the height; empty: equal.
        choices: What the HTML lets one choose between; empty: nothing.
        choice: The one that the PNG shows and the HTML begins with.
        phases: Whether colours are phases of a request, not lines.
        share_x: Whether all panels show the same stretch of x.
    """

    name: str
    title: str
    subtitle: str
    panels: tuple[Panel, ...]
    columns: int = 1
    note: str = ""
    heights: tuple[float, ...] = ()
    choices: tuple[str, ...] = ()
    choice: str = ""
    phases: bool = False
    share_x: bool = False

    @property
    def rows(self) -> int:
        """Rows of the grid of panels."""
        return -(-len(self.panels) // self.columns)

    def shows(self, curve: Curve) -> bool:
        """Whether the curve is seen before anybody chooses."""
        return curve.choice in ("", self.choice)
