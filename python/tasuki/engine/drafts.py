"""Prompt-lookup drafts: tokens that a sequence may go on with, guessed from its own tokens.

    tokens   .. a b c d e f .. a b c          the last three were there before
    draft                            d e f    what followed them then

A decoding row computes its last token and the draft in one step. The token of each position is
drawn as ever, by seed, choice and position; the draft counts as far as it is what was drawn, so
answers are those without drafts. What is rejected leaves KV behind that later tokens overwrite;
where logits of such a row are not finite, nothing of it counts or is left (`Legs.undraft`).

How long drafts are follows from measurements. Token j of a draft is accepted with probability
p^j, where p is the sequence's own. A step of n decoding rows takes base_s, and cost_s more for
each token drafted: that is worth p^j tokens if p^j > n cost_s / base_s. A sequence whose drafts
are rejected gets none, and tries again from time to time.

Owns what a drafted token costs; `SequenceState.acceptance` is written here alone. Engine
thread only. No torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.config import EngineConfig
from tasuki.engine.plan import Row, StepPlan
from tasuki.engine.request import ACCEPTANCE, Request, SequenceState

_MATCH_TOKENS = 3  # that must have been there before
_WEIGHT = 0.1  # of a draft's newest token in the sequence's acceptance
_COST_WEIGHT = 0.2  # of the newest step in what a drafted token costs
_RETURN = 0.01  # of the way back to the first guess, at each step without a draft that pays
_SURE = 0.99  # the most that an acceptance counts as


def lookup(tokens: array[int], count: int) -> list[int]:
    """What followed the last earlier occurrence of a sequence's last tokens.

    Args:
        tokens: Of the sequence, so far.
        count: How many to guess; what follows is taken to repeat itself where it is shorter.

    Returns:
        `count` tokens, or none.
    """
    if len(tokens) <= _MATCH_TOKENS:
        return []
    known = np.frombuffer(tokens, dtype=np.uint32)
    places = len(known) - _MATCH_TOKENS
    found = np.ones(places, dtype=bool)
    for index, token in enumerate(known[-_MATCH_TOKENS:]):
        found &= known[index : index + places] == token
    at = places - 1 - int(found[::-1].argmax())
    if not found[at]:
        return []
    following = tokens[at + _MATCH_TOKENS :].tolist()
    return (following * -(-count // len(following)))[:count]


def taken(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of a row's tokens count: the first, and one more for each accepted of its draft.

    Args:
        draft: Of the row.
        tokens: Drawn for it, in order of positions.
    """
    count = 1
    for guess, token in zip(draft, tokens[:-1], strict=False):
        if guess != token:
            break
        count += 1
    return count


def note(sequence: SequenceState, drafted: int, accepted: int) -> None:
    """Take into account how much of a sequence's draft was accepted."""
    p = sequence.acceptance
    for _ in range(accepted):
        p += _WEIGHT * (1.0 - p)
    if accepted < drafted:
        p -= _WEIGHT * p
    sequence.acceptance = p


def may_draft(request: Request) -> bool:
    """Whether its tokens can be drawn for several positions at once.

    Penalties and grammars need each token before the next one is drawn.
    """
    params = request.spec.sampling
    return (
        request.grammar is None
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
    )


class Drafter:
    """Adds drafts to the rows of steps that only decode.

    Args:
        config: `draft_tokens` and the limits.
        pool: The blocks.
        budget: Which of them may be taken.
    """

    def __init__(self, config: EngineConfig, pool: BlockPool, budget: Budget) -> None:
        self._config = config
        self._pool = pool
        self._budget = budget
        self._cost_s: float | None = None

    def extend(self, plan: StepPlan, base_s: float) -> None:
        """Give rows their drafts, and the drafts their blocks.

        Args:
            plan: Of rows that decode one token each.
            base_s: What it takes as it is; 0: unknown, and nothing is drafted.
        """
        if not base_s:
            return
        needed = len(plan.rows) * (self._cost_s or 0.0) / base_s
        left = self._config.max_batched_tokens - len(plan.rows)
        for row in plan.rows:
            sequence = row.sequence
            if not may_draft(sequence.request):
                continue
            worth = self._worth(sequence.acceptance, needed)
            if not worth:
                sequence.acceptance += _RETURN * (ACCEPTANCE - sequence.acceptance)
                continue
            last = min(self._config.max_model_len, sequence.request.max_length) - 1
            count = min(worth, left, last - row.start - 1)
            if count <= 0:
                continue
            draft = lookup(sequence.tokens, count)
            draft = draft[: self._room(row, len(draft))]
            row.draft, row.tokens = draft, 1 + len(draft)
            left -= len(draft)
            plan.draft_tokens += len(draft)
        if plan.draft_tokens:
            plan.rows.sort(key=lambda row: row.tokens > 1)  # the last one has a draft
            plan.num_decodes = sum(row.tokens == 1 for row in plan.rows)

    def learn(self, plan: StepPlan, duration_s: float, base_s: float) -> None:
        """Take into account what a step with drafts took.

        Args:
            plan: Of the step.
            duration_s: What it took.
            base_s: What it would have taken without drafts.
        """
        cost_s = max(0.0, duration_s - base_s) / plan.draft_tokens
        if self._cost_s is not None:
            cost_s = self._cost_s + _COST_WEIGHT * (cost_s - self._cost_s)
        self._cost_s = cost_s

    def _worth(self, p: float, needed: float) -> int:
        """How many tokens of a draft are worth their cost."""
        most = self._config.draft_tokens
        if needed >= 1.0 or p <= 0.0:
            return 0
        if needed <= 0.0:
            return most
        return min(most, int(math.log(needed) / math.log(min(p, _SURE))))

    def _room(self, row: Row, count: int) -> int:
        """Tokens of a draft that have a block, or get one that is free."""
        size, tables = self._config.block_size, row.sequence.tables
        while tables[0].end * size < row.end + count:
            if self._pool.available - self._budget.reserved_blocks < len(tables):
                return tables[0].end * size - row.end
            for table, page in zip(tables, self._pool.allocate(len(tables)), strict=True):
                table.pages.append(page)
        return count
