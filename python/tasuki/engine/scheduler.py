"""Which sequences run in the next step, and on which blocks.

Continuous batching: every sequence that decodes gets its token, prefill chunks
share what the token budget leaves (`step_size.py`). First come, first served, but that
long prompts leave half of it to short ones (`sharing.py`).

- All blocks of a prompt are taken at admission: a started prefill never stalls
  for memory. Growth happens in decode only.
- When growth finds no block, the youngest generating sequence gives way. A
  colocated one waits and is prefilled again as it stands; a pulled request
  goes back to the router. PREFILL legs are never preempted.

A step may be planned while the one before is in flight: its rows then go on from
tokens that nobody has seen yet. Such a plan preempts nobody; where it would
have to, there is none until the step in flight is over. Blocks that a launched
step may touch come back to the pool when the last such step has landed.

Owns the two queues and every sequence's blocks. Engine thread only. No torch.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator

from tasuki.engine.api import Leg
from tasuki.engine.block_hash import extend_hashes
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.config import EngineConfig
from tasuki.engine.plan import Row, StepPlan
from tasuki.engine.relief import Relief
from tasuki.engine.request import Request, SequenceState, Stage
from tasuki.engine.sharing import Shares
from tasuki.engine.stats import EngineCounters, StepRates
from tasuki.engine.step_size import step_tokens

# Every position of these chunks needs logits over the whole vocabulary.
_LOGPROB_CHUNK_TOKENS = 128


def _most_tokens(sequence: SequenceState) -> int:
    """Tokens of one chunk."""
    if sequence.request.prompt_logprobs is not None:
        return _LOGPROB_CHUNK_TOKENS
    return len(sequence.tokens)


def _age(sequence: SequenceState) -> tuple[int, int]:
    return sequence.request.arrival, sequence.choices[0]


class Scheduler:
    """Queues of waiting and running sequences, oldest first."""

    def __init__(
        self, config: EngineConfig, pool: BlockPool, budget: Budget, counters: EngineCounters
    ) -> None:
        self._config = config
        self._pool = pool
        self._budget = budget
        self._counters = counters
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._relief = Relief()
        self._launched = 0  # steps, ever
        self._landed = 0
        self._retired: deque[tuple[int, array[int]]] = deque()  # last step that may touch them

    # --- sequences come and go

    def enqueue(self, sequence: SequenceState) -> None:
        """Let a sequence wait for its prefill."""
        sequence.stage = Stage.WAITING
        insort(self.waiting, sequence, key=_age)

    def start_decode(self, sequence: SequenceState) -> None:
        """Let a sequence generate whose KV is there but for its last token."""
        sequence.stage = Stage.DECODE
        insort(self.running, sequence, key=_age)

    def fork(self, sequence: SequenceState, choice: int) -> SequenceState:
        """Another choice of a sequence; shares its blocks, belongs to no queue yet."""
        child = sequence.fork(choice)
        self._pool.retain(child.blocks)
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
        self._drop_blocks(sequence)

    def promote(self, sequence: SequenceState) -> None:
        """Let a sequence generate whose prompt was computed here."""
        self.running.remove(sequence)  # its place may be another one, with fewer choices
        self.start_decode(sequence)

    def settle(self, sequence: SequenceState, final: int) -> None:
        """The KV of its first `final` tokens is there: full blocks can be reused."""
        full = final // self._config.block_size
        if full > sequence.registered and self._config.prefix_caching:
            self._hash(sequence, full)
            for index in range(sequence.registered, full):
                self._pool.cache.insert(sequence.hashes[index], sequence.blocks[index])
            sequence.registered = full

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

    # --- one step

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
            tokens = step_tokens(self._config, rates, decodes, sum(lengths))
            wanted = max(tokens - decodes, self._config.block_size)
            shares = Shares(self._relief.prompt_tokens(self._launched, wanted), lengths)
            self._plan_prompts(shares, chunks, plan, now_s, admit=not preempted)
            if shares.left:
                shares.lift()
                self._extend_chunks(shares, chunks)
                self._plan_prompts(shares, chunks, plan, now_s, admit=not preempted)
        if chunks:
            plan.prefill_tokens = sum(row.tokens for row in chunks)
            plan.rows += [row for row in chunks if row.tokens == 1]
            decodes = len(plan.rows)
            plan.rows += [row for row in chunks if row.tokens > 1]
        plan.num_decodes = decodes
        if not plan.rows:
            self._pool.release(plan.sources)
        return plan

    def launched(self, plan: StepPlan) -> None:
        """A plan is on its way: its rows count as computed."""
        self._launched += 1
        if plan.sources:
            self._retired.append((self._launched, array("i", plan.sources)))
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

    def relieve(self, plan: StepPlan) -> list[Request]:
        """Make the next steps smaller than a plan, landed, that ran out of memory.

        Prompts' chunks are halved. Where there was none, the youngest sequence gives way,
        as if there were no block for it to grow.

        Returns:
            DECODE legs that gave way.
        """
        if plan.prefill_tokens:
            tokens = max(self._config.block_size, plan.prefill_tokens // 2)
            self._relief.begin(self._launched, tokens=tokens)
            return []
        candidates = [s for s in self.running if s.request.leg is not Leg.PREFILL]
        self._relief.begin(self._launched, rows=max(1, len(candidates) - 1))
        relief = StepPlan()
        if len(candidates) > 1:
            self._preempt(candidates[-1], relief)
        return relief.returned

    def retired(self) -> Iterator[array[int]]:
        """Blocks, one reference each, that wait for a launched step to land."""
        return (blocks for _, blocks in self._retired)

    def match(self, sequence: SequenceState, num_blocks: int) -> list[int]:
        """Cached blocks that the sequence begins with, at most `num_blocks`; not retained."""
        if not self._config.prefix_caching:
            return []
        self._hash(sequence, num_blocks)
        return self._pool.cache.match(sequence.hashes, num_blocks)

    def take_blocks(self, sequence: SequenceState, hits: list[int], total: int) -> None:
        """Give a sequence `total` blocks, of which `hits` are its cached beginning.

        The caller has checked that there is room.
        """
        self._pool.retain(hits)
        sequence.blocks = array("i", hits + self._pool.allocate(total - len(hits)))
        sequence.computed = len(hits) * self._config.block_size
        sequence.registered = len(hits)

    def _prompt_lengths(self) -> list[int]:
        """Tokens that each prompt has left to compute, but for those with none."""
        lengths = [len(s.tokens) - s.computed for s in self.running if s.stage is Stage.PREFILL]
        lengths += [len(sequence.tokens) for sequence in self.waiting]
        return [length for length in lengths if length]

    def _plan_decodes(self, plan: StepPlan, ahead: bool) -> bool | None:
        """Plan a token for every decoding sequence.

        Returns:
            Whether something was preempted; None, and nothing done, when that
            would be necessary but a step is in flight.
        """
        pool, block_size = self._pool, self._config.block_size
        max_model_len = self._config.max_model_len
        rows, growing = plan.rows, []
        for sequence in self.running:
            if sequence.stage is not Stage.DECODE:
                continue
            at = sequence.computed
            if at + 1 >= max_model_len or at + 1 >= sequence.request.max_length:
                continue  # the token on its way is its last
            rows.append(Row(sequence, 1, at, sequence.epoch))
            index, blocks = at // block_size, sequence.blocks
            if index == len(blocks) or pool.references(blocks[index]) > 1:
                growing.append(sequence)
        if not growing:
            return False
        if ahead and len(growing) > pool.available - self._budget.reserved_blocks:
            return None
        before = self._counters.preemptions
        copies: list[tuple[SequenceState, int, int]] = []
        copied: Counter[int] = Counter()
        unplaced = set()
        for sequence in growing:
            if sequence.stage is not Stage.DECODE:
                continue
            index, blocks = sequence.computed // block_size, sequence.blocks
            if index == len(blocks):
                if self._make_room(sequence, plan):
                    blocks.append(pool.allocate(1)[0])
                else:
                    unplaced.add(sequence)
                continue
            # Shared with a fork: copy on write, but for the last that holds it.
            source = blocks[index]
            if pool.references(source) - copied[source] == 1:
                continue
            if not self._make_room(sequence, plan):
                unplaced.add(sequence)
            elif pool.references(source) - copied[source] > 1:
                blocks[index] = pool.allocate(1)[0]
                copies.append((sequence, source, blocks[index]))
                copied[source] += 1
        preempted = self._counters.preemptions > before
        if preempted or unplaced:
            plan.rows = [row for row in rows if not row.void and row.sequence not in unplaced]
            copies = [copy for copy in copies if copy[0].stage is Stage.DECODE]
        plan.copies = [(source, target) for _, source, target in copies]
        plan.sources = list(copied.elements())
        return preempted

    def _make_room(self, sequence: SequenceState, plan: StepPlan) -> bool:
        """See to it that a decoding sequence can have one block; False: not in this step."""
        while self._pool.available <= self._budget.reserved_blocks:
            candidates = [s for s in self.running if s.request.leg is not Leg.PREFILL]
            victim = candidates[-1]
            if victim is sequence and len(candidates) == 1:
                # Nobody is left to give way: credits, which are revocable, come second.
                return self._pool.available > 0
            self._preempt(victim, plan)
            if sequence.stage is not Stage.DECODE:
                return False
        return True

    def _preempt(self, victim: SequenceState, plan: StepPlan) -> None:
        self._counters.preemptions += 1
        request = victim.request
        if request.leg is Leg.DECODE:
            for sequence in request.sequences:
                self.remove(sequence)
            plan.returned.append(request)
            return
        self.remove(victim)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self.enqueue(victim)

    def _plan_prompts(
        self, shares: Shares, chunks: list[Row], plan: StepPlan, now_s: float, *, admit: bool
    ) -> None:
        """Plan chunks of prompts that have none in this step: started ones, then new ones."""
        planned = {row.sequence for row in chunks}
        for sequence in self.running:
            if sequence.stage is Stage.PREFILL and sequence not in planned:
                self._chunk(sequence, shares, chunks)
        if self.waiting and admit:
            self._admit(shares, chunks, plan, now_s)

    def _admit(
        self,
        shares: Shares,
        chunks: list[Row],
        plan: StepPlan,
        now_s: float,
    ) -> None:
        """Start prefills, oldest first, while tokens and blocks last."""
        most = self._relief.rows(self._launched, self._config.max_running_requests)
        slots = most - self.num_generating
        headroom = self.num_decoding
        for sequence in self.waiting.copy():
            if shares.left <= 0:
                return
            if not shares.offer(len(sequence.tokens)):
                continue  # the long ones have had their half of this step
            request = sequence.request
            total = self._config.blocks_for(len(sequence.tokens))
            if request.leg is Leg.PREFILL:
                if total > self._budget.outbound_room:
                    continue  # waits for a peer; colocated work behind it does not
                if not request.credited and total > self._budget.ahead_room:
                    continue  # waits for its peer's credit
            elif len(sequence.choices) > slots:
                slots = 0  # nor may a later one overtake it
                continue
            reusable = (len(sequence.tokens) - 1) // self._config.block_size
            hits = [] if request.prompt_logprobs is not None else self.match(sequence, reusable)
            taken = total - len(hits) + self._pool.unreferenced(hits)
            if taken > self._budget.own_room - headroom:
                if not request.credited:
                    continue
                return
            self.waiting.remove(sequence)
            self.take_blocks(sequence, hits, total)
            sequence.stage = Stage.PREFILL
            insort(self.running, sequence, key=_age)
            self._note_admission(request, sequence, plan, now_s)
            if request.leg is not Leg.PREFILL:
                slots -= len(sequence.choices)
            self._chunk(sequence, shares, chunks)

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
        length = len(sequence.tokens) - sequence.computed
        tokens = min(shares.offer(length), _most_tokens(sequence))
        if tokens:
            shares.take(length, tokens)
            chunks.append(Row(sequence, tokens, sequence.computed, sequence.epoch))

    def _extend_chunks(self, shares: Shares, chunks: list[Row]) -> None:
        """Give what is left of the budget to chunks that were cut short, shortest first."""
        for row in sorted(chunks, key=lambda row: len(row.sequence.tokens) - row.end):
            rest = min(len(row.sequence.tokens), row.start + _most_tokens(row.sequence)) - row.end
            more = min(rest, shares.left)
            row.tokens += more
            shares.left -= more

    def _hash(self, sequence: SequenceState, num_blocks: int) -> None:
        if len(sequence.hashes) < num_blocks:
            extend_hashes(
                sequence.hashes,
                sequence.request.root,
                sequence.tokens,
                self._config.block_size,
                num_blocks,
            )

    def _drop_blocks(self, sequence: SequenceState) -> None:
        if sequence.flying:
            self._retired.append((self._launched, sequence.blocks))
        else:
            self._pool.release(sequence.blocks)
        sequence.blocks = array("i")
        sequence.computed = 0
        sequence.registered = 0
