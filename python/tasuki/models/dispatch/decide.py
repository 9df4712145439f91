"""Which candidate replaces the default: timings in, a name out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

MARGIN = 0.03


def choose(times_s: Mapping[str, Sequence[float]], default: str, margin: float = MARGIN) -> str:
    """The fastest candidate that beats the default in every turn.

    Args:
        times_s: Of each candidate, the default among them, one a turn.
        default: What is kept if nothing is clearly faster.
        margin: By which share of the default's time a candidate must be faster, in each turn.
    """
    mine = times_s[default]
    better = [
        name
        for name, times in times_s.items()
        if all(time < own * (1.0 - margin) for time, own in zip(times, mine, strict=True))
    ]
    return min(better, key=lambda name: statistics.median(times_s[name]), default=default)
