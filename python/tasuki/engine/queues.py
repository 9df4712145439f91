"""The sequences that wait or run, and the life of their blocks.

    waiting ──admitted──▶ running ──▶ stopped ──▶ blocks back to the pool
       ▲                     │
       └──── preempted ──────┘

Blocks that a launched step may touch come back to the pool when the last such step has
landed; until then they are *retired*.

Owns the two queues and every sequence's blocks; `scheduler.py` chooses from them what runs
next. Engine thread only. No torch.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterator

from tasuki.engine.api import Leg
from tasuki.engine.block_hash import extend_hashes
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.cache_groups import BlockTable
from tasuki.engine.config import EngineConfig
from tasuki.engine.plan import StepPlan
from tasuki.engine.prefix_cache import cached_tables, content_key
from tasuki.engine.request import SequenceState, Stage


class Queues:
    """Waiting and running sequences, oldest first.

    Attributes:
        waiting: Sequences without blocks; their prompts are computed when there is room.
        running: Sequences with blocks that compute their prompt or generate.
        steps: How many steps were launched, ever.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.steps = 0
        self._landed = 0
        self._retired: deque[tuple[int, array[int]]] = deque()  # last step that may touch them

    def enqueue(self, sequence: SequenceState) -> None:
        """Let a sequence wait for its prefill."""
        sequence.stage = Stage.WAITING
        insort(self.waiting, sequence, key=_age)

    def start_prefill(self, sequence: SequenceState) -> None:
        """Let a waiting sequence that got its blocks compute its prompt."""
        self.waiting.remove(sequence)
        sequence.stage = Stage.PREFILL
        insort(self.running, sequence, key=_age)

    def start_decode(self, sequence: SequenceState) -> None:
        """Let a sequence generate whose KV is there but for its last token."""
        sequence.stage = Stage.DECODE
        insort(self.running, sequence, key=_age)

    def fork(self, sequence: SequenceState, choice: int) -> SequenceState:
        """Another choice of a sequence; shares its blocks, belongs to no queue yet."""
        child = sequence.fork(choice)
        self._pool.retain(child.pages)
        sequence.request.sequences.append(child)
        return child

    def stop(self, sequence: SequenceState) -> None:
        """Compute nothing more of it, and let what is launched be void; it keeps its blocks."""
        sequence.epoch += 1
        if sequence.stage is Stage.WAITING:
            self.waiting.remove(sequence)
        elif sequence.stage is not Stage.IDLE:
            self.running.remove(sequence)
        sequence.stage = Stage.IDLE

    def remove(self, sequence: SequenceState) -> None:
        """Stop it and drop its blocks."""
        self.stop(sequence)
        self._drop_pages(sequence)

    def promote(self, sequence: SequenceState) -> None:
        """Let a sequence generate whose prompt was computed here."""
        self.running.remove(sequence)  # its place may be another one, with fewer choices
        self.start_decode(sequence)

    def settle(self, sequence: SequenceState, final: int) -> None:
        """The KV of its first `final` tokens is there.

        Full blocks can be reused. Those that have left the window are given up.
        """
        full = final // self._config.block_size
        if full > sequence.registered and self._config.prefix_caching:
            self._hash(sequence, full)
            for group, table in enumerate(sequence.tables):
                self._register(sequence, group, table, full)
            sequence.registered = full
        if self._config.slides:
            self._slide(sequence, final)

    @property
    def num_generating(self) -> int:
        """Sequences that generate or will: all running ones but PREFILL legs'."""
        return sum(
            len(sequence.choices)
            for sequence in self.running
            if sequence.request.leg is not Leg.PREFILL
        )

    @property
    def has_prompts(self) -> bool:
        """Whether the next step may compute parts of prompts."""
        return bool(self.waiting) or any(s.stage is Stage.PREFILL for s in self.running)

    @property
    def num_decoding(self) -> int:
        """Sequences that may need a block at any step."""
        return sum(sequence.stage is Stage.DECODE for sequence in self.running)

    def launched(self, plan: StepPlan) -> None:
        """A plan is on its way: its rows count as computed."""
        self.steps += 1
        if plan.sources:
            self._retired.append((self.steps, array("i", plan.sources)))
        for row in plan.rows:
            sequence = row.sequence
            sequence.computed = row.start + row.tokens
            sequence.flying += 1
            if (
                sequence.stage is Stage.PREFILL
                and sequence.computed == len(sequence.tokens)
                and len(sequence.choices) == 1
                and sequence.request.leg is not Leg.PREFILL
            ):
                sequence.stage = Stage.DECODE

    def landed(self, plan: StepPlan) -> None:
        """The oldest launched plan has ended; blocks that only it could touch are free."""
        self._landed += 1
        for row in plan.rows:
            row.sequence.flying -= 1
        while self._retired and self._retired[0][0] <= self._landed:
            self._pool.release(self._retired.popleft()[1])

    def retired(self) -> Iterator[array[int]]:
        """Blocks, one reference each, that wait for a launched step to land."""
        return (blocks for _, blocks in self._retired)

    def match(self, sequence: SequenceState, num_blocks: int) -> list[BlockTable]:
        """Tables of the cached prefix, at most `num_blocks` blocks; not retained."""
        config = self._config
        if not config.prefix_caching:
            num_blocks = 0
        self._hash(sequence, num_blocks)
        hashes = sequence.hashes[:num_blocks]
        return cached_tables(self._pool.cache, hashes, config.groups, config.block_size)

    def take_pages(
        self, sequence: SequenceState, cached: int, tables: list[BlockTable], end: int
    ) -> None:
        """Give a sequence its pages, for each group those of the blocks from its table on.

        The caller has checked that there is room.

        Args:
            sequence: Has none.
            cached: Blocks of its cached prefix.
            tables: The pages that hold it, as far as a group needs them; filled here.
            end: The block after its last.
        """
        for table in tables:
            self._pool.retain(table.pages)
        for group, table in zip(self._config.groups, tables, strict=True):
            table.fill(group, self._pool.allocate(group.num_pages(table.end, end)), end)
        sequence.tables = tables
        sequence.computed = cached * self._config.block_size
        sequence.registered = cached

    def _hash(self, sequence: SequenceState, num_blocks: int) -> None:
        if len(sequence.hashes) < num_blocks:
            extend_hashes(
                sequence.hashes,
                sequence.request.root,
                sequence.tokens,
                self._config.block_size,
                num_blocks,
            )

    def _register(self, sequence: SequenceState, group: int, table: BlockTable, full: int) -> None:
        """Offer a table's pages that became full to the prefix cache."""
        cache, hashes, chunk = self._pool.cache, sequence.hashes, self._config.chunk_blocks
        begin = max(sequence.registered, table.first, sequence.unshared.get(group, -1) + 1)
        for index, page in enumerate(table.part(begin, full), begin):
            if table.repeats and not table.owns(index):
                continue
            ends_chunk = group == 0 and (index + 1) % chunk == 0
            cache.insert(content_key(hashes[index], group), page, ends_chunk=ends_chunk)

    def _slide(self, sequence: SequenceState, final: int) -> None:
        """Give up the pages that no token after the first `final` ones reads."""
        first_blocks = self._config.first_blocks(final)
        for table, first in zip(sequence.tables, first_blocks, strict=False):
            if first > table.first:
                self._give_up(sequence, table.drop_before(first))

    def _give_up(self, sequence: SequenceState, pages: array[int]) -> None:
        if sequence.flying:
            self._retired.append((self.steps, pages))
        else:
            self._pool.release(pages)

    def _drop_pages(self, sequence: SequenceState) -> None:
        self._give_up(sequence, sequence.pages)
        sequence.tables = []
        sequence.computed = 0
        sequence.registered = 0
        sequence.unshared = {}


def _age(sequence: SequenceState) -> tuple[tuple[float, int], int]:
    return sequence.request.arrival, sequence.choices[0]
