"""How sure a measured share is. Pure.

Requests of one run are not independent: a burst makes many neighbours late at
once. `effective_count` says how many independent requests they are worth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

_BATCHES = 10


def wilson(share: float, count: float, error: float) -> tuple[float, float]:
    """Bounds of the true share; each is wrong with probability `error`.

    Args:
        share: Seen, 0 to 1.
        count: Independent observations; may be fractional.
        error: One-sided, above 0 and below 0.5.

    Source: Wilson, "Probable inference, the law of succession, and statistical
    inference", J. Am. Stat. Assoc. 22 (1927).
    """
    if count <= 0:
        return 0.0, 1.0
    z2 = NormalDist().inv_cdf(1.0 - error) ** 2
    middle = (share + z2 / (2.0 * count)) / (1.0 + z2 / count)
    spread = share * (1.0 - share) / count + z2 / (4.0 * count * count)
    half = math.sqrt(z2 * spread) / (1.0 + z2 / count)
    # At the ends the formula is exact, its rounding is not.
    low = 0.0 if share <= 0.0 else max(0.0, middle - half)
    high = 1.0 if share >= 1.0 else min(1.0, middle + half)
    return low, high


def count_above(share: float, error: float) -> float:
    """Observations from which on the lower bound of `wilson` is above `share` if all are good."""
    return NormalDist().inv_cdf(1.0 - error) ** 2 * share / (1.0 - share)


def effective_count(outcomes: Sequence[bool]) -> float:
    """Independent observations that `outcomes`, in order of time, are worth.

    The variance of the means of ten batches is compared with what independent
    outcomes would give; the ratio, if above 1, divides the count.

    Source: batch means (Law, Simulation Modeling and Analysis, ch. 9); the
    design effect (Kish, Survey Sampling, 1965).
    """
    count = len(outcomes)
    size = count // _BATCHES
    if size < 2:
        return float(count)
    used = [1.0 if met else 0.0 for met in outcomes[: size * _BATCHES]]
    share = fmean(used)
    expected = share * (1.0 - share) / size
    if expected == 0.0:
        return float(count)
    means = [fmean(used[at : at + size]) for at in range(0, len(used), size)]
    return count / max(1.0, variance(means) / expected)
