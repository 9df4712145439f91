"""Handoffs with digests: what is planted between the two workers is found, and nothing else is."""

from __future__ import annotations

import logging

import pytest
import torch
from handoff_rig import Leg, LegEndReason, Rig, Worker, expected, prompt, spec

from tasuki.engine.api import RequestSpec
from tasuki.engine.cache_groups import CacheGroup
from tasuki.kv.transfer_plan import Run
from tasuki.v1 import kv_pb2 as pb

LENGTH = 64  # max_model_len of the rig's engines


def hand_over(rig: Rig, prefill: Worker, decode: Worker, length: int = 22) -> RequestSpec:
    """One request, to its end at the decode worker."""
    request = spec("r.0", prompt(length), max_tokens=4)
    rig.place(request, prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended)
    return request


def assert_lost(
    rig: Rig, prefill: Worker, decode: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """The handoff ended as KV that is lost, was counted and logged; and the next one is whole."""
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    assert "not what it announced" in decode.ended["r.0"].message
    assert "r.0" not in decode.outputs, "a token of wrong KV"
    assert decode.handoffs.counters.kv_digest_mismatches == 1
    assert any("request_id=r.0" in record.getMessage() for record in caplog.records)
    for transport in (decode.transport, *(rank.transport for rank in decode.ranks)):
        transport.before_read = transport.after_read = lambda pool, run: None
        transport.torn = lambda run: 0
    prefill.abort("r.0")
    again = spec("r.1", prompt(22), max_tokens=4)
    rig.place(again, prefill, decode)
    rig.pump(lambda: "r.1" in decode.ended and "r.1" in prefill.ended)
    assert decode.tokens("r.1") == expected(again, 0, LENGTH)[0]
    assert decode.handoffs.counters.kv_digest_mismatches == 1
    rig.pump_until_idle()


SIZES = [(4, 4), (4, 8), (8, 4), (3, 5)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_kv_passes(rig: Rig, sizes: tuple[int, int], ranks: int) -> None:
    prefill = rig.worker(block_size=sizes[0], ranks=ranks)
    decode = rig.worker(block_size=sizes[1], ranks=ranks, digest_one_in=1)
    request = hand_over(rig, prefill, decode)
    assert decode.tokens("r.0") == expected(request, 0, LENGTH)[0]
    again = spec("r.1", [*prompt(22), 3, 5], max_tokens=6)  # its beginning is here
    rig.place(again, prefill, decode)
    rig.pump(lambda: "r.1" in decode.ended)
    assert decode.tokens("r.1") == expected(again, 0, LENGTH)[0]
    unit = {(4, 4): 4, (4, 8): 4, (8, 4): 4, (3, 5): 1}[sizes]
    assert decode.handoffs.counters.kv_digests >= ranks * -(-22 // unit)
    assert decode.handoffs.counters.kv_digest_mismatches == 0
    assert prefill.handoffs.counters.kv_digests == 0, "it asked for none"
    rig.pump_until_idle()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_byte_that_flips_on_the_way_is_found(
    rig: Rig, sizes: tuple[int, int], rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = rig.worker(block_size=sizes[0], ranks=2)
    decode = rig.worker(block_size=sizes[1], ranks=2, digest_one_in=1)
    transport = (decode.transport, *(each.transport for each in decode.ranks))[rank]
    flipped: list[Run] = []

    def flip(pool: torch.Tensor, run: Run) -> None:
        if not flipped:
            tokens = {(4, 4): 4, (4, 8): 4, (8, 4): 4, (3, 5): 1}[sizes]
            block, at = divmod(run.local * tokens, sizes[1])
            pool[block, 0, 0, 0, at].view(torch.uint8)[3] ^= 0x10
            flipped.append(run)

    transport.after_read = flip
    hand_over(rig, prefill, decode)
    assert flipped, "nothing was planted"
    assert_lost(rig, prefill, decode, caplog)


def test_a_block_that_was_used_again_before_the_read_is_found(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = rig.worker(), rig.worker(digest_one_in=1)
    decode.transport.hold.set()
    request = spec("r.0", prompt(22), max_tokens=4)
    rig.place(request, prefill, decode)
    rig.pump(lambda: decode.handoffs._decode._handoffs["r.0"].posted == 22)
    check = decode.handoffs._decode._handoffs["r.0"].check
    assert check is not None
    rig.pump(lambda: check.told == 22)
    [block, *_] = prefill.handoffs._prefill._handoffs["r.0"].announced[0].parts[0].blocks
    prefill.transport.pool[block] = prefill.transport.pool[block] * 2 + 1
    decode.transport.hold.clear()
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    assert decode.handoffs.counters.kv_digest_mismatches == 1
    assert "r.0" not in decode.outputs


def test_the_right_bytes_of_another_block_are_found(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = rig.worker(), rig.worker(digest_one_in=1)
    swapped: list[Run] = []

    def swap(pool: torch.Tensor, run: Run) -> None:
        if not swapped and run.count > 1:
            first, second = pool[run.local].clone(), pool[run.local + 1].clone()
            assert not torch.equal(first, second)
            pool[run.local], pool[run.local + 1] = second, first
            swapped.append(run)

    decode.transport.after_read = swap
    hand_over(rig, prefill, decode)
    assert swapped, "nothing was planted"
    assert_lost(rig, prefill, decode, caplog)


def test_a_torn_pull_is_found(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = rig.worker(), rig.worker(digest_one_in=1)
    torn: list[Run] = []

    def half(run: Run) -> int:
        torn.append(run)
        return run.count // 2

    decode.transport.torn = half
    hand_over(rig, prefill, decode)
    assert any(run.count > 1 for run in torn), "nothing was planted"
    assert_lost(rig, prefill, decode, caplog)


def test_without_digests_a_flipped_byte_goes_unseen(rig: Rig) -> None:
    """Else the tests above would prove nothing."""
    prefill, decode = rig.worker(), rig.worker()
    decode.transport.after_read = lambda pool, run: pool[run.local].add_(1.0)
    request = hand_over(rig, prefill, decode)
    assert decode.ended["r.0"].reason is LegEndReason.FINISHED
    assert decode.tokens("r.0") != expected(request, 0, LENGTH)[0]
    assert decode.handoffs.counters.kv_digests == 0
    rig.pump_until_idle()


def test_samples_find_a_pull_that_brought_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = rig.worker(), rig.worker(digest_one_in=3)
    decode.transport.torn = lambda run: run.count
    hand_over(rig, prefill, decode)
    assert 0 < decode.handoffs.counters.kv_digests < 6
    assert_lost(rig, prefill, decode, caplog)


def test_windows_are_checked_group_by_group(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    groups = (CacheGroup((0,)), CacheGroup((1,), 8))
    prefill, decode = rig.worker(groups=groups), rig.worker(groups=groups, digest_one_in=1)
    request = hand_over(rig, prefill, decode)
    assert decode.tokens("r.0") == expected(request, 0, LENGTH, groups)[0]
    assert decode.handoffs.counters.kv_digests == 6 + 3
    assert decode.handoffs.counters.kv_digest_mismatches == 0
    rig.pump_until_idle()


def test_digests_are_made_anew_for_another_decode_worker(rig: Rig) -> None:
    prefill = rig.worker(block_size=8)
    first, second = rig.worker(block_size=8, digest_one_in=1), rig.worker(digest_one_in=1)
    first.transport.hold.set()
    request = spec("r.0", prompt(22), max_tokens=4)
    rig.place(request, prefill, first)
    rig.pump(lambda: first.transport.posted > 0 and "r.0" in prefill.outputs)
    second.submit(request, Leg.DECODE, prefill)
    prefill.handoffs.retarget("r.0", second.engine_id)
    first.abort("r.0")
    rig.pump(lambda: "r.0" in second.ended)
    assert second.tokens("r.0") == expected(request, 0, LENGTH)[0]
    assert second.handoffs.counters.kv_digests == 6
    first.transport.hold.clear()
    rig.pump_until_idle()


def test_digests_that_were_lost_are_said_again(rig: Rig) -> None:
    prefill, decode = rig.worker(lease_s=1.0), rig.worker(lease_s=1.0, digest_one_in=1)
    lost: list[pb.FromPrefill] = []
    send = prefill.handoffs.servicer.send

    def lossy(peer: str, messages: list[pb.FromPrefill]) -> None:
        if not lost:
            lost.extend(message for message in messages if message.HasField("digests"))
            messages = [message for message in messages if not message.HasField("digests")]
        send(peer, messages)

    prefill.handoffs.servicer.send = lossy  # type: ignore[method-assign, assignment]
    request = hand_over(rig, prefill, decode)
    assert lost, "nothing was lost"
    assert decode.tokens("r.0") == expected(request, 0, LENGTH)[0]
    assert decode.handoffs.counters.kv_digests == 6
    rig.pump_until_idle()


def test_digests_that_never_come_are_not_waited_for_for_ever(rig: Rig) -> None:
    prefill, decode = rig.worker(lease_s=0.4), rig.worker(lease_s=0.4, digest_one_in=1)
    send = prefill.handoffs.servicer.send
    dropped: list[pb.FromPrefill] = []

    def lossy(peer: str, messages: list[pb.FromPrefill]) -> None:
        dropped.extend(message for message in messages if message.HasField("digests"))
        send(peer, [message for message in messages if not message.HasField("digests")])

    prefill.handoffs.servicer.send = lossy  # type: ignore[method-assign, assignment]
    hand_over(rig, prefill, decode)
    assert dropped, "nothing was lost"
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    rig.pump_until_idle()


def test_a_prefill_worker_that_sends_none_is_named_and_served(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = rig.worker(), rig.worker(digest_one_in=1)
    reply = prefill.handoffs._make_reply()
    reply.digests = False  # as of an earlier version
    prefill.handoffs.servicer._make_reply = lambda: reply
    with caplog.at_level(logging.WARNING):
        request = hand_over(rig, prefill, decode)
    assert decode.tokens("r.0") == expected(request, 0, LENGTH)[0]
    assert decode.handoffs.counters.kv_digests == 0
    assert any("sends no digests" in record.getMessage() for record in caplog.records)
    rig.pump_until_idle()


def test_digests_that_cannot_be_made_cost_the_handoff(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker(digest_one_in=1)
    puller = prefill.handoffs._threads[0]
    puller._digests._of_pool().start = _refuse  # type: ignore[union-attr, method-assign]
    hand_over(rig, prefill, decode)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    assert "no kernel" in decode.ended["r.0"].message
    rig.pump_until_idle()


def _refuse(*_: object) -> object:
    from tasuki.kv.digester import DigestError

    raise DigestError("no kernel")
