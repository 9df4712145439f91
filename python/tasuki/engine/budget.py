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

`Budget` keeps the accounts. `Inbound` gives a DECODE leg its room until it starts. The phases of
such a leg: parked (no blocks), perhaps credited (room is held back for it), assigned (transfers
write to its blocks), then started or ended. Engine thread only. No torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.engine.api import Assignment, GroupBlocks, Leg
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.cache_groups import BlockTable, pages_of
from tasuki.engine.config import EngineConfig
from tasuki.engine.queues import Queues
from tasuki.engine.request import Phase, Request


@dataclass(frozen=True, slots=True)
class Rooms:
    """Blocks that may be taken now.

    Attributes:
        outbound: By further PREFILL legs.
        ahead: By further PREFILL legs without credit.
        own: By own work.
    """

    outbound: int
    ahead: int
    own: int


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

    def rooms(self) -> Rooms:
        """What may be taken at admission; looks at every leg that a peer has a part in."""
        ahead, denied = self.ahead_blocks, self._inbound_denied
        free = self._pool.available - self.reserved_blocks
        ahead_room = min(
            self._reach_blocks - self._floor_blocks - ahead,
            self._reach_blocks - self.inbound_blocks - ahead,
            free - self._half_blocks,
        )
        kept = max(0, self._floor_blocks - self.inbound_blocks) if denied else 0
        return Rooms(
            outbound=self._reach_blocks - self.outbound_blocks,
            ahead=0 if denied else ahead_room,
            own=free - kept,
        )

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


class Inbound:
    """Room for DECODE legs, kept in the budget."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, budget: Budget, queues: Queues
    ) -> None:
        self._config = config
        self._pool = pool
        self._budget = budget
        self._queues = queues

    def may_credit(self, request: Request) -> bool:
        """Reserve room for the leg's blocks and some growth, if there is any."""
        if request.phase is not Phase.PARKED:
            return False
        if not request.credited:
            wanted = self._wanted_blocks(request)
            if self._slots() < request.num_choices:
                return False
            if wanted > self._credit_room():
                request.denied = True
                return False
            self._budget.reserve(request, wanted)
            request.credited = True
            request.denied = False
        return True

    def assign(self, request: Request) -> Assignment | None:
        """Give a parked leg the blocks of its context, or None when there is no room."""
        config, sequence, tokens = self._config, request.sequences[0], request.num_context_tokens
        tables = self._match(request)
        cached, total = tables[0].end, config.pages_kept(tokens)
        for table, first in zip(tables, config.first_blocks(tokens), strict=True):
            table.drop_before(first)
        taken = total - sum(len(table.pages) for table in tables)
        taken += self._pool.unreferenced(pages_of(tables))
        others = self._budget.reserved_blocks - request.reserved_blocks
        reach = self._budget.reach_blocks - self._budget.ahead_blocks
        reach -= self._budget.inbound_blocks - request.reserved_blocks
        if taken > self._pool.available - others or total > reach:
            return None
        self._budget.reserve(request, max(0, request.reserved_blocks - total))
        self._queues.take_pages(sequence, cached, tables, config.blocks_for(tokens))
        request.phase = Phase.ASSIGNED
        request.denied = False
        size = config.block_size
        return Assignment(
            block_size=size,
            tokens=tokens,
            prefix_tokens=cached * size,
            parts=[
                GroupBlocks(
                    group,
                    table.first * size,
                    tuple(table.pages),
                    config.groups[group].first_needed(tokens),
                )
                for group, table in enumerate(tables)
            ],
        )

    def quarantine(self, request: Request, blocks: Sequence[int]) -> None:
        """Take blocks from an assigned leg that transfers may still write to."""
        sequence = request.sequences[0]
        leaving = set(blocks) & set(sequence.pages)
        self._pool.quarantine(leaving)
        for table in sequence.tables:
            table.pages = array("i", (page for page in table.pages if page not in leaving))

    def unaccepted(self, request: Request) -> list[int]:
        """Blocks of an assigned leg that pulls may have written to: all but the cached prefix.

        A block that others hold too is of the prefix, also after the cache was emptied.
        """
        pool = self._pool
        return [
            block
            for block in request.sequences[0].pages
            if pool.references(block) == 1 and not pool.cache.holds(block)
        ]

    def _match(self, request: Request) -> list[BlockTable]:
        full = request.num_context_tokens // self._config.block_size
        return self._queues.match(request.sequences[0], full)

    def _wanted_blocks(self, request: Request) -> int:
        """Pages of the context, and for each choice those that its first output will fill.

        No more than one request of maximal length takes: so many are sure to become free.
        """
        context = request.num_context_tokens
        output = min(
            request.spec.sampling.max_tokens - len(request.spec.resumed_tokens),
            self._config.growth_headroom_tokens,
        )
        length = min(context + max(0, output), self._config.max_model_len)
        config = self._config
        full, groups = context // config.block_size, len(config.groups)
        shared = full * groups - sum(config.first_blocks(context))
        own = (config.blocks_for(length) - full) * groups
        wanted = shared + own * request.num_choices
        return min(max(wanted, config.pages_kept(context)), config.max_request_blocks)

    def _slots(self) -> int:
        """Further choices that pulled requests may generate."""
        taken = sum(
            request.num_choices
            for request in self._budget.inbound.values()
            if request.credited or request.phase is Phase.ASSIGNED
        )
        taken += sum(s.request.leg is Leg.DECODE for s in self._queues.running)
        return self._config.max_running_requests - taken

    def _credit_room(self) -> int:
        own_blocks = None
        if any(s.request.credited for s in self._queues.waiting):
            own_blocks = self._budget.outbound_blocks - self._budget.ahead_blocks
            own_blocks += sum(
                s.num_pages for s in self._queues.running if s.request.leg is Leg.COLOCATED
            )
        growth = self._queues.num_decoding * len(self._config.groups)
        return self._budget.credit_room(own_blocks, growth)
