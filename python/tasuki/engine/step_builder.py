"""From a plan to header and slab: where the step's numbers are written, on the host only."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tasuki.engine.host_buffers import Staging, write_tables
from tasuki.engine.inputs import Places, Wanted, fill
from tasuki.engine.plan import StepPlan
from tasuki.engine.step_header import StepHeader


def build_step(
    plan: StepPlan, wanted: Wanted, bucket: int | None, staging: Staging, block_size: int
) -> StepHeader:
    """Write a plan's inputs to the next slab of `staging`.

    Args:
        plan: The step.
        wanted: Its logits.
        bucket: Rows to pad a decode batch to; None: as it is.
        staging: Its slab is the step's until the next one is taken.
        block_size: Tokens of a block.

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
        bucket=bucket,
    )
    count = len(plan.rows)
    *arrays, logits_rows = staging.take(*header.parts())
    places = Places.over(arrays, header.rows)
    write_tables(places.tables[:count], [row.sequence.blocks for row in plan.rows])
    ahead = fill(places, plan, block_size)
    if bucket is None:
        logits_rows[:] = wanted.rows
    else:
        pad(places, count)
    return replace(header, ahead=ahead)


def pad(places: Places, count: int) -> None:
    """Make all rows from `count` on padding."""
    places.tokens[count:] = 0
    places.sources[count:] = -1
    places.positions[count:] = 0
    places.slots[count:] = -1
    places.tables[count:] = np.int32(0)
