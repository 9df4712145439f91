"""The backend against attention written as the definition says, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tasuki.attention.sdpa import SdpaAttention
from tasuki.engine.batch import Batch

BLOCK_SIZE, NUM_BLOCKS, LAYERS, HEAD_DIM = 4, 64, 3, 8


@dataclass
class Case:
    """A pool with the past of some sequences in it, and what their next step brings."""

    pool: torch.Tensor
    batch: Batch
    keys: list[torch.Tensor]  # [context, kv_heads, head_dim] of each sequence, new ones included
    values: list[torch.Tensor]


def make_case(
    layer: int, kv_heads: int, lengths: list[tuple[int, int]], *, garbage: float = 0.0
) -> Case:
    """Sequences of (context before, new tokens), in blocks taken at random."""
    draw = random.Random(3)
    generator = torch.Generator().manual_seed(4)
    pool = torch.full((NUM_BLOCKS, kv_heads, LAYERS, 2, BLOCK_SIZE, HEAD_DIM), garbage)
    free = list(range(NUM_BLOCKS))
    draw.shuffle(free)
    keys, values, slots, tables, positions = [], [], [], [], []
    for before, new in lengths:
        total = before + new
        blocks = [free.pop() for _ in range(-(-total // BLOCK_SIZE))]
        k, v = torch.randn(2, total, kv_heads, HEAD_DIM, generator=generator)
        for position in range(total):
            block, offset = blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
            if position < before:
                pool[block, :, layer, 0, offset] = k[position]
                pool[block, :, layer, 1, offset] = v[position]
            else:
                slots.append(block * BLOCK_SIZE + offset)
                positions.append(position)
        keys.append(k)
        values.append(v)
        tables.append(blocks)
    width = max(map(len, tables))
    batch = Batch(
        tokens=torch.zeros(len(slots), dtype=torch.int64),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        block_tables=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        query_lens=[new for _, new in lengths],
        context_lens=[before + new for before, new in lengths],
        logits_rows=torch.arange(len(slots)),
        num_decodes=sum(1 for _, new in lengths if new == 1),
    )
    return Case(pool, batch, keys, values)


def definition(case: Case, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """[T, heads, head_dim], one query and one head at a time."""
    result, row = torch.zeros_like(query, dtype=torch.float64), 0
    share = query.shape[1] // case.keys[0].shape[1]
    for i, new in enumerate(case.batch.query_lens):
        context = case.batch.context_lens[i]
        for position in range(context - new, context):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(query.shape[1]):
                k = case.keys[i][first : position + 1, head // share].double()
                v = case.values[i][first : position + 1, head // share].double()
                weights = torch.softmax(k @ query[row, head].double() * scale, 0)
                result[row, head] = weights @ v
            row += 1
    return result


def run(case: Case, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
    backend = SdpaAttention(case.pool)
    backend.plan(case.batch)
    new = case.batch.query_lens
    key = torch.cat([k[-n:] for k, n in zip(case.keys, new, strict=True)])
    value = torch.cat([v[-n:] for v, n in zip(case.values, new, strict=True)])
    return backend.forward(layer, query, key, value, scale=0.3, sliding_window=window)


STEPS = {
    "one decode": [(9, 1)],
    "first token of all": [(0, 1)],
    "even decodes": [(7, 1), (7, 1)],
    "uneven decodes": [(3, 1), (22, 1), (0, 1), (8, 1)],
    "whole prompt": [(0, 11)],
    "later chunk": [(6, 7)],
    "all mixed": [(3, 1), (22, 1), (0, 5), (9, 6), (4, 2)],
}


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_definition(step: str, heads: tuple[int, int], window: int | None) -> None:
    case = make_case(1, heads[1], STEPS[step])
    query = torch.randn(len(case.batch.slots), heads[0], HEAD_DIM)
    got = run(case, 1, query, window)
    want = definition(case, query, 0.3, window)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("step", STEPS)
def test_bfloat16_rounds_and_no_more(step: str, window: int | None) -> None:
    case = make_case(1, 2, STEPS[step])
    query = torch.randn(len(case.batch.slots), 6, HEAD_DIM)
    want = definition(case, query, 0.3, window)
    case.pool = case.pool.bfloat16()
    case.keys = [k.bfloat16() for k in case.keys]
    case.values = [v.bfloat16() for v in case.values]
    got = run(case, 1, query.bfloat16(), window)
    torch.testing.assert_close(got.double(), want, atol=0.05, rtol=0.02)


def test_layers_do_not_touch_one_another() -> None:
    case = make_case(2, 2, STEPS["all mixed"], garbage=7.0)
    before = case.pool.clone()
    run(case, 2, torch.randn(len(case.batch.slots), 4, HEAD_DIM), None)
    written = (case.pool != before).nonzero()
    assert set(written[:, 2].tolist()) == {2}
    slots = {(int(s) // BLOCK_SIZE, int(s) % BLOCK_SIZE) for s in case.batch.slots}
    assert {(int(w[0]), int(w[4])) for w in written} == slots


@pytest.mark.parametrize("step", STEPS)
def test_slots_never_written_do_not_matter(step: str) -> None:
    """Finite garbage beyond a sequence's end, and in block 0, which unused entries name."""
    query = torch.randn(len(make_case(1, 2, STEPS[step]).batch.slots), 4, HEAD_DIM)
    clean = run(make_case(1, 2, STEPS[step]), 1, query, None)
    dirty = run(make_case(1, 2, STEPS[step], garbage=1e30), 1, query, None)
    assert torch.equal(clean, dirty)
