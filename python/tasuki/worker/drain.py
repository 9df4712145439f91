"""When a worker that was told to end may end. Engine thread only.

A worker that drains tells every router so in its load, goes on with what it has, and ends
when nothing is left: no leg of any router, no block that a decode worker may still read.
"""

from __future__ import annotations

from dataclasses import dataclass

# Submits that crossed with the news arrive within this time. It counts from the first turn of
# the engine thread after the signal, which is also when routers are told.
NOTICE_S = 2.0


@dataclass(frozen=True, slots=True)
class Held:
    """What keeps a draining worker from ending.

    Attributes:
        routers: Open streams.
        legs: Of all routers, those included whose grammar is still compiled.
        leased_blocks: Announced to decode workers and not released.
    """

    routers: int
    legs: int
    leased_blocks: int


class Drain:
    """One drain, from the signal to the end.

    Args:
        begun_s: When routers were told, on the clock of `may_end`.
    """

    def __init__(self, begun_s: float) -> None:
        self._notice_until_s = begun_s + NOTICE_S

    def may_end(self, now_s: float, held: Held) -> bool:
        """Whether nothing is lost by an end now.

        Without a router nothing can arrive any more, so an idle worker ends at once.
        """
        if held.legs or held.leased_blocks:
            return False
        return held.routers == 0 or now_s >= self._notice_until_s

    def next_look_s(self, now_s: float) -> float:
        """When to look again at the latest if nothing happens before."""
        return self._notice_until_s if now_s < self._notice_until_s else now_s + NOTICE_S
