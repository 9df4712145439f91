"""DECODE legs until they start: credit, blocks, quarantine.

The phases of such a leg: parked (no blocks), perhaps credited (room is held
back for it), assigned (transfers write to its blocks), then started or ended.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.api import Assignment, Leg
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.config import EngineConfig
from tasuki.engine.queues import Queues
from tasuki.engine.request import Phase, Request


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

    def prefix_hint(self, request: Request) -> int:
        """Blocks of the leg's context that are cached at this moment."""
        return len(self._match(request))

    def assign(self, request: Request) -> Assignment | None:
        """Give a parked leg the blocks of its context, or None when there is no room."""
        sequence = request.sequences[0]
        total = self._config.blocks_for(request.num_context_tokens)
        hits = self._match(request)
        taken = total - len(hits) + self._pool.unreferenced(hits)
        others = self._budget.reserved_blocks - request.reserved_blocks
        reach = self._budget.reach_blocks - self._budget.ahead_blocks
        reach -= self._budget.inbound_blocks - request.reserved_blocks
        if taken > self._pool.available - others or total > reach:
            return None
        self._budget.reserve(request, max(0, request.reserved_blocks - total))
        self._queues.take_blocks(sequence, hits, total)
        request.phase = Phase.ASSIGNED
        request.denied = False
        return Assignment(prefix_blocks=len(hits), blocks=tuple(sequence.blocks))

    def quarantine(self, request: Request, blocks: Sequence[int]) -> None:
        """Take blocks from an assigned leg that transfers may still write to."""
        sequence = request.sequences[0]
        leaving = set(blocks) & set(sequence.blocks)
        self._pool.quarantine(leaving)
        for block in leaving:
            sequence.blocks.remove(block)

    def unaccepted(self, request: Request) -> list[int]:
        """Blocks of an assigned leg that pulls may have written to: all but the cached prefix."""
        return [b for b in request.sequences[0].blocks if not self._pool.cache.holds(b)]

    def _match(self, request: Request) -> list[int]:
        full = request.num_context_tokens // self._config.block_size
        return self._queues.match(request.sequences[0], full)

    def _wanted_blocks(self, request: Request) -> int:
        """Blocks of the context, and for each choice those that its first output will fill.

        No more than one request of maximal length takes: so many are sure to become free.
        """
        context = request.num_context_tokens
        output = min(
            request.spec.sampling.max_tokens - len(request.spec.resumed_tokens),
            self._config.growth_headroom_tokens,
        )
        length = min(context + max(0, output), self._config.max_model_len)
        shared = context // self._config.block_size
        own = self._config.blocks_for(length) - shared
        wanted = shared + own * request.num_choices
        return min(max(wanted, self._config.blocks_for(context)), self._config.max_request_blocks)

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
                len(s.blocks) for s in self._queues.running if s.request.leg is Leg.COLOCATED
            )
        return self._budget.credit_room(own_blocks, self._queues.num_decoding)
