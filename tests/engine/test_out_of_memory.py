"""A step that runs out of memory loses nothing: it is computed in parts, the next are smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from engine_fakes import Rig, expected, ideal_kv, make_rig, spec

from tasuki.attention.batch import Batch
from tasuki.engine.api import FirstToken, Leg, LegEndReason, LegTimings
from tasuki.engine.errors import DeviceMemoryError, FailureKind

MAX_LEN = 64


def starve(rig: Rig, fits: Callable[[Batch], bool]) -> list[int]:
    """Let the device run out of memory in steps that do not fit.

    Returns:
        The tokens of each step that did not.
    """
    forward, failed = rig.model.forward, []

    def forward_or_fail(batch: Batch, attention: object) -> torch.Tensor:
        if not fits(batch):
            failed.append(len(batch.tokens))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB")
        return forward(batch, attention)

    rig.model.forward = forward_or_fail  # type: ignore[method-assign]
    return failed


def write(rig: Rig, blocks: Sequence[int], tokens: Sequence[int]) -> None:
    """What a handoff would have brought."""
    rows = torch.from_numpy(ideal_kv(tokens)).permute(1, 0, 2)  # [2, tokens, 2]
    size = rig.model.block_size
    for index, block in enumerate(blocks):
        part = rows[:, index * size : (index + 1) * size]
        rig.pool[block, 0, 0, :, : part.shape[1]] = part


def requests(count: int = 3):  # type: ignore[no-untyped-def]
    made = [
        spec(f"r{index}", [index + i for i in range(20 + index)], max_tokens=12)
        for index in range(count)
    ]
    made.append(spec("n", range(9), choices=(0, 1), temperature=1.0, logprobs=1, max_tokens=9))
    made.append(spec("p", range(3, 25), prompt_logprobs=0, frequency_penalty=0.5))
    return made


def assert_all_as_expected(rig: Rig, all_of_them) -> None:  # type: ignore[no-untyped-def]
    for request in all_of_them:
        assert rig.ended[request.request_id].reason is LegEndReason.FINISHED
        for choice in request.choices:
            tokens, _ = expected(request, choice, MAX_LEN)
            assert rig.tokens(request.request_id, choice) == tokens
    assert rig.engine.referenced_blocks == 0


@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("every", [1_000, 5, 3])
def test_single_steps_that_run_out_of_memory_lose_nothing(budget: int, every: int):
    rig = make_rig(num_blocks=128, max_batched_tokens=budget)
    calls = iter(range(1_000_000))
    failed = starve(rig, lambda batch: next(calls) % every != 1)
    made = requests()
    for request in made:
        rig.engine.submit(request)
    rig.drain()
    assert failed
    assert_all_as_expected(rig, made)


@pytest.mark.parametrize("most", [1, 3, 10])
def test_a_device_on_which_only_small_steps_fit_goes_on(most: int):
    rig = make_rig(num_blocks=128, max_batched_tokens=64)
    failed = starve(rig, lambda batch: len(batch.tokens) <= most)
    made = requests()
    for request in made:
        rig.engine.submit(request)
    rig.drain()
    assert failed
    assert_all_as_expected(rig, made)


def test_the_next_prompt_chunks_are_half_as_large():
    rig = make_rig(num_blocks=128, max_batched_tokens=32, overlap=False)
    failed = starve(rig, lambda batch: len(batch.tokens) < 32)
    for request in requests(3):
        rig.engine.submit(request)
    rig.drain()
    assert failed == [32], "once, and not at every step"


def test_the_youngest_gives_way_where_decodes_do_not_fit():
    rig = make_rig(num_blocks=128, max_batched_tokens=64)
    old = [spec(f"old{index}", [index] * 9, max_tokens=20) for index in range(2)]
    for request in old:
        rig.engine.submit(request)
    for _ in range(3):
        rig.step()
    pulled = spec("pulled", range(8), leg=Leg.DECODE, max_tokens=20)
    rig.engine.submit(pulled)
    assert rig.engine.may_credit("pulled")
    assignment = rig.engine.assign("pulled")
    assert assignment is not None
    tokens, _ = expected(pulled, 0, MAX_LEN)
    write(rig, assignment.parts[0].blocks, pulled.prompt_tokens)
    rig.engine.start_decode("pulled", [FirstToken(0, tokens[0], False)], LegTimings())
    failed = starve(rig, lambda batch: len(batch.tokens) <= 2)
    rig.drain()
    assert len(failed) <= 2, "one step, and with overlap the one after it"
    assert rig.ended["pulled"].reason is LegEndReason.RETURNED, "the router places it again"
    assert rig.ended["pulled"].failure is FailureKind.MEMORY
    assert "ran out of the device's memory" in rig.ended["pulled"].message
    told = rig.tokens("pulled")
    assert told == tokens[: len(told)]
    assert_all_as_expected(rig, old)


def test_a_request_that_gives_way_here_is_computed_again():
    rig = make_rig(num_blocks=128, max_batched_tokens=64)
    made = [spec(f"r{index}", [index] * 9, max_tokens=20) for index in range(3)]
    for request in made:
        rig.engine.submit(request)
    for _ in range(3):
        rig.step()
    failed = starve(rig, lambda batch: batch.num_decodes <= 2)
    rig.drain()
    assert failed
    assert rig.engine.counters().preemptions >= 1
    assert_all_as_expected(rig, made)


@pytest.mark.parametrize("overlap", [False, True], indirect=True)
def test_a_request_with_more_choices_than_fitted_starts_once_nothing_generates(overlap: bool):
    rig = make_rig(num_blocks=128, max_batched_tokens=64)
    decodes = iter([False])
    failed = starve(rig, lambda batch: batch.num_decodes < 4 or next(decodes, True))
    four = {"choices": (0, 1, 2, 3), "temperature": 1.0}
    rig.engine.submit(spec("before", [1] * 9, max_tokens=12, **four))  # type: ignore[arg-type]
    rig.drain()
    assert failed == [4]
    after = [
        spec("four", [2] * 9, max_tokens=5, **four),  # type: ignore[arg-type]
        spec("one", [3] * 9, max_tokens=5),
    ]
    for request in after:
        rig.engine.submit(request)
    rig.drain()
    assert_all_as_expected(rig, after)


def test_a_worker_on_which_nothing_fits_ends():
    rig = make_rig()
    starve(rig, lambda batch: False)
    rig.engine.submit(spec("a", range(10)))
    with pytest.raises(DeviceMemoryError, match="CUDA out of memory"):
        rig.drain()
