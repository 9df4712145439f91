"""What the transfer thread (`puller.py`) knows of its peers and of the orders under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasuki.kv.digest import UnitDigests
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.transport import Transfer
from tasuki.kv.ways import Way


@dataclass(slots=True)
class Order:
    """One order under way; `pieces` are yet to be posted.

    `jobs`: pieces that arrived and whose digests are not there yet; `ended_s`: when the last
    piece so far was seen to have arrived.
    """

    order_id: int
    pieces: deque[list[Run]] = field(default_factory=deque)
    check: frozenset[int] = frozenset()
    inflight: int = 0
    jobs: int = 0
    posted_s: float = 0.0
    ended_s: float = 0.0
    digests: list[UnitDigests] = field(default_factory=list)
    moved_bytes: int = 0
    descriptors: int = 0
    post_s: float = 0.0
    reconnects: int = 0
    reported_s: float = 0.0
    error: str = ""
    way: Way | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an order under way."""

    transfer: Transfer
    order: Order
    size_bytes: int
    runs: Sequence[Run]


@dataclass(slots=True)
class Peer:
    """One peer.

    `joining`: it has never been connected. `broken`: a transfer failed; connect anew before the
    next one.
    """

    metadata: bytes
    plan: TransferPlan
    joining: bool = True
    connected: bool = False
    broken: bool = False
    leaving: bool = False
    way: Way | None = None
    orders: deque[Order] = field(default_factory=deque)
    inflight: list[Piece] = field(default_factory=list)
    inflight_bytes: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether it is to be looked at again soon."""
        return bool(self.inflight or self.orders or self.joining)
