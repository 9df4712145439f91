"""The rate at which a fleet's goodput is highest, found with few runs; rates have numbers."""

from __future__ import annotations

from collections.abc import Callable

APART = 1.12  # a rate and the next one
ENOUGH = 1 / APART  # of the requests in time: a lower rate has no higher goodput
SOME = 0.1  # fewer in time: the rate is far too high
LEAP, FAR = 4, 32  # numbers of rates
Seen = dict[str, float]  # goodput and attainment


def climb(at: Callable[[int], Seen | None], start: int) -> int:
    """The number whose goodput is highest: down to where nearly all is in time, up to a fall.

    While nearly all is in time, a fall only says that a short run had fewer requests than its rate.

    Args:
        at: None: nothing more is measured.
        start: Where to begin.
    """
    seen: dict[int, Seen] = {}

    def ask(number: int) -> Seen | None:
        if number not in seen and (found := at(number)) is not None:
            seen[number] = found
        return seen.get(number)

    number = start
    while (found := ask(number)) and found["attainment"] < ENOUGH and number > start - FAR:
        number -= 1 if found["attainment"] > SOME else LEAP
    while number < start + FAR and (found := ask(number)) and (above := ask(number + 1)):
        if above["goodput"] <= found["goodput"] and above["attainment"] < ENOUGH:
            break
        number += 1
    return max(seen, key=lambda each: seen[each]["goodput"], default=start)
