"""Which sequences run in the next step, and on which blocks.

Continuous batching: every sequence that decodes gets its token, prefill chunks
share what the token budget leaves (`step_size.py`). First come, first served, but that
long prompts leave half of it to short ones.

- All blocks of a prompt are taken at admission: a started prefill never stalls
  for memory. Growth happens in decode only.
- When growth finds no block, the youngest generating sequence gives way. A
  colocated one waits and is prefilled again as it stands; a pulled request
  goes back to the router. PREFILL legs are never preempted.

A step may be planned while the one before is in flight: its rows then go on from
tokens that nobody has seen yet. Such a plan preempts nobody; where it would
have to, there is none until the step in flight is over.

Works on the sequences of `queues.py`. Engine thread only. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tasuki.engine.api import Leg
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.cache_groups import BlockTable, pages_of
from tasuki.engine.config import EngineConfig
from tasuki.engine.drafts import Drafter
from tasuki.engine.plan import Row, StepPlan
from tasuki.engine.queues import Queues
from tasuki.engine.request import Request, SequenceState, Stage
from tasuki.engine.stats import EngineCounters, StepRates
from tasuki.engine.step_size import Relief, Shares, scored_tokens, step_tokens


def _is_scored(sequence: SequenceState) -> bool:
    """Whether every prompt token needs logits over the whole vocabulary."""
    return sequence.request.prompt_logprobs is not None


class Scheduler:
    """Plans steps over waiting and running sequences.

    Args:
        config: Sizes and limits.
        pool: The blocks.
        budget: Which of them may be taken for what.
        queues: The sequences.
        counters: Preemptions and cached tokens are counted here.

    Attributes:
        drafter: Of steps that only decode.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        budget: Budget,
        queues: Queues,
        counters: EngineCounters,
    ) -> None:
        self._config = config
        self._pool = pool
        self._budget = budget
        self._counters = counters
        self._queues = queues
        self._relief = Relief()
        self.drafter = Drafter(config, pool, budget)

    def plan(self, now_s: float, rates: StepRates, *, ahead: bool = False) -> StepPlan | None:
        """Choose the next step's work and give it its blocks.

        Args:
            now_s: The time.
            rates: What steps took so far: they bound this one's tokens.
            ahead: A step is in flight.

        Returns:
            A plan without rows means that nothing can run until something
            outside changes, or the step in flight has landed. None: it must
            land first, since somebody may have to give way.
        """
        plan = StepPlan()
        preempted = self._plan_decodes(plan, ahead)
        if preempted is None:
            return None
        decodes = len(plan.rows)
        chunks: list[Row] = []
        if lengths := self._prompt_lengths():
            tokens = step_tokens(self._config, rates, decodes, plan.kv_tokens, sum(lengths))
            wanted = max(tokens - decodes, self._config.block_size)
            wanted = self._relief.prompt_tokens(self._queues.steps, wanted)
            shares = Shares(wanted, lengths, scored_tokens(self._config, decodes))
            self._plan_prompts(shares, chunks, plan, now_s, admit=not preempted)
            if shares.left:
                shares.lift()
                self._extend_chunks(shares, chunks)
                self._plan_prompts(shares, chunks, plan, now_s, admit=not preempted)
        if chunks:
            plan.prefill_tokens = sum(row.tokens for row in chunks)
            plan.prefill_squares = sum(row.tokens * (row.start + row.end) for row in chunks)
            plan.rows += [row for row in chunks if row.tokens == 1]
            decodes = len(plan.rows)
            plan.rows += [row for row in chunks if row.tokens > 1]
        plan.num_decodes = decodes
        if self._config.draft_tokens and not chunks:
            self.drafter.extend(plan, rates.decode_s(decodes, plan.kv_tokens))
        if not plan.rows:
            self._pool.release(plan.sources)
        return plan

    def relieve(self, plan: StepPlan) -> list[Request]:
        """Make the next steps smaller than a plan, landed, that ran out of memory.

        Prompts' chunks are halved. Where there was none, the youngest sequence gives way,
        as if there were no block for it to grow.

        Returns:
            DECODE legs that gave way.
        """
        if plan.prefill_tokens:
            tokens = max(self._config.block_size, plan.prefill_tokens // 2)
            self._relief.begin(self._queues.steps, tokens=tokens)
            return []
        candidates = [s for s in self._queues.running if s.request.leg is not Leg.PREFILL]
        self._relief.begin(self._queues.steps, rows=max(1, len(candidates) - 1))
        relief = StepPlan()
        if len(candidates) > 1:
            self._preempt(candidates[-1], relief)
        return relief.returned

    def _prompt_lengths(self) -> list[int]:
        """Tokens that each prompt has left to compute, but for those with none."""
        lengths = [
            len(s.tokens) - s.computed for s in self._queues.running if s.stage is Stage.PREFILL
        ]
        lengths += [len(sequence.tokens) for sequence in self._queues.waiting]
        return [length for length in lengths if length]

    def _plan_decodes(self, plan: StepPlan, ahead: bool) -> bool | None:
        """Plan a token for every decoding sequence.

        Returns:
            Whether something was preempted; None, and nothing done, when that
            would be necessary but a step is in flight.
        """
        pool, block_size = self._pool, self._config.block_size
        max_model_len = self._config.max_model_len
        rows, growing, kv_tokens = plan.rows, [], 0
        for sequence in self._queues.running:
            if sequence.stage is not Stage.DECODE:
                continue
            at = sequence.computed
            if at + 1 >= max_model_len or at + 1 >= sequence.request.max_length:
                continue  # the token on its way is its last
            rows.append(Row(sequence, 1, at, sequence.epoch))
            kv_tokens += at
            table = sequence.tables[0]
            index = at // block_size - table.first
            if index == len(table.pages) or pool.references(table.pages[index]) > 1:
                growing.append(sequence)
        plan.kv_tokens = kv_tokens + len(rows)
        if not growing:
            return False
        groups = len(self._config.groups)
        if ahead and len(growing) * groups > pool.available - self._budget.reserved_blocks:
            return None
        before = self._counters.preemptions
        copies: list[tuple[SequenceState, int, int]] = []
        copied: Counter[int] = Counter()
        unplaced = set()
        for sequence in growing:
            if sequence.stage is not Stage.DECODE:
                continue
            index, tables = sequence.computed // block_size, sequence.tables
            if index == tables[0].end:
                if self._make_room(sequence, plan):
                    for table, page in zip(tables, pool.allocate(groups), strict=True):
                        table.pages.append(page)
                else:
                    unplaced.add(sequence)
                continue
            # Shared with a fork: copy on write, but for the last that holds it.
            if not self._shared(tables, index, copied):
                continue
            if not self._make_room(sequence, plan):
                unplaced.add(sequence)
                continue
            for table in self._shared(tables, index, copied):
                source = table.pages[index - table.first]
                target = table.pages[index - table.first] = pool.allocate(1)[0]
                copies.append((sequence, source, target))
                copied[source] += 1
        preempted = self._counters.preemptions > before
        if preempted or unplaced:
            plan.rows = [row for row in rows if not row.void and row.sequence not in unplaced]
            plan.kv_tokens = sum(row.end for row in plan.rows)
            copies = [copy for copy in copies if copy[0].stage is Stage.DECODE]
        plan.copies = [(source, target) for _, source, target in copies]
        plan.sources = list(copied.elements())
        return preempted

    def _shared(
        self, tables: Sequence[BlockTable], block: int, copied: Counter[int]
    ) -> list[BlockTable]:
        """The tables whose page of a block is another sequence's too, once `copied` are copied."""
        return [
            table
            for table in tables
            if self._pool.references(page := table.pages[block - table.first]) - copied[page] > 1
        ]

    def _make_room(self, sequence: SequenceState, plan: StepPlan) -> bool:
        """See to it that a decoding sequence can have one block; False: not in this step."""
        groups = len(self._config.groups)
        while self._pool.available - self._budget.reserved_blocks < groups:
            candidates = [s for s in self._queues.running if s.request.leg is not Leg.PREFILL]
            victim = candidates[-1]
            if victim is sequence and len(candidates) == 1:
                # Nobody is left to give way: credits, which are revocable, come second.
                return self._pool.available >= groups
            self._preempt(victim, plan)
            if sequence.stage is not Stage.DECODE:
                return False
        return True

    def _preempt(self, victim: SequenceState, plan: StepPlan) -> None:
        self._counters.preemptions += 1
        request = victim.request
        if request.leg is Leg.DECODE:
            for sequence in request.sequences:
                self._queues.remove(sequence)
            plan.returned.append(request)
            return
        self._queues.remove(victim)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self._queues.enqueue(victim)

    def _plan_prompts(
        self, shares: Shares, chunks: list[Row], plan: StepPlan, now_s: float, *, admit: bool
    ) -> None:
        """Plan chunks of prompts that have none in this step: started ones, then new ones."""
        planned = {row.sequence for row in chunks}
        for sequence in self._queues.running:
            if sequence.stage is Stage.PREFILL and sequence not in planned:
                self._chunk(sequence, shares, chunks)
        if self._queues.waiting and admit:
            self._admit(shares, chunks, plan, now_s)

    def _admit(
        self,
        shares: Shares,
        chunks: list[Row],
        plan: StepPlan,
        now_s: float,
    ) -> None:
        """Start prefills, oldest first, while tokens and blocks last."""
        slots, rooms = self._free_slots(), self._budget.rooms()
        headroom = self._queues.num_decoding * len(self._config.groups)
        for sequence in self._queues.waiting.copy():
            if shares.left <= 0:
                return
            if not shares.offer(len(sequence.tokens), scored=_is_scored(sequence)):
                continue  # the long or the scored ones have had their part of this step
            request = sequence.request
            total = self._config.pages_for(len(sequence.tokens))
            if request.leg is Leg.PREFILL:
                if total > rooms.outbound:
                    continue  # waits for a peer; colocated work behind it does not
                if not request.credited and total > rooms.ahead:
                    continue  # waits for its peer's credit
            elif len(sequence.choices) > slots:
                slots = 0  # nor may a later one overtake it
                continue
            reusable = (len(sequence.tokens) - 1) // self._config.block_size
            if request.prompt_logprobs is not None:
                reusable = 0
            tables = self._queues.match(sequence, reusable)
            cached, end = tables[0].end, self._config.blocks_for(len(sequence.tokens))
            taken = self._config.pages_between(cached, end)
            taken += self._pool.unreferenced(pages_of(tables))
            if taken > rooms.own - headroom:
                if not request.credited:
                    continue
                return
            self._queues.take_pages(sequence, cached, tables, end)
            self._queues.start_prefill(sequence)
            self._note_admission(request, sequence, plan, now_s)
            rooms = self._budget.rooms()
            if request.leg is not Leg.PREFILL:
                slots -= len(sequence.choices)
            self._chunk(sequence, shares, chunks)

    def _free_slots(self) -> int:
        """Sequences that may be started."""
        most = self._relief.rows(self._queues.steps, self._config.max_running_requests)
        if self._queues.num_generating:
            return most - self._queues.num_generating
        # Only launched steps end the relief: what waits for it on an idle worker waits for ever.
        own = (s for s in self._queues.waiting if s.request.leg is not Leg.PREFILL)
        return max(most, len(first.choices) if (first := next(own, None)) else 0)

    def _note_admission(
        self, request: Request, sequence: SequenceState, plan: StepPlan, now_s: float
    ) -> None:
        self._counters.prompt_tokens_cached += sequence.computed
        if request.cached_tokens is None:
            request.cached_tokens = min(sequence.computed, request.num_prompt_tokens)
        if request.scheduled_s is None:
            request.scheduled_s = now_s
        if request.leg is Leg.PREFILL:
            self._budget.outbound[request.request_id] = request
            plan.started.append(request.request_id)

    def _chunk(self, sequence: SequenceState, shares: Shares, chunks: list[Row]) -> None:
        """Plan the next chunk of a prefill, unless its last one is in flight."""
        length, scored = len(sequence.tokens) - sequence.computed, _is_scored(sequence)
        if tokens := shares.offer(length, scored=scored):
            shares.take(length, tokens, scored=scored)
            chunks.append(Row(sequence, tokens, sequence.computed, sequence.epoch))

    def _extend_chunks(self, shares: Shares, chunks: list[Row]) -> None:
        """Give what is left of the budget to chunks that were cut short, shortest first."""
        for row in sorted(chunks, key=lambda row: len(row.sequence.tokens) - row.end):
            rest, scored = len(row.sequence.tokens) - row.end, _is_scored(row.sequence)
            more = shares.offer(rest, scored=scored)
            shares.take(rest, more, scored=scored)
            row.tokens += more
