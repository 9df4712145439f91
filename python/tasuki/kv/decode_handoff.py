"""One handoff as the decode worker keeps it: plain state.

`decode_side.py` moves it from state to state; `prefill_peers.py` reads what to
say of it and writes `acked_s`. Both run under the lock of `handoff.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki.engine.api import Assignment, LegTimings
from tasuki.v1 import kv_pb2 as pb

NEVER_S = float("-inf")


@dataclass(slots=True, eq=False)
class DecodeHandoff:
    """One DECODE leg until it decodes.

    Equal only to itself: another one of the same name may follow it.

    Attributes:
        greeted: the handshake with the peer is done.
        greeted_s: when that was taken in, if the handoff had to wait for it.
        credited_s: when credit was given and the want sent; None: waits for room.
        prefix_hint: blocks that were cached here when credit was given.
        scheduled: the prefill worker schedules it (heard, or implied).
        prefilled_s: when prefill's end was heard, whenever it was taken in.
        remote: announced blocks heard, contiguously from 0.
        posted: index up to which pulls are ordered.
        orders: pulls that have not ended.
        last_done_s: when the latest pull was seen complete.
        acked_s: send time of the last want or renewal that was answered.
        ask_until_s: complete but not proven: how long an answer is waited for.
    """

    request_id: str
    peer: str
    submitted_s: float
    greeted: bool
    greeted_s: float = NEVER_S
    credited_s: float | None = None
    prefix_hint: int = 0
    scheduled: bool = False
    remote: list[int] = field(default_factory=list)
    prefilled: pb.Prefilled | None = None
    prefilled_s: float = 0.0
    assignment: Assignment | None = None
    posted: int = 0
    orders: set[int] = field(default_factory=set)
    first_posted_s: float | None = None
    last_done_s: float = NEVER_S
    acked_s: float = NEVER_S
    ask_until_s: float | None = None
    timings: LegTimings = field(default_factory=LegTimings)
