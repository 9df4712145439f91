"""From a plan to what a model reads: a step's header, and the arrays of its slab. On the host only.

Decoding rows, which are most, go through whole arrays at a time; chunks, which
are few, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.engine.api import Leg
from tasuki.engine.plan import Draw, Row, StepPlan
from tasuki.engine.request import SequenceState
from tasuki.execution.step_arrays import Staging, StepHeader, write_tables


@dataclass(slots=True)
class Wanted:
    """Which logits a plan needs, and what for.

    Attributes:
        rows: Of the batch's tokens, in order.
        draws: Tokens to sample; `draw_rows` are theirs, as indices into `rows`.
        kept: Draws whose token the next step may start from, before it is
            known; `SequenceState.drawn` is its index here.
        scored: Sequences that want log-probabilities of prompt tokens: first
            index into `rows`, and the prompt tokens predicted from there on.
        constrained: Draws of requests with a grammar.
        decodes: Every row is one token with one draw.
        greedy: The likeliest token of each row is all that is needed.
    """

    rows: Sequence[int] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    draw_rows: Sequence[int] = field(default_factory=list)
    kept: Sequence[int] = field(default_factory=list)
    scored: list[tuple[SequenceState, int, list[int]]] = field(default_factory=list)
    constrained: Sequence[int] = ()
    decodes: bool = False
    greedy: bool = False


def wanted_logits(plan: StepPlan) -> Wanted:
    """The rows to compute logits for: ends of sequences, and scored prompt tokens."""
    rows: list[int] = []
    draw_rows: list[int] = []
    kept: list[int] = []
    draws: list[Draw] = []
    wanted = Wanted(rows, draws, draw_rows, kept)
    begin = 0
    for row in plan.rows:
        sequence, first = row.sequence, row.start
        end = first + row.tokens
        request = sequence.request
        if request.prompt_logprobs is not None:
            last = min(end, request.num_prompt_tokens - 1)
            if last > first:
                scored = list(sequence.tokens[first + 1 : last + 1])
                wanted.scored.append((sequence, len(rows), scored))
                rows.extend(range(begin, begin + last - first))
        if row.draft:
            position, choice = first + 1 - request.num_prompt_tokens, sequence.choices[0]
            for index in range(row.tokens):
                draws.append(Draw(sequence, choice, position + index, drafted=True))
                draw_rows.append(len(rows))
                rows.append(begin + index)
        elif end >= len(sequence.tokens):
            position = end - request.num_prompt_tokens
            choices = sequence.choices
            if len(choices) == 1 and request.spec.leg is not Leg.PREFILL:
                kept.append(len(draws))
            for choice in choices:
                draws.append(Draw(sequence, choice, position))
                draw_rows.append(len(rows))
            rows.append(begin + row.tokens - 1)
        begin += row.tokens
    count = len(plan.rows)
    wanted.decodes = plan.num_decodes == count == len(kept) == len(rows) == len(draws)
    wanted.greedy = not wanted.scored and all(draw.sequence.request.plain for draw in draws)
    if not wanted.greedy:
        wanted.constrained = [
            index for index, draw in enumerate(draws) if draw.sequence.request.grammar is not None
        ]
    return wanted


@dataclass(slots=True)
class Places:
    """Arrays of a step to be filled, all int64 but the tables.

    Attributes:
        tokens: [T]; 0 where `sources` says another thing.
        sources: [T]; which of the step's tokens in flight it is; -1: `tokens` has it.
        positions: [T].
        slots: [G, T], for each cache group.
        tables: [G, S, W] int32.
    """

    tokens: NDArray[Any]
    sources: NDArray[Any]
    positions: NDArray[Any]
    slots: NDArray[Any]
    tables: NDArray[Any]

    @classmethod
    def over(cls, arrays: Sequence[NDArray[Any]], rows: int) -> Places:
        """Over arrays in this order, slots and tables flat, the tables of so many sequences."""
        tokens, sources, positions, slots, tables = arrays
        groups = len(slots) // len(tokens)
        tables = tables.reshape(groups, rows, -1)
        return cls(tokens, sources, positions, slots.reshape(groups, -1), tables)


def fill(places: Places, plan: StepPlan, block_size: int) -> bool:
    """Write a plan's inputs, but for `tables`, which must be filled already.

    Returns:
        Whether any token is one in flight.
    """
    singles = plan.num_decodes
    ahead = fill_singles(places, plan.rows[:singles], block_size) if singles else False
    begin = singles
    for index, row in enumerate(plan.rows[singles:], singles):
        sequence, first, count = row.sequence, row.start, row.tokens
        end = begin + count
        known = np.frombuffer(sequence.tokens, dtype=np.uint32)[first:][:count]
        places.tokens[begin : begin + len(known)] = known
        places.tokens[begin + len(known) : end] = row.draft
        places.sources[begin:end] = -1
        at = np.arange(first, first + count)
        places.positions[begin:end] = at
        blocks = places.tables[:, index].astype(np.int64)
        places.slots[:, begin:end] = blocks[:, at // block_size] * block_size + at % block_size
        begin = end
    return ahead


def fill_singles(places: Places, rows: Sequence[Row], block_size: int) -> bool:
    """Write the first `len(rows)` tokens' inputs; as `fill`."""
    count = len(rows)
    starts = [row.start for row in rows]
    known = [len(row.sequence.tokens) for row in rows]
    places.tokens[:count] = [
        row.sequence.tokens[start] if start < length else 0
        for row, start, length in zip(rows, starts, known, strict=True)
    ]
    ahead = any(map(int.__ge__, starts, known))
    places.sources[:count] = (
        [
            -1 if start < length else row.sequence.drawn
            for row, start, length in zip(rows, starts, known, strict=True)
        ]
        if ahead
        else -1
    )
    at = np.array(starts)
    places.positions[:count] = at
    blocks = places.tables[:, np.arange(count), at // block_size].astype(np.int64)
    places.slots[:, :count] = blocks * block_size + at % block_size
    return ahead


def build_step(
    plan: StepPlan,
    wanted: Wanted,
    padded: Callable[[StepHeader, bool], StepHeader],
    staging: Staging,
    block_size: int,
    groups: int,
) -> StepHeader:
    """Write a plan's inputs to the next slab of `staging`.

    Args:
        plan: The step.
        wanted: Its logits.
        padded: Gives the step the bucket or room that it runs in (`Executor.padded`).
        staging: Its slab is the step's until the next one is taken.
        block_size: Tokens of a block.
        groups: Cache groups.

    Returns:
        What the slab holds.
    """
    contexts = [row.end for row in plan.rows]
    header = StepHeader(
        query_lens=[row.tokens for row in plan.rows],
        context_lens=contexts,
        num_decodes=plan.num_decodes,
        width=-(-max(contexts) // block_size),
        wanted=len(wanted.rows),
        greedy=wanted.greedy,
        groups=groups,
        cuts=cuts_of(plan, block_size),
    )
    tokens = header.tokens
    header = padded(header, wanted.decodes)
    count = len(plan.rows)
    *arrays, logits_rows = staging.take(*header.parts())
    places = Places.over(arrays, header.rows)
    for group in range(groups):
        tables = [row.sequence.tables[group] for row in plan.rows]
        write_tables(places.tables[group, :count], tables)
    ahead = fill(places, plan, block_size)
    pad(places, tokens)
    if header.bucket is None:
        logits_rows[:] = wanted.rows
    return replace(header, ahead=ahead)


def cuts_of(plan: StepPlan, block_size: int) -> list[list[int]] | None:
    """After how many of its tokens each row's state goes to a page (`Batch.cuts`).

    That is where a block with a page of its own ends, and at the row's end.
    """
    index = next((i for i, t in enumerate(plan.rows[0].sequence.tables) if t.repeats), None)
    if index is None:
        return None
    cuts = []
    for row in plan.rows:
        table = row.sequence.tables[index]
        blocks = range(row.start // block_size, (row.end - 1) // block_size)
        ends = [(block + 1) * block_size - row.start for block in blocks if table.owns(block)]
        cuts.append([*ends, row.tokens])
    return cuts


def pad(places: Places, count: int) -> None:
    """Make all tokens from `count` on padding, and the tables that decodes among them have."""
    places.tokens[count:] = 0
    places.sources[count:] = -1
    places.positions[count:] = 0
    places.slots[:, count:] = -1
    places.tables[:, count:] = np.int32(0)
