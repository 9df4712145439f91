"""What the prefill worker knows of requests without a handoff: early wants, names of ended ones.

A want may overtake its request, or its retarget: it is *parked* for a while. A want may
also come after the end of its request: the name of an ended one is kept, so that such a
want is refused at once. Part of the state machine of `prefill_side.py`: no clock.
"""

from __future__ import annotations

from collections.abc import Iterator

_MAX_ENDED = 65_536


class ParkedWants:
    """Wants that wait for their request.

    Args:
        keep_s: for how long.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        # (request, decode engine): (deadline, seq of the want)
        self._wants: dict[tuple[str, str], tuple[float, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._wants)

    def add(self, request_id: str, decode_engine: str, seq: int, now_s: float) -> None:
        """Park a want; the first of several counts."""
        self._wants.setdefault((request_id, decode_engine), (now_s + self._keep_s, seq))

    def holds(self, request_id: str, decode_engine: str) -> bool:
        """Whether such a want is parked."""
        return (request_id, decode_engine) in self._wants

    def take(self, request_id: str, decode_engine: str) -> int | None:
        """Remove a want. Returns its `seq`; None: there was none."""
        parked = self._wants.pop((request_id, decode_engine), None)
        return None if parked is None else parked[1]

    def take_all(self, request_id: str) -> list[str]:
        """Remove every want of a request. Returns the decode engines that sent them."""
        engines = [engine for name, engine in self._wants if name == request_id]
        for engine in engines:
            del self._wants[request_id, engine]
        return engines

    def expire(self, now_s: float) -> list[tuple[str, str]]:
        """Remove the wants whose time is over. Returns request and decode engine of each."""
        expired = [key for key, (until_s, _) in self._wants.items() if until_s <= now_s]
        for key in expired:
            del self._wants[key]
        return expired

    def deadlines(self) -> Iterator[float]:
        """When each want expires."""
        return (until_s for until_s, _ in self._wants.values())


class EndedRequests:
    """Names of requests that ended of late.

    Args:
        keep_s: for how long; the oldest of very many are forgotten sooner.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s: dict[str, float] = {}  # in order of their time

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._until_s

    def add(self, request_id: str, now_s: float) -> None:
        """A request ended."""
        self._until_s[request_id] = now_s + self._keep_s

    def discard(self, request_id: str) -> None:
        """A request by this name is here again."""
        self._until_s.pop(request_id, None)

    def expire(self, now_s: float) -> None:
        """Forget those whose time is over."""
        while self._until_s:
            request_id, until_s = next(iter(self._until_s.items()))
            if until_s > now_s and len(self._until_s) <= _MAX_ENDED:
                break
            del self._until_s[request_id]
