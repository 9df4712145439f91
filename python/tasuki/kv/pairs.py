"""What a decode worker counts of each prefill engine that it pulls from.

Written by the engine thread under the lock of `handoff.py`, read by the engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands that start workers read settings beside this
    from tasuki.kv.effects import PullDone

MAX_PAIRS = 64  # engines that are gone are forgotten first: those not used for longest


class LossCause(StrEnum):
    """Why a handoff ended without its KV."""

    TRANSFER = "transfer"  # a read failed
    STUCK = "stuck"  # a read made no progress
    DIGEST = "digest"  # what was read is not what was announced
    LEASE = "lease"  # the prefill worker has let the blocks go
    SILENT = "silent"  # the prefill worker does not answer
    PEER = "peer"  # the prefill worker is gone, or refuses us, or cannot be reached
    MESSAGE = "message"  # the prefill worker said what cannot be


@dataclass(slots=True)
class PairCounters:
    """Of one prefill engine, since it was met.

    Attributes:
        transport: As both name it.
        way: Kind of way by which the last pull travelled (`ways.KINDS`); empty: not known.
        bytes: Read.
        pulls: That ended well.
        descriptors: Of these.
        post_s: Handing descriptors to the transport.
        wire_s: Of each pull from its first post to its last byte, added up.
        exposed_s: Of each request what its client waited for, added up.
        reconnects: Connections made anew after a failed transfer.
        failures: Handoffs that ended without their KV.
    """

    transport: str = ""
    way: str = ""
    bytes: int = 0
    pulls: int = 0
    descriptors: int = 0
    post_s: float = 0.0
    wire_s: float = 0.0
    exposed_s: float = 0.0
    reconnects: int = 0
    failures: dict[LossCause, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the transport, and of the way where it is known: `tcp`, `nixl-ucx/rdma`."""
        return f"{self.transport}/{self.way}" if self.way else self.transport


class Pairs:
    """Counters by prefill engine, of a bounded number of engines."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[str, PairCounters] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[str, PairCounters]]:
        return iter(self._pairs.items())

    def of(self, engine: str) -> PairCounters:
        """The counters of an engine."""
        found = self._pairs.setdefault(engine, PairCounters())
        self._pairs.move_to_end(engine)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return found

    def pulled(self, engine: str, done: PullDone) -> None:
        """A pull ended."""
        pair = self.of(engine)
        pair.bytes += done.moved_bytes
        pair.post_s += done.post_s
        pair.reconnects += done.reconnects
        if done.way is not None:
            pair.way = done.way.kind
        if not done.error:
            pair.pulls += 1
            pair.descriptors += done.descriptors
            pair.wire_s += done.finished_s - done.posted_s

    def lost(self, engine: str, cause: LossCause) -> None:
        """A handoff ended without its KV."""
        failures = self.of(engine).failures
        failures[cause] = failures.get(cause, 0) + 1
