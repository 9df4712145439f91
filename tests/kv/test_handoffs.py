"""Two workers' engines hand requests over, streams and threads included."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from handoff_rig import LENGTH, Leg, LegEndReason, Rig, Worker, assert_decoded, prompt, spec

from tasuki.engine.errors import FailureKind
from tasuki.engine.isolation import Flight
from tasuki.engine.plan import StepPlan


@pytest.mark.parametrize("length", [1, 3, 4, 11, 16, 50])
def test_a_split_request_gives_the_tokens_of_a_whole_one(rig: Rig, length: int) -> None:
    prefill, decode = rig.worker(), rig.worker()
    request = spec("r.0", prompt(length), max_tokens=6)
    rig.place(request, prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    blocks = -(-length // 4)
    timings = decode.ended["r.0"].timings
    assert decode.engine.counters().prompt_tokens_computed == 0
    assert timings.transfer_blocks == blocks
    assert timings.transfer_bytes == blocks * decode.layout.block_bytes
    assert decode.handoffs.counters.kv_pulled_bytes == timings.transfer_bytes
    assert timings.handshake_s > 0
    rig.pump_until_idle()


def test_choices_and_resumed_tokens_are_handed_over(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    several = spec("n.0", prompt(10), choices=(0, 1, 2), temperature=1.0, max_tokens=5)
    resumed = spec("s.0", prompt(9, 3), resumed=(4, 5, 6), max_tokens=8)
    for request in (several, resumed):
        rig.place(request, prefill, decode)
    rig.pump(lambda: {"n.0", "s.0"} <= decode.ended.keys() & prefill.ended.keys())
    assert_decoded(several, prefill, decode)
    assert_decoded(resumed, prefill, decode)
    rig.pump_until_idle()


def test_what_decode_holds_already_is_not_moved(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    first = spec("a.0", prompt(18), max_tokens=4)
    rig.place(first, prefill, decode)
    rig.pump(lambda: "a.0" in decode.ended and "a.0" in prefill.ended)
    second = spec("b.0", prompt(18), max_tokens=4)
    rig.place(second, prefill, decode)
    rig.pump(lambda: "b.0" in decode.ended and "b.0" in prefill.ended)
    assert_decoded(second, prefill, decode)
    timings = decode.ended["b.0"].timings
    assert (timings.prefix_blocks, timings.transfer_blocks) == (4, 1)
    rig.pump_until_idle()


def test_a_request_over_at_its_first_token_moves_nothing_more(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    request = spec("r.0", prompt(5), max_tokens=1)
    rig.place(request, prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert prefill.ended["r.0"].reason is LegEndReason.FINISHED
    assert decode.ended["r.0"].reason is LegEndReason.FINISHED
    assert "r.0" not in decode.outputs
    rig.pump_until_idle()


def test_chunks_move_while_later_ones_are_computed(rig: Rig) -> None:
    prefill, decode = rig.worker(max_batched_tokens=4), rig.worker()
    prefill.frozen = True  # or it might have computed all before it is wanted
    rig.place(spec("r.0", prompt(40), max_tokens=2), prefill, decode)
    rig.pump(lambda: prefill.handoffs._prefill._handoffs["r.0"].wanted)
    prefill.frozen = False
    rig.pump(lambda: prefill.handoffs.leased_blocks >= 3)
    prefill.frozen = True
    rig.pump(lambda: decode.handoffs.counters.kv_pulled_blocks >= 3)
    assert "r.0" not in prefill.outputs, "its first token is yet to be sampled"
    prefill.frozen = False
    rig.pump_until_idle()
    assert decode.handoffs.counters.kv_pulls >= 3


def test_an_abort_in_mid_pull_keeps_the_targets_quarantined(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    decode.transport.hold.set()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0)
    decode.abort("r.0")
    prefill.abort("r.0")
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert decode.ended["r.0"].reason is LegEndReason.ABORTED
    assert prefill.ended["r.0"].reason is LegEndReason.ABORTED
    assert decode.engine.load().quarantined_blocks > 0
    decode.transport.hold.clear()
    rig.pump_until_idle()


def test_prefill_keeps_announced_blocks_when_only_the_router_aborts(rig: Rig) -> None:
    prefill, decode = rig.worker(lease_s=1.5), rig.worker()
    decode.transport.hold.set()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    rig.pump(lambda: "r.0" in prefill.outputs and prefill.handoffs.leased_blocks == 3)
    with decode.asleep():
        prefill.abort("r.0")
        prefill.turn()
        assert prefill.handoffs.leased_blocks == 3
        assert "r.0" not in prefill.ended
        rig.pump(lambda: "r.0" in prefill.ended)  # when the lease has run out
    assert prefill.handoffs.counters.leases_expired == 1
    assert prefill.handoffs.leased_blocks == 0


def test_a_frozen_decode_worker_does_not_use_blocks_after_its_lease(rig: Rig) -> None:
    prefill, decode = rig.worker(lease_s=0.4), rig.worker()
    decode.transport.hold.set()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    rig.pump(lambda: "r.0" in prefill.outputs and prefill.handoffs.leased_blocks == 3)
    with decode.asleep():
        rig.pump(lambda: "r.0" in prefill.ended)
    assert prefill.ended["r.0"].reason is LegEndReason.FAILED
    assert "lease" in prefill.ended["r.0"].message
    decode.transport.hold.clear()
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    assert "r.0" not in decode.outputs
    rig.pump_until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["prefill", "decode"])
def test_steps_longer_than_the_lease_lose_nothing(rig: Rig, slow: str) -> None:
    lease_s = 0.8
    prefill = rig.worker(lease_s=lease_s, max_batched_tokens=16)
    decode = rig.worker(lease_s=lease_s)
    requests = [
        spec(f"r{number}.0", prompt(20 + number, number), max_tokens=3) for number in (0, 1)
    ]
    if slow == "decode":  # its steps are those of another request
        decode.engine.submit(spec("own", prompt(5, 9), max_tokens=20))
    leased = {"prefill": prefill, "decode": decode}[slow].long_steps(rig, 1.5 * lease_s)
    for request in requests:
        rig.place(request, prefill, decode)
    names = {request.request_id for request in requests}
    rig.pump(lambda: names <= prefill.ended.keys() & decode.ended.keys(), deadline_s=60.0)
    for request in requests:
        assert_decoded(request, prefill, decode)
    assert max(leased) > 0, "no lease ran during a long step"
    assert prefill.handoffs.counters.leases_granted == 2
    assert prefill.handoffs.counters.leases_expired == 0
    decode.abort("own")


@pytest.mark.parametrize("pulling", [False, True])
def test_a_dead_prefill_worker_is_noticed(rig: Rig, pulling: bool) -> None:
    prefill, decode = rig.worker(lease_s=0.5), rig.worker(lease_s=0.5)
    decode.transport.hold.set()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    if pulling:
        rig.pump(lambda: decode.engine.referenced_blocks > 0)
    rig.kill(prefill)
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    rig.pump_until_idle()


def test_another_engine_at_the_endpoint_means_the_old_one_is_gone(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    port = int(prefill.endpoint.split(":")[1])
    decode.transport.hold.set()
    rig.place(spec("r.0", prompt(12)), prefill, decode)
    rig.pump(lambda: decode.engine.referenced_blocks > 0)
    prefill.frozen = True
    rig.stop_server(prefill)
    rig.workers.remove(prefill)
    successor = rig.worker(port=port)
    rig.pump(lambda: "r.0" in decode.ended)
    assert decode.ended["r.0"].reason is LegEndReason.KV_LOST
    assert "is gone" in decode.ended["r.0"].message
    decode.transport.hold.clear()
    request = spec("r.1", prompt(12), max_tokens=3)
    rig.place(request, successor, decode)
    rig.pump(lambda: "r.1" in decode.ended and "r.1" in successor.ended)
    assert_decoded(request, successor, decode)
    rig.pump_until_idle()
    prefill.handoffs.close()


def test_a_broken_stream_is_made_again_and_nothing_is_lost(rig: Rig) -> None:
    prefill, decode = rig.worker(max_batched_tokens=4), rig.worker()
    request = spec("r.0", prompt(40), max_tokens=3)
    rig.place(request, prefill, decode)
    rig.pump(lambda: decode.handoffs.counters.kv_pulled_blocks >= 2)
    assert prefill.handoffs.servicer._streams
    rig.loop.call_soon_threadsafe(prefill.handoffs.servicer.close)
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    rig.pump_until_idle()


def test_announced_blocks_are_pulled_while_the_decode_engine_is_busy(rig: Rig) -> None:
    prefill, decode = rig.worker(max_batched_tokens=4), rig.worker()
    request = spec("r.0", prompt(40), max_tokens=3)
    rig.place(request, prefill, decode)
    rig.pump(lambda: prefill.engine.counters().prompt_tokens_computed > 0)
    prefill.frozen = True  # nine chunks are left when the first one's block is on its way
    rig.pump(lambda: decode.transport.posted == 1)
    prefill.frozen, decode.frozen = False, True
    rig.pump(lambda: "r.0" in prefill.outputs and decode.transport.posted > 1)
    assert "r.0" not in decode.outputs
    decode.frozen = False
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    assert decode.handoffs.counters.kv_pulled_blocks == 10
    rig.pump_until_idle()


def test_places_are_assigned_while_the_first_chunk_is_computed(rig: Rig) -> None:
    prefill, decode = rig.worker(max_batched_tokens=64), rig.worker()
    launch = prefill.engine._runner.launch

    def launch_long(plan: StepPlan, now_s: float) -> Flight:
        prefill.frozen = True  # in its step
        rig.pump(lambda: decode.engine.referenced_blocks > 0)
        prefill.frozen = False
        decode.frozen = True
        return launch(plan, now_s)

    prefill.engine._runner.launch = launch_long  # type: ignore[method-assign]
    request = spec("r.0", prompt(40), max_tokens=3)
    rig.place(request, prefill, decode)
    rig.pump(lambda: decode.transport.posted > 0)
    assert decode.frozen and "r.0" in prefill.outputs
    decode.frozen = False
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    rig.pump_until_idle()


def test_only_the_announcing_waits_for_credit(rig: Rig) -> None:
    """Credit comes long after the prompt is computed, and later than a lease."""
    lease_s = 1.0
    prefill, decode = rig.worker(lease_s=lease_s), rig.worker(lease_s=lease_s)
    may_credit = decode.engine.may_credit
    decode.engine.may_credit = lambda request_id: False  # type: ignore[method-assign]
    request = spec("r.0", prompt(20), max_tokens=3)
    rig.place(request, prefill, decode)
    rig.pump(lambda: "r.0" in prefill.outputs)
    assert prefill.engine.counters().prompt_tokens_computed == 20
    end_s = time.monotonic() + 1.5 * lease_s
    rig.pump(lambda: time.monotonic() > end_s)
    assert prefill.handoffs.leased_blocks == 0
    assert prefill.handoffs.counters.leases_granted == 0
    decode.engine.may_credit = may_credit  # type: ignore[method-assign]
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, decode)
    assert prefill.handoffs.counters.leases_granted == 1
    rig.pump_until_idle()


def test_credit_goes_by_when_a_worker_first_got_the_request(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    may_credit = decode.engine.may_credit
    decode.engine.may_credit = lambda request_id: False  # type: ignore[method-assign]
    waited_s = {"a.0": 0.0, "b.0": 0.0, "c.1": 60.0, "d.1": 50.0}
    requests = [
        replace(spec(name, prompt(20), max_tokens=3), waited_s=seconds)
        for name, seconds in waited_s.items()
    ]
    for request in requests:
        rig.place(request, prefill, decode)
    asked: list[str] = []

    def ask(request_id: str) -> bool:
        asked.append(request_id)
        return may_credit(request_id)

    decode.engine.may_credit = ask  # type: ignore[method-assign]
    rig.pump(lambda: waited_s.keys() <= decode.ended.keys() & prefill.ended.keys())
    assert asked == ["c.1", "d.1", "a.0", "b.0"]
    for request in requests:
        assert_decoded(request, prefill, decode)
    rig.pump_until_idle()


def test_what_was_computed_ahead_is_let_go_by_an_abort(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    decode.engine.may_credit = lambda request_id: False  # type: ignore[method-assign]
    rig.place(spec("r.0", prompt(20)), prefill, decode)
    rig.pump(lambda: "r.0" in prefill.outputs)
    prefill.abort("r.0")
    decode.abort("r.0")
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert prefill.ended["r.0"].reason is LegEndReason.ABORTED
    rig.pump_until_idle()


def test_work_refused_by_one_decode_worker_is_kept_for_another(rig: Rig) -> None:
    prefill, full, free = rig.worker(), rig.worker(), rig.worker()
    request = spec("r.0", prompt(20), max_tokens=3)
    full.engine.assign = lambda request_id: None  # type: ignore[method-assign]
    rig.place(request, prefill, full)
    rig.pump(lambda: "r.0" in full.ended)
    assert full.ended["r.0"].reason is LegEndReason.REFUSED
    assert full.ended["r.0"].failure is FailureKind.OVERLOAD
    rig.pump(lambda: "r.0" in prefill.outputs)
    assert prefill.handoffs.retarget("r.0", free.engine_id)
    free.submit(request, Leg.DECODE, prefill)
    rig.pump(lambda: "r.0" in free.ended and "r.0" in prefill.ended)
    assert_decoded(request, prefill, free)
    assert prefill.engine.counters().prompt_tokens_computed == 20
    assert not prefill.handoffs.retarget("r.0", full.engine_id)
    rig.pump_until_idle()


def test_other_models_are_refused_with_both_identities(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker(identity=bytes(16))
    rig.place(spec("r.0", prompt(8)), prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended)
    end = decode.ended["r.0"]
    assert (end.reason, end.failure) == (LegEndReason.FAILED, FailureKind.TRANSPORT)
    assert bytes(16).hex() in end.message
    assert bytes(range(16)).hex() in end.message
    prefill.abort("r.0")
    rig.pump_until_idle()


def test_rejected_legs_leave_nothing_behind(rig: Rig) -> None:
    prefill, decode = rig.worker(), rig.worker()
    rig.place(spec("r.0", prompt(LENGTH + 9)), prefill, decode)
    rig.pump(lambda: "r.0" in decode.ended and "r.0" in prefill.ended)
    assert decode.ended["r.0"].reason is LegEndReason.REJECTED
    assert prefill.ended["r.0"].reason is LegEndReason.REJECTED
    rig.pump_until_idle()


def test_crossed_traffic_in_tiny_pools_finishes(rig: Rig) -> None:
    choose = random.Random(5)
    workers = [rig.worker(num_blocks=32, lease_s=5.0) for _ in range(2)]
    requests = []
    for number in range(24):
        request = spec(
            f"r{number}.0", prompt(choose.randint(1, 50), number), max_tokens=choose.randint(2, 12)
        )
        one = number % 2
        requests.append((request, workers[one], workers[1 - one]))
        rig.place(*requests[-1])
    rig.pump(
        lambda: all(r.request_id in p.ended and r.request_id in d.ended for r, p, d in requests),
        deadline_s=60.0,
    )
    for request, prefill, decode in requests:
        if decode.ended[request.request_id].reason is LegEndReason.RETURNED:
            continue  # preempted: the router would place it again
        assert_decoded(request, prefill, decode)
    rig.pump_until_idle()


def test_random_aborts_leave_nothing_behind(rig: Rig) -> None:
    """A decode leg has no further token after its abort."""
    choose = random.Random(11)
    prefill, decode = rig.worker(max_batched_tokens=4), rig.worker()
    live: list[str] = []
    tokens_at_abort: dict[str, int] = {}

    def place() -> None:
        number = len(live)
        request = spec(f"r{number}.0", prompt(choose.randint(1, 30), number), max_tokens=30)
        rig.place(request, prefill, decode)
        live.append(request.request_id)

    def abort(worker: Worker, name: str) -> None:
        if worker is decode and name not in decode.ended:
            tokens_at_abort.setdefault(name, len(decode.tokens(name)))
        worker.abort(name)

    for _ in range(40):
        place()
        turns = choose.randint(0, 6)
        for _ in range(turns):
            prefill.turn()
            decode.turn()
        if choose.random() < 0.7:
            victim = choose.choice(live)
            for worker in choose.sample((prefill, decode), choose.choice((2, 2, 1))):
                abort(worker, victim)
    rig.pump(lambda: all(name in decode.ended for name in live))
    place()  # the last one is certainly aborted while it decodes
    rig.pump(lambda: len(decode.tokens(live[-1])) >= 3)
    abort(decode, live[-1])
    rig.pump(lambda: live[-1] in decode.ended)
    assert {name: len(decode.tokens(name)) for name in tokens_at_abort} == tokens_at_abort
    for name in live:
        prefill.abort(name)
    rig.pump_until_idle()
