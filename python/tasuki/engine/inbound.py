"""DECODE legs until they start: credit, blocks, quarantine.

The phases of such a leg: parked (no blocks), perhaps credited (room is held
back for it), assigned (transfers write to its blocks), then started or ended.
Engine thread only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tasuki.engine.api import Assignment, GroupBlocks, Leg
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.cache_groups import BlockTable, pages_of
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
        """Tokens of the leg's context that are cached at this moment."""
        return self._match(request)[0].end * self._config.block_size

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
        """Blocks of an assigned leg that pulls may have written to: all but the cached prefix."""
        return [b for b in request.sequences[0].pages if not self._pool.cache.holds(b)]

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
