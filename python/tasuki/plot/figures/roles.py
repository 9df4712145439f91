"""Roles that follow the load: workers by role, what was asked and what came in time, over time."""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.plot.figures.marks import GREY, Axis, Curve, Figure, Panel
from tasuki.plot.options import Options
from tasuki.plot.run import Results, RolesTimeline

_ROLES = ("prefill", "decode", "mixed")


def roles(results: Results, options: Options, colors: Mapping[str, int]) -> list[Figure]:
    """A figure for each timeline: requests above, workers by role below."""
    del options, colors  # colours are roles here
    several = len(results.roles) > 1
    return [
        Figure(
            name=f"roles-{number}" if several else "roles",
            title="Roles that follow the load",
            subtitle=timeline.label,
            panels=_panels(timeline),
            columns=1,
        )
        for number, timeline in enumerate(results.roles, 1)
    ]


def _panels(timeline: RolesTimeline) -> tuple[Panel, Panel]:
    x = timeline.at_s
    time = Axis("seconds", from_zero=True)
    requests = (
        Curve("asked for", x, timeline.offered, GREY, points=False, dashed=True),
        Curve("good", x, timeline.good, len(_ROLES), points=False),
    )
    counts = dict(zip(_ROLES, (timeline.prefill, timeline.decode, timeline.mixed), strict=True))
    workers = tuple(
        Curve(role, x, counts[role], color, points=False, step=True)
        for color, role in enumerate(_ROLES)
    )
    return (
        Panel(time, Axis("requests/s", from_zero=True), requests, title="load and goodput"),
        Panel(time, Axis("workers", from_zero=True), workers, title="roles"),
    )
