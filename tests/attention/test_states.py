"""States go from page to page as block tables and cuts say, and only when a step succeeds."""

from __future__ import annotations

import pytest
import torch

from tasuki.attention.batch import Batch
from tasuki.attention.states import StatePart, StepStates, state_bytes
from tasuki.engine.cache_groups import CacheGroup

BLOCK = 4
PARTS = [StatePart((3, 1), torch.bfloat16), StatePart((2, 2), torch.float32)]
SIZE = state_bytes(PARTS)
GROUPS = (CacheGroup((1,)), CacheGroup((0, 2), state_bytes=SIZE))


def batch(tables: list[list[int]], starts: list[int], cuts: list[list[int]]) -> Batch:
    counts = [each[-1] for each in cuts]
    total = sum(counts)
    slots = [
        tables[row][at // BLOCK] * BLOCK + at % BLOCK
        for row, start in enumerate(starts)
        for at in range(start, start + counts[row])
    ]
    pages = torch.tensor(tables, dtype=torch.int32)
    return Batch(
        tokens=torch.arange(total),
        positions=torch.arange(total),
        slots=torch.tensor(slots),
        block_tables=pages,
        query_lens=counts,
        context_lens=[a + b for a, b in zip(starts, counts, strict=True)],
        logits_rows=torch.arange(total),
        num_decodes=sum(count == 1 for count in counts),
        more_groups=((torch.tensor(slots), pages + 10),),
        cuts=cuts,
    )


def states(pool: torch.Tensor) -> StepStates:
    return StepStates(pool, GROUPS, {0: PARTS, 2: PARTS}, BLOCK)


def advance(all_states: StepStates, layer: int) -> list[list[float]]:
    """Adds the tokens' count to every element; returns what each run began with."""
    began = []
    for run in all_states.runs:
        state = all_states.begin(layer, run)
        began.append(state[1][:, 0, 0].tolist())
        length = (run.tokens.stop - run.tokens.start) // run.rows
        assert [tuple(part.shape[1:]) for part in state] == [(3, 1), (2, 2)]
        all_states.keep(layer, run, [part + length * (layer + 1) for part in state])
    return began


def test_states_follow_the_tables() -> None:
    pool = torch.zeros(20, 2 * SIZE, dtype=torch.uint8)
    every = states(pool)
    # A chunk of ten tokens whose blocks 0 and 1 have page 11, and block 2 page 12.
    every.plan(batch([[1, 1, 2]], [0], [[8, 10]]))
    assert [advance(every, layer) for layer in (0, 2)] == [[[0.0], [8.0]], [[0.0], [24.0]]]
    assert not pool.any(), "nothing is written before the step has succeeded"
    every.commit()
    # Then a token of it beside the first one of another sequence.
    every.plan(batch([[1, 1, 2], [3, 3, 3]], [10, 0], [[1], [1]]))
    assert advance(every, 0) == [[10.0, 0.0]]
    every.plan(batch([[1, 1, 2]], [10], [[1]]))  # the step raised: it is computed again
    assert advance(every, 0) == [[10.0]]
    every.commit()
    every.plan(batch([[1, 1, 2], [1, 1, 4]], [11, 8], [[1], [1]]))  # another from the checkpoint
    assert advance(every, 0) == [[11.0, 8.0]]
    assert advance(every, 2) == [[30.0, 24.0]]


def test_a_page_that_gets_kv_has_no_state_left_in_it() -> None:
    """Bits of a float32 may be a bfloat16's NaN, and what is masked is multiplied by 0."""
    pool = torch.full((20, 2 * SIZE // 2), float("nan"), dtype=torch.bfloat16)
    every = states(pool)
    every.clear_new_pages(batch([[1, 2, 3]], [3], [[6]]))
    assert [page for page in range(20) if not pool[page].isnan().any()] == [2, 3]
    assert not pool[2:4].any()


def test_a_step_without_cuts_is_a_defect() -> None:
    step = batch([[1]], [0], [[3]])
    step.cuts = None
    with pytest.raises(AssertionError, match="no cuts"):
        states(torch.zeros(20, 2 * SIZE, dtype=torch.uint8)).plan(step)
