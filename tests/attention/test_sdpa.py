"""The backend against attention written as the definition says, in float64."""

from __future__ import annotations

import pytest
import torch
from support.attention_cases import BLOCK_SIZE, STEPS, Case, Shape, definition, make_case

from tasuki.attention.sdpa import SdpaAttention

SCALE = 0.3


def run(case: Case, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
    backend = SdpaAttention(case.pool)
    backend.plan(case.batch)
    return case.run(backend, layer, query, scale=SCALE, window=window)


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_definition(step: str, heads: tuple[int, int], window: int | None) -> None:
    case = make_case(1, Shape(heads[1]), STEPS[step])
    query = case.query(heads[0])
    got = run(case, 1, query, window)
    want = definition(case, query, SCALE, window)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("step", STEPS)
def test_bfloat16_rounds_and_no_more(step: str, window: int | None) -> None:
    case = make_case(1, Shape(2, dtype=torch.bfloat16), STEPS[step])
    query = case.query(6)
    want = definition(case, query, SCALE, window)
    got = run(case, 1, query, window)
    torch.testing.assert_close(got.double(), want, atol=0.05, rtol=0.02)


def test_what_is_written_already_is_read_from_the_pool() -> None:
    case = make_case(1, Shape(2), STEPS["later chunk"])
    query = case.query(4)
    want = run(case, 1, query, None)
    written = case.pool.clone()
    backend = SdpaAttention(case.pool)
    backend.plan(case.batch)
    key, value = case.new(case.keys), case.new(case.values)
    got = backend.forward(1, query, key, value, scale=SCALE, written=True)
    assert torch.equal(got, want)
    assert torch.equal(case.pool, written)


def test_layers_do_not_touch_one_another() -> None:
    case = make_case(2, Shape(2), STEPS["all mixed"], garbage=7.0)
    before = case.pool.clone()
    run(case, 2, case.query(4), None)
    written = (case.pool != before).nonzero()
    assert set(written[:, 2].tolist()) == {2}
    slots = {(int(s) // BLOCK_SIZE, int(s) % BLOCK_SIZE) for s in case.batch.slots}
    assert {(int(w[0]), int(w[4])) for w in written} == slots


@pytest.mark.parametrize("step", STEPS)
def test_slots_never_written_do_not_matter(step: str) -> None:
    """Finite garbage beyond a sequence's end, and in block 0, which unused entries name."""
    clean_case, dirty_case = (
        make_case(1, Shape(2), STEPS[step], garbage=garbage) for garbage in (0.0, 1e30)
    )
    query = clean_case.query(4)
    clean = run(clean_case, 1, query, None)
    assert torch.equal(clean, run(dirty_case, 1, query, None))
