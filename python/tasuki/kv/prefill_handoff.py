"""What the prefill worker keeps: handoffs, early wants, names of requests that ended. Plain state.

`prefill_side.py` moves a handoff from state to state; `decode_peers.py` reads what to
say of it. All run under the lock of `handoff.py`.

A want may overtake its request, or its retarget: it is *parked* for a while. A want may
also come after the end of its request: the name of an ended one is kept, so that such a
want is refused at once. No clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tasuki.engine.api import Announced, LegEndReason
from tasuki.v1 import kv_pb2 as pb

_MAX_ENDED = 65_536


@dataclass(slots=True)
class PrefillHandoff:
    """One PREFILL leg.

    Attributes:
        target: decode engine that gets the KV; empty after it gave the work back.
        wanted: the target has credit and is told everything.
        heard: `seq` of the last want or renewal of this target since it became the target.
        admitted: there was credit once; what is computed from then on is leased.
        announced: what may be read, each beginning where the one before ends.
        expires_s: end of the lease; None before the first announcement.
        residual: earlier targets that may still accept a read, and until when.
        past: earlier targets whose renewals must not be answered "alive".
        ending: set once nothing more is computed and the blocks only wait.
        leg_over: the engine dropped the leg by itself; only what it said is kept.
        digests: of announced blocks, for the target, in order; nothing if it asks for none.
        digests_ordered: announcements whose digests are there or being computed.
    """

    request_id: str
    target: str
    wanted: bool = False
    heard: int = 0
    admitted: bool = False
    scheduled: bool = False
    announced: list[Announced] = field(default_factory=list)
    prefilled: pb.Prefilled | None = None
    expires_s: float | None = None
    residual: dict[str, float] = field(default_factory=dict)
    past: set[str] = field(default_factory=set)
    ending: tuple[LegEndReason, str] | None = None
    leg_over: bool = False
    digests: list[pb.Digests] = field(default_factory=list)
    digests_ordered: int = 0

    @property
    def tokens(self) -> int:
        """Leading tokens whose KV may be read."""
        return self.announced[-1].end_token if self.announced else 0

    @property
    def num_blocks(self) -> int:
        """Blocks that hold these."""
        return sum(len(part.blocks) for item in self.announced for part in item.parts)

    @property
    def leased(self) -> bool:
        """Whether blocks are announced and not given up."""
        return self.expires_s is not None and not self.leg_over

    def leave_target(self) -> None:
        """Nobody gets the KV for now; digests are the next target's, which may have other units."""
        self.target, self.wanted, self.heard = "", False, 0
        self.digests, self.digests_ordered = [], 0

    def drop_residual(self, now_s: float) -> bool:
        """Forget earlier targets that may accept a read no more. Whether there were any."""
        over = [engine for engine, until_s in self.residual.items() if until_s <= now_s]
        for engine in over:
            del self.residual[engine]
        return bool(over)

    def deadlines(self) -> Iterator[float]:
        """When the lease ends, and when each earlier target's does."""
        if self.expires_s is not None:
            yield self.expires_s
        yield from self.residual.values()


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
