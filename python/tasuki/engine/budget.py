"""Who may take blocks: own work and inbound pulls, neither starved by the other.

    |<------------------------- num_blocks = N ------------------------->|
    | outbound X            | generating            | inbound Y          |
    | PREFILL legs, held    | colocated and pulled  | credited, assigned |
    | until a peer releases | sequences             | or quarantined     |

X and Y leave only when a peer acts; what generates ends, or can be preempted,
by itself. With M the blocks of one request of maximal length and N >= 2M:

- X <= N - M and Y <= N - M, always: two workers whose pools are full of blocks
  for one another still each have room for one more request of any length.
- While inbound legs are denied, own work leaves M - Y free for them; while own
  work waits, credits leave it what it lacks to M.

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
        self._reach_blocks = config.num_blocks - config.max_request_blocks
        self._floor_blocks = config.max_request_blocks
        self.inbound: dict[str, Request] = {}
        self.outbound: dict[str, Request] = {}
        self.reserved_blocks = 0

    @property
    def inbound_blocks(self) -> int:
        """Y: credited, assigned or quarantined."""
        assigned = sum(
            len(request.sequences[0].blocks)
            for request in self.inbound.values()
            if request.phase is Phase.ASSIGNED
        )
        return self.reserved_blocks + assigned + self._pool.num_quarantined

    @property
    def outbound_blocks(self) -> int:
        """X: held by PREFILL legs."""
        return sum(
            len(sequence.blocks)
            for request in self.outbound.values()
            for sequence in request.sequences
        )

    @property
    def outbound_room(self) -> int:
        """Blocks that further PREFILL legs may hold."""
        return self._reach_blocks - self.outbound_blocks

    @property
    def own_room(self) -> int:
        """Blocks that own work may take now at admission."""
        room = self._pool.available - self.reserved_blocks
        if any(request.denied for request in self.inbound.values()):
            room -= max(0, self._floor_blocks - self.inbound_blocks)
        return room

    def credit_room(self, own_blocks: int | None, headroom_blocks: int) -> int:
        """Blocks that a new credit may promise.

        Args:
            own_blocks: Held by own requests while others of them wait; None when none waits.
            headroom_blocks: To leave for the growth of what generates.
        """
        room = self._pool.available - self.reserved_blocks - headroom_blocks
        if own_blocks is not None:
            room -= max(0, self._floor_blocks - own_blocks)
        return min(room, self._reach_blocks - self.inbound_blocks)

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
