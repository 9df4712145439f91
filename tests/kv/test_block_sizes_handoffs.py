"""Two workers' engines whose blocks have different sizes hand requests over."""

from __future__ import annotations

import random

import pytest
from handoff_rig import Leg, LegEndReason, Rig, Worker, expected, prompt, spec
from support import searches

from tasuki.engine.api import RequestSpec
from tasuki.engine.cache_groups import ONE_GROUP, CacheGroup

REGRESSIONS: tuple[int, ...] = ()
LENGTH = 64  # max_model_len of the rig's engines


def assert_decoded(
    request: RequestSpec, prefill: Worker, decode: Worker, groups: object = ONE_GROUP
) -> None:
    tokens, _ = expected(request, 0, LENGTH, groups)  # type: ignore[arg-type]
    assert decode.tokens(request.request_id) == tokens
    assert prefill.ended[request.request_id].reason is LegEndReason.HANDED_OFF
    assert decode.ended[request.request_id].reason is LegEndReason.FINISHED


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (3, 5), (16, 2)], ids=str)
@pytest.mark.parametrize("length", [1, 7, 16, 50])
def test_blocks_of_other_sizes_are_read(rig: Rig, sizes: tuple[int, int], length: int) -> None:
    prefill, decode = (rig.worker(block_size=size) for size in sizes)
    request = spec("r.0", prompt(length), max_tokens=6)
    rig.place(request, prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    assert decode.engine.counters().prompt_tokens_computed == 0
    assert decode.ended["r.0"].timings.transfer_blocks == -(-length // sizes[1])
    other = (decode.tokens("r.0")[0] + 1) % 40
    again = spec("r.1", [*prompt(length), other, 3, 5], max_tokens=6)  # its beginning is here
    rig.place(again, prefill, decode)
    rig.pump(lambda: "r.1" in decode.ended and "r.1" in prefill.ended)
    assert_decoded(again, prefill, decode)
    assert decode.ended["r.1"].timings.prefix_blocks == length // sizes[1]
    rig.pump_until_idle()


def test_several_ranks_read_blocks_of_another_size(rig: Rig) -> None:
    prefill, decode = rig.worker(ranks=2, block_size=8), rig.worker(ranks=2, block_size=5)
    request = spec("r.0", prompt(29), max_tokens=4)
    rig.place(request, prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    rig.pump_until_idle()


def test_an_abort_in_mid_pull_keeps_the_targets_quarantined(rig: Rig) -> None:
    prefill, decode = rig.worker(block_size=6, max_batched_tokens=6), rig.worker(block_size=4)
    decode.transport.hold.set()
    rig.place(spec("r.0", prompt(24)), prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0 and "r.0" in prefill.outputs)
    decode.abort("r.0")
    prefill.abort("r.0")
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert decode.engine.load().quarantined_blocks > 0
    decode.transport.hold.clear()
    rig.pump_until_idle()


def test_work_refused_by_one_decode_worker_is_kept_for_one_of_another_size(rig: Rig) -> None:
    prefill, full, free = (rig.worker(block_size=size) for size in (4, 4, 7))
    request = spec("r.0", prompt(20), max_tokens=3)
    full.engine.assign = lambda request_id: None  # type: ignore[method-assign]
    rig.place(request, prefill, full)
    rig.pump(lambda: "r.0" in full.ended and "r.0" in prefill.outputs)
    assert prefill.handoffs.retarget("r.0", free.engine_id)
    free.submit(request, Leg.DECODE, prefill)
    rig.pump(lambda: "r.0" in free.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, free)
    rig.pump_until_idle()


def conversations(seed: int) -> int:
    """Requests that begin alike, one after another, over layers with windows.

    Returns:
        Blocks that the decode worker had already.
    """
    choose = random.Random(seed)
    windows = choose.choice(([None, choose.randint(1, 20)], [choose.randint(1, 20)], [None]))
    groups = [CacheGroup((layer,), window) for layer, window in enumerate(windows)]
    sizes = choose.sample((1, 2, 3, 4, 5, 8, 12), 2)
    rig = Rig()
    try:
        prefill, decode = (
            rig.worker(
                block_size=size,
                groups=groups,
                num_blocks=2 * len(groups) * (-(-LENGTH // size) + 2) + 8,
                max_batched_tokens=choose.choice((3, 8, 32)),
            )
            for size in sizes
        )
        common, had = prompt(LENGTH), 0
        for number in range(6):
            shared = choose.randint(0, 45)
            tokens = common[:shared] + prompt(choose.randint(1, 10), 2 + number)
            request = spec(f"r{number}.0", tokens, max_tokens=choose.randint(2, 8))
            rig.place(request, prefill, decode)
            name = request.request_id
            rig.pump(lambda name=name: name in decode.ended and name in prefill.ended)  # type: ignore[misc]
            assert_decoded(request, prefill, decode, groups)
            had += decode.ended[name].timings.prefix_blocks
        rig.pump_until_idle()
    finally:
        rig.close()
    return had


@pytest.mark.search
def test_prefixes_and_windows_give_the_tokens_of_a_whole_one() -> None:
    had = 0
    for seed in searches.seeds(40, REGRESSIONS):
        with searches.case(seed):
            had += conversations(seed)
    assert had > 0
