"""From a plan to header and slab: where the step's numbers are written, on the host only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tasuki.engine.plan import StepPlan
from tasuki.execution.host_buffers import Staging, write_tables
from tasuki.execution.inputs import Places, Wanted, fill
from tasuki.execution.step_header import StepHeader


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
