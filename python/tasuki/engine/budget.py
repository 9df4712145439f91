"""Who may take blocks: own work and inbound pulls, neither starved by the other.

    |<------------------------- num_blocks = N ------------------------->|
    | outbound X            | generating            | inbound Y          |
    | PREFILL legs, held    | colocated and pulled  | credited, assigned |
    | until a peer releases | sequences             | or quarantined     |

X and Y leave only when a peer acts; what generates ends, or can be preempted,
by itself. A PREFILL leg may be computed ahead, before its peer has given credit;
A of X are such blocks: no peer has promised to take them. With M the blocks of one
request of maximal length and N >= 2M:

- X <= N - M and A + Y <= N - M, always: two workers whose pools are full of blocks
  for one another still each have room for one more request of any length.
- A <= N - 2M: so that one more leg with credit fits into X, and one more inbound
  leg into Y, whatever is computed ahead.
- While inbound legs are denied, own work leaves M - Y free for them, and nothing
  more is computed ahead; while own work waits that needs no credit or has it, credits
  leave it what it lacks to M.
- To compute ahead is for a worker with room: half of the pool stays free.

Blocks that sequences share count once for each: the limits hold all the more.
"""

from __future__ import annotations

from tasuki.engine.block_pool import BlockPool
from tasuki.engine.config import EngineConfig
from tasuki.engine.request import Phase, Request


class Budget:
    """Accounts of the two sides over one block pool.

    Attributes:
        inbound: DECODE legs that have not started, by request id.
        outbound: PREFILL legs that hold blocks, by request id.
        reserved_blocks: Promised by credits and not taken yet.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._pool = pool
        self._half_blocks = config.num_blocks // 2
        self._reach_blocks = config.num_blocks - config.max_request_blocks
        self._floor_blocks = config.max_request_blocks
        self.inbound: dict[str, Request] = {}
        self.outbound: dict[str, Request] = {}
        self.reserved_blocks = 0

    @property
    def inbound_blocks(self) -> int:
        """Y: credited, assigned or quarantined."""
        assigned = sum(
            request.sequences[0].num_pages
            for request in self.inbound.values()
            if request.phase is Phase.ASSIGNED
        )
        return self.reserved_blocks + assigned + self._pool.num_quarantined

    @property
    def outbound_blocks(self) -> int:
        """X: held by PREFILL legs."""
        return sum(
            sequence.num_pages
            for request in self.outbound.values()
            for sequence in request.sequences
        )

    @property
    def ahead_blocks(self) -> int:
        """A: held by PREFILL legs without credit."""
        return sum(
            sequence.num_pages
            for request in self.outbound.values()
            if not request.credited
            for sequence in request.sequences
        )

    @property
    def ahead_room(self) -> int:
        """Blocks that further PREFILL legs without credit may hold."""
        if self._inbound_denied:
            return 0
        ahead = self.ahead_blocks
        free = self._pool.available - self.reserved_blocks
        return min(
            self._reach_blocks - self._floor_blocks - ahead,
            self._reach_blocks - self.inbound_blocks - ahead,
            free - self._half_blocks,
        )

    @property
    def outbound_room(self) -> int:
        """Blocks that further PREFILL legs may hold."""
        return self._reach_blocks - self.outbound_blocks

    @property
    def own_room(self) -> int:
        """Blocks that own work may take now at admission."""
        room = self._pool.available - self.reserved_blocks
        if self._inbound_denied:
            room -= max(0, self._floor_blocks - self.inbound_blocks)
        return room

    def credit_room(self, own_blocks: int | None, headroom_blocks: int) -> int:
        """Blocks that a new credit may promise.

        Args:
            own_blocks: Held by own requests while others of them wait, but for what is
                computed ahead; None when none waits.
            headroom_blocks: To leave for the growth of what generates.
        """
        room = self._pool.available - self.reserved_blocks - headroom_blocks
        if own_blocks is not None:
            room -= max(0, self._floor_blocks - own_blocks)
        return min(room, self._reach_blocks - self.inbound_blocks - self.ahead_blocks)

    @property
    def _inbound_denied(self) -> bool:
        return any(request.denied for request in self.inbound.values())

    @property
    def reach_blocks(self) -> int:
        """N - M: the most that either X or Y may come to."""
        return self._reach_blocks

    def reserve(self, request: Request, blocks: int) -> None:
        """Set what a request's credit holds back."""
        self.reserved_blocks += blocks - request.reserved_blocks
        request.reserved_blocks = blocks

    def drop(self, request: Request) -> None:
        """The request is on neither side any more."""
        self.reserve(request, 0)
        self.inbound.pop(request.request_id, None)
        self.outbound.pop(request.request_id, None)
