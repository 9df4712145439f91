"""Whether few events say something about all of them."""

from __future__ import annotations

import math

_DEVIATIONS = 1.645  # one-sided 95% of a normal distribution


def is_above(count: float, of: float, share: float) -> bool:
    """Whether events are more frequent than a share, with a confidence of about 95%.

    The binomial distribution of `of` events, approximated by a normal one with a continuity
    correction: 1 of 5, 2 of 30 or 15 of 1000 are surely more than 1%, 1 of 20 is not.

    Args:
        count: How many of them happened; at least one is needed.
        of: Of how many; 0: of none.
        share: Above 0, below 1.
    """
    usual = of * share
    return count >= 1 and count - 0.5 - usual >= _DEVIATIONS * math.sqrt(usual * (1 - share))


def share_by_chance(count: int, of: int, share: float) -> float:
    """How probable it is that so many or more of these events happen: the binomial distribution.

    Args:
        count: How many of them happened.
        of: Of how many.
        share: How probable each of them is.
    """
    ways = (
        math.comb(of, each) * share**each * (1 - share) ** (of - each)
        for each in range(count, of + 1)
    )
    return sum(ways)
