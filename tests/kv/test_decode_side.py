"""What the decode worker accounts for: a transfer's time, and not that of its own threads."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tasuki.engine.api import Assignment, FirstToken, LegTimings
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import Pull, PullDone, ToPrefill
from tasuki.v1 import kv_pb2 as pb

CONFIG = HandoffConfig(lease_s=10.0)
BLOCKS = (5, 6)


class Side:
    """A `DecodeSide` with request "r", wanted of prefill engine "p" at time 0."""

    def __init__(self) -> None:
        self.started: list[tuple[LegTimings, float]] = []
        host = SimpleNamespace(
            may_credit=lambda request_id: True,
            prefix_hint=lambda request_id: 0,
            assign=lambda request_id: Assignment(0, BLOCKS),
            start_decode=self._start_decode,
        )
        self.side = DecodeSide(host, CONFIG, HandoffCounters())  # type: ignore[arg-type]
        self.side.on_connected("p", CONFIG.lease_s, 0.0)
        self.side.submit("r", "p", 0.0)
        (want,) = (e.message.want for e in self.side.drain() if isinstance(e, ToPrefill))
        announce = pb.Announce(request_id="r", first=0, blocks=[1, 2], heard=want.seq)
        self.side.on_message("p", pb.FromPrefill(announce=announce), 1.0)
        (self.pull,) = (e for e in self.side.drain() if isinstance(e, Pull))

    def _start_decode(
        self, request_id: str, first: Sequence[FirstToken], timings: LegTimings, usable_for_s: float
    ) -> None:
        self.started.append((timings, usable_for_s))

    def prefilled(self, heard_s: float, now_s: float) -> None:
        first = pb.FirstToken(choice=0, token=7)
        message = pb.Prefilled(request_id="r", total_blocks=len(BLOCKS), first_tokens=[first])
        self.side.on_message("p", pb.FromPrefill(prefilled=message), now_s, heard_s)

    def pulled(self, finished_s: float, now_s: float) -> None:
        self.side.on_pull_done(PullDone(self.pull.order_id, 1.0, finished_s, 64, 1), now_s)


def test_exposed_is_what_the_transfer_takes_beyond_prefill() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.5)
    side.pulled(finished_s=2.25, now_s=3.0)
    ((timings, usable_for_s),) = side.started
    assert timings.transfer_exposed_s == pytest.approx(0.25)
    assert usable_for_s == pytest.approx(0.75), "the engine thread's delay: first decode's"


def test_a_hidden_transfer_is_not_exposed_however_late_its_end_is_taken_in() -> None:
    side = Side()
    side.prefilled(heard_s=2.0, now_s=2.5)
    side.pulled(finished_s=1.5, now_s=3.0)
    ((timings, usable_for_s),) = side.started
    assert (timings.transfer_exposed_s, usable_for_s) == (0.0, pytest.approx(1.0))


def test_waiting_for_a_proof_is_exposed() -> None:
    side = Side()
    late_s = CONFIG.lease_s  # past the want's lease, less its margin
    side.prefilled(heard_s=2.0, now_s=2.0)
    side.pulled(finished_s=late_s, now_s=late_s)
    assert not side.started
    (renew,) = (e.message.renew for e in side.side.drain() if isinstance(e, ToPrefill))
    renewed = pb.Renewed(seq=renew.seq, alive=["r"])
    side.side.on_message("p", pb.FromPrefill(renewed=renewed), late_s + 0.5, late_s + 0.25)
    ((timings, usable_for_s),) = side.started
    assert (timings.transfer_exposed_s, usable_for_s) == (late_s + 0.5 - 2.0, 0.0)
