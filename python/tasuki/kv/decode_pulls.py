"""The decode worker's pulls: which blocks each writes to, and since when it makes no progress.

Part of the state machine of `decode_side.py`, which decides what becomes of a handoff: no
I/O, no clock. A pull cannot be taken back: until it ends its blocks stay in quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasuki.kv.config import HandoffCounters
from tasuki.kv.decode_handoff import DecodeHandoff
from tasuki.kv.effects import CancelPull, Effect, Pull, PullDone


@dataclass(slots=True)
class PullOrder:
    """A pull under way; `handoff` no longer cares when it is not live.

    Attributes:
        local: our blocks.
        progress_s: when it was ordered, or it or an earlier order of its peer made progress:
            a transfer thread serves the orders of a peer in turn.
        stuck: it made none for too long: its handoff is given up.
    """

    handoff: DecodeHandoff
    local: list[int]
    progress_s: float
    stuck: bool = False

    def complaint(self, now_s: float) -> str:
        """Says that it is stuck, and what to do."""
        return (
            f"a pull from {self.handoff.peer} has made no progress for"
            f" {now_s - self.progress_s:.3g} s (--pull-timeout-s), though the prefill worker"
            " answers: check the network that carries KV"
        )


class DecodePulls:
    """Pulls under way, in the order in which they were ordered.

    Args:
        timeout_s: how long a pull may be without progress.
        counters: pulls are counted here.
        effects: where orders go, in order.

    Attributes:
        orders: the pulls, by number.
    """

    def __init__(self, timeout_s: float, counters: HandoffCounters, effects: list[Effect]) -> None:
        self._timeout_s = timeout_s
        self._counters = counters
        self._effects = effects
        self._next_id = 1
        self.orders: dict[int, PullOrder] = {}

    def begin(
        self,
        handoff: DecodeHandoff,
        pairs: Sequence[tuple[int, int]],
        local: list[int],
        check: list[int],
        now_s: float,
    ) -> None:
        """Order a pull of (remote, local) units into our blocks `local`.

        Args:
            check: Local units whose digests are to be computed.
        """
        order_id = self._next_id
        self._next_id += 1
        self.orders[order_id] = PullOrder(handoff, local, now_s)
        handoff.orders.add(order_id)
        self._effects.append(Pull(order_id, handoff.peer, list(pairs), check))

    def cancel(self, handoff: DecodeHandoff) -> list[int]:
        """Begin nothing more of a handoff's pulls. Returns the blocks that they may write to."""
        blocks: list[int] = []
        for order_id in sorted(handoff.orders):
            blocks += self.orders[order_id].local
            self._effects.append(CancelPull(order_id))
        return blocks

    def progress(self, order_id: int, now_s: float) -> None:
        """A part has arrived: the pulls of its peer that wait behind it may go on waiting."""
        peer = self.orders[order_id].handoff.peer
        for later, order in self.orders.items():
            if later >= order_id and order.handoff.peer == peer:
                order.progress_s = now_s

    def end(self, done: PullDone, now_s: float) -> PullOrder:
        """A pull ended: nothing of it writes to our blocks any more."""
        self.progress(done.order_id, now_s)
        order = self.orders.pop(done.order_id)
        if order.stuck:
            self._counters.stuck_blocks -= len(order.local)
        self._counters.kv_pulled_bytes += done.moved_bytes
        if done.error:
            self._counters.kv_pull_failures += 1
        else:
            self._counters.kv_pulls += 1
            self._counters.kv_pulled_blocks += len(order.local)
            _account(order, done)
        return order

    def take_stuck(self, now_s: float) -> list[PullOrder]:
        """Pulls that have made no progress for too long, each once."""
        stuck = [
            order
            for order in self.orders.values()
            if not order.stuck and order.progress_s + self._timeout_s <= now_s
        ]
        for order in stuck:
            order.stuck = True
            self._counters.stuck_blocks += len(order.local)
        return stuck

    def deadlines(self) -> Iterator[float]:
        """When each pull counts as stuck."""
        for order in self.orders.values():
            if not order.stuck:
                yield order.progress_s + self._timeout_s


def _account(order: PullOrder, done: PullDone) -> None:
    """Add a pull to the account of where its request's time went."""
    handoff, timings = order.handoff, order.handoff.timings
    handoff.last_done_s = max(handoff.last_done_s, done.finished_s)
    timings.transfer_bytes += done.moved_bytes
    timings.transfer_blocks += len(order.local)
    if handoff.first_posted_s is None or done.posted_s < handoff.first_posted_s:
        handoff.first_posted_s = done.posted_s
    timings.transfer_s = handoff.last_done_s - handoff.first_posted_s
