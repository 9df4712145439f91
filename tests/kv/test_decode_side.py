"""What the decode worker accounts for: a transfer's time, and not that of its own threads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tasuki.engine.api import Assignment, FirstToken, GroupBlocks, LegEndReason, LegTimings
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import Pull, PullDone, ToPrefill
from tasuki.v1 import kv_pb2 as pb

MACHINE = b"this"
CONFIG = HandoffConfig(lease_s=10.0, machine=MACHINE)
BLOCKS = (5, 6)
LIMIT_S = CONFIG.pull_timeout_s


class Side:
    """A `DecodeSide` with request "r", wanted of prefill engine "p" at time 0."""

    def __init__(self) -> None:
        self.started: list[LegTimings] = []
        self.ended: list[tuple[LegEndReason, str, list[int]]] = []
        self.freed: list[int] = []
        self.counters = HandoffCounters()
        host = SimpleNamespace(
            may_credit=lambda request_id: True,
            assign=lambda request_id: Assignment(1, len(BLOCKS), 0, [GroupBlocks(0, 0, BLOCKS)]),
            start_decode=self._start_decode,
            end_decode_leg=self._end_decode_leg,
            free_quarantined=self.freed.extend,
        )
        self.side = DecodeSide(host, CONFIG, self.counters)  # type: ignore[arg-type]
        self.side.on_connected("p", CONFIG.lease_s, 1, 0.0)
        self.side.submit("r", "p", 0.0)
        (want,) = (e.message.want for e in self.side.drain() if isinstance(e, ToPrefill))
        assert want.seq == 1
        self.now_s = 1.0
        self.pull = self.announce(0, [1, 2], self.now_s)

    def _start_decode(
        self,
        request_id: str,
        first: Sequence[FirstToken],
        timings: LegTimings,
        hollow: Sequence[int],
    ) -> None:
        self.started.append(timings)

    def _end_decode_leg(
        self,
        request_id: str,
        reason: LegEndReason,
        message: str,
        quarantine: Sequence[int],
        timings: LegTimings,
    ) -> None:
        self.ended.append((reason, message, list(quarantine)))

    def until(self, now_s: float) -> None:
        """Let time pass with a prefill worker that answers every renewal."""
        while self.now_s < now_s:
            self.now_s = min(now_s, self.now_s + 1.0)
            self.side.beat(self.now_s)
            self.side.tick(self.now_s)
            for effect in self.side.drain():
                if isinstance(effect, ToPrefill) and effect.message.HasField("renew"):
                    renewed = pb.Renewed(seq=effect.message.renew.seq, alive=["r"])
                    message = pb.FromPrefill(renewed=renewed)
                    self.side.on_message("p", message, self.now_s)

    def announce(self, first: int, blocks: list[int], now_s: float) -> Pull:
        announce = pb.Announce(
            request_id="r",
            first_token=first,
            end_token=first + len(blocks),
            groups=[pb.GroupBlocks(group=0, first_token=first, blocks=blocks)],
            heard=1,
        )
        self.side.on_message("p", pb.FromPrefill(announce=announce), now_s)
        (pull,) = (e for e in self.side.drain() if isinstance(e, Pull))
        return pull

    def prefilled(
        self,
        heard_s: float,
        now_s: float,
        computed_s: float | None = None,
        machine: bytes = MACHINE,
    ) -> None:
        message = pb.Prefilled(
            request_id="r",
            tokens=len(BLOCKS),
            first_tokens=[pb.FirstToken(choice=0, token=7)],
            computed_s=heard_s if computed_s is None else computed_s,
            machine=machine,
        )
        self.side.on_message("p", pb.FromPrefill(prefilled=message), now_s, heard_s)

    def pulled(self, finished_s: float, now_s: float) -> None:
        self.side.on_pull_done(PullDone(self.pull.order_id, 1.0, finished_s, 64, 1), now_s)


def test_exposed_is_from_the_end_of_prefill_until_decode_may_be_scheduled() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.5, computed_s=1.875)
    side.pulled(finished_s=2.25, now_s=3.0)
    (timings,) = side.started
    assert timings.transfer_exposed_s == pytest.approx(3.0 - 1.875)
    assert timings.transfer_tail_s == pytest.approx(0.25), "what the transfer alone adds"


def test_another_machines_clock_is_not_compared() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.5, computed_s=-700.0, machine=b"other")
    side.pulled(finished_s=2.25, now_s=3.0)
    (timings,) = side.started
    assert timings.transfer_exposed_s == pytest.approx(1.0), "since its end was heard"


def test_a_hidden_transfer_has_no_tail_however_late_its_end_is_taken_in() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.5)
    side.pulled(finished_s=1.5, now_s=3.0)
    (timings,) = side.started
    assert timings.transfer_tail_s == 0.0


def test_waiting_for_a_proof_is_exposed() -> None:
    side = Side()
    late_s = CONFIG.lease_s  # past the want's lease, less its margin
    side.prefilled(heard_s=2.0, now_s=2.0)
    side.pulled(finished_s=late_s, now_s=late_s)
    assert not side.started
    (renew,) = (e.message.renew for e in side.side.drain() if isinstance(e, ToPrefill))
    renewed = pb.Renewed(seq=renew.seq, alive=["r"])
    side.side.on_message("p", pb.FromPrefill(renewed=renewed), late_s + 0.5, late_s + 0.25)
    (timings,) = side.started
    assert timings.transfer_exposed_s == pytest.approx(late_s + 0.5 - 2.0)


def test_a_pull_that_never_ends_is_given_up_though_its_peer_answers() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.0)
    side.until(1.0 + LIMIT_S - 0.5)
    assert not side.ended
    due_s = side.side.next_deadline()
    assert due_s is not None and due_s <= 1.0 + LIMIT_S
    side.until(1.0 + LIMIT_S)
    ((reason, message, quarantine),) = side.ended
    assert reason is LegEndReason.KV_LOST and quarantine == list(BLOCKS)
    assert "made no progress for 30 s (--pull-timeout-s)" in message
    assert (side.counters.kv_pull_timeouts, side.counters.stuck_blocks) == (1, 2)
    side.until(10 * LIMIT_S)
    assert not side.freed, "the transfer may still write"
    assert side.counters.kv_pull_timeouts == 1
    side.pulled(finished_s=side.now_s, now_s=side.now_s)
    assert side.freed == list(BLOCKS) and side.counters.stuck_blocks == 0


def test_a_pull_that_makes_progress_is_waited_for() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.0)
    for _ in range(4):
        side.until(side.now_s + LIMIT_S - 1.0)
        side.side.on_pull_progress(side.pull.order_id, side.now_s)
    assert not side.ended
    side.until(side.now_s + LIMIT_S)
    assert side.ended[0][0] is LegEndReason.KV_LOST


def test_blocks_that_would_shift_all_later_ones_lose_the_kv() -> None:
    side = Side()
    groups = [pb.GroupBlocks(group=0, first_token=1000, blocks=[9])]
    announce = pb.Announce(request_id="r", first_token=0, end_token=0, groups=groups)
    assert not side.side.read_ahead("p", announce, 1.5)
    side.side.on_message("p", pb.FromPrefill(announce=announce), 1.5)
    ((reason, message, quarantine),) = side.ended
    assert reason is LegEndReason.KV_LOST and tuple(quarantine) == BLOCKS[:2]
    assert "prefill worker p announced blocks of group 0 from token 1000 on" in message


def test_an_end_without_first_tokens_is_no_end() -> None:
    side = Side()
    prefilled = pb.Prefilled(request_id="r", tokens=len(BLOCKS))
    side.side.on_message("p", pb.FromPrefill(prefilled=prefilled), 2.0)
    ((reason, message, _),) = side.ended
    assert reason is LegEndReason.KV_LOST
    assert message == "prefill worker p ended prefill without a first token"


def test_a_leg_that_the_engine_ends_gives_its_kv_back() -> None:
    side = Side()
    side.side.drain()
    side.side.on_leg_ended("r", 2.0)
    (release,) = (e.message.release for e in side.side.drain() if isinstance(e, ToPrefill))
    assert (list(release.request_ids), release.keep) == (["r"], False)
    side.side.on_leg_ended("r", 3.0)
    assert side.side.drain() == []


def test_pulls_are_counted_by_blocks_bytes_and_failures() -> None:
    side = Side()
    side.side.on_pull_done(PullDone(side.pull.order_id, 1.5, 2.0, 64, 1, ""), 2.0)
    counted = side.counters
    assert (counted.kv_pulls, counted.kv_pulled_blocks, counted.kv_pulled_bytes) == (1, 2, 64)
    assert counted.kv_pull_failures == 0
    lost = Side()
    lost.side.on_pull_done(PullDone(lost.pull.order_id, 1.5, 2.0, 8, 1, "no route"), 2.0)
    counted = lost.counters
    assert (counted.kv_pulls, counted.kv_pulled_blocks, counted.kv_pulled_bytes) == (0, 0, 8)
    assert counted.kv_pull_failures == 1


def test_credit_goes_first_to_the_request_that_came_to_a_worker_first() -> None:
    asked: list[str] = []
    host = SimpleNamespace(may_credit=lambda request_id: asked.append(request_id))
    side = DecodeSide(host, CONFIG, HandoffCounters())  # type: ignore[arg-type]
    side.submit("late", "p", 5.0)
    side.submit("again", "p", 6.0, waited_s=3.0)
    assert asked == ["late", "again"], "as if it had come at 3 s"
