"""Handoffs between workers of several ranks: one order is as many transfers as there are pairs."""

from __future__ import annotations

import pytest
from handoff_rig import LegEndReason, Rig, assert_decoded, prompt, spec

from tasuki.kv.handoff import HandoffDefectError


def test_decoding_begins_when_the_slowest_rank_has_its_blocks(rig: Rig) -> None:
    prefill, decode = rig.worker(ranks=2), rig.worker(ranks=2)
    [slow] = decode.ranks
    slow.transport.hold.set()
    request = spec("r.0", prompt(12), max_tokens=3)
    rig.place(request, prefill, decode)
    orders = decode.handoffs._pullers._orders
    rig.pump(lambda: slow.transport.posted > 0 and any(o.ended for o in orders.values()))
    assert decode.handoffs.counters.kv_pulls == 0
    assert "r.0" not in decode.outputs
    slow.transport.hold.clear()
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    timings = decode.ended["r.0"].timings
    assert timings.transfer_bytes == 2 * 3 * decode.layout.block_bytes
    assert decode.handoffs.counters.kv_pulled_blocks == timings.transfer_blocks == 3
    rig.pump_until_idle()


def test_targets_stay_quarantined_until_every_ranks_transfer_has_ended(rig: Rig) -> None:
    prefill, decode = rig.worker(ranks=2), rig.worker(ranks=2)
    [slow] = decode.ranks
    slow.transport.hold.set()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    rig.pump(lambda: slow.transport.posted > 0)
    decode.abort("r.0")
    prefill.abort("r.0")
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert decode.engine.load().quarantined_blocks > 0
    slow.transport.hold.clear()
    rig.pump_until_idle()


def test_kv_that_one_rank_could_not_read_is_lost(rig: Rig) -> None:
    prefill, decode = rig.worker(ranks=2), rig.worker(ranks=2)
    prefill.ranks[0].transport.die()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    assert "remote disconnect" in decode.ended["r.0"].message
    prefill.abort("r.0")
    rig.pump_until_idle()


def test_other_numbers_of_heads_are_refused_with_both_values(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker(ranks=2)
    rig.place(spec("r.0", prompt(8)), prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.FAILED
    assert "2 KV heads here and 1 at" in decode.ended["r.0"].message
    prefill.abort("r.0")
    rig.pump_until_idle()


def test_an_engine_without_a_ranks_transfer_thread_is_broken(rig: Rig) -> None:
    worker = rig.worker(ranks=2)
    rig.pump_until_idle()
    worker.ranks[0].die()
    with pytest.raises(HandoffDefectError, match="a KV transfer thread died"):
        rig.pump(lambda: False)
