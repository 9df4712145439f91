"""One handoff as the decode worker keeps it, and the pulls that bring its KV.

`decode_side.py` moves it from state to state and decides what becomes of it; `prefill_peers.py`
reads what to say of it and writes `acked_s`. All run under the lock of `handoff.py`. No I/O, no
clock.

The prefill worker's blocks may have another size. What is pulled is then counted in units
(`transfer_plan.py`), and always makes local blocks complete: a local block is written to by
one pull only, as where sizes are equal. A pull cannot be taken back: until it ends its blocks
stay in quarantine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tasuki.engine.api import Assignment, LegTimings
from tasuki.kv.config import HandoffCounters
from tasuki.kv.digest import DigestCheck
from tasuki.kv.effects import CancelPull, Effect, Pull, PullDone
from tasuki.kv.wire import announce_flaw
from tasuki.v1 import kv_pb2 as pb

NEVER_S = float("-inf")


@dataclass(slots=True)
class RemoteBlocks:
    """Blocks of one group of the prefill worker's, from the one that begins with `first_token`."""

    first_token: int
    blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class DecodeHandoff:
    """One DECODE leg until it decodes.

    Equal only to itself: another one of the same name may follow it.

    Attributes:
        greeted: the handshake with the peer is done.
        waited_s: since a worker first got a leg of the request, when this one was submitted.
        greeted_s: when that was taken in, if the handoff had to wait for it.
        credited_s: when credit was given and the want sent; None: waits for room.
        scheduled: the prefill worker schedules it (heard, or implied).
        prefilled_s: when prefill's end was heard, whenever it was taken in.
        peer_block_tokens: in a block of the prefill worker's; known once blocks are assigned.
        announced: tokens whose announcement was heard, contiguously from 0.
        remote: the blocks that hold them, by group.
        hollow: groups whose first local block begins before the prefill worker's: the tokens
            in between are seen by no later one, and their slots are not written.
        posted: tokens up to which pulls are ordered.
        orders: pulls that have not ended.
        last_done_s: when the latest pull was seen complete.
        acked_s: send time of the last want or renewal that was answered.
        ask_until_s: complete but not proven: how long an answer is waited for.
        check: compares what is read with digests of what was announced; None: nothing is.
    """

    request_id: str
    peer: str
    submitted_s: float
    greeted: bool
    greeted_s: float = NEVER_S
    waited_s: float = 0.0
    credited_s: float | None = None
    scheduled: bool = False
    peer_block_tokens: int = 0
    announced: int = 0
    remote: dict[int, RemoteBlocks] = field(default_factory=dict)
    hollow: set[int] = field(default_factory=set)
    prefilled: pb.Prefilled | None = None
    prefilled_s: float = 0.0
    assignment: Assignment | None = None
    posted: int = 0
    orders: set[int] = field(default_factory=set)
    first_posted_s: float | None = None
    last_done_s: float = NEVER_S
    acked_s: float = NEVER_S
    ask_until_s: float | None = None
    check: DigestCheck | None = None
    timings: LegTimings = field(default_factory=LegTimings)

    @property
    def since_s(self) -> float:
        """When a worker first got a leg of the request, by our clock."""
        return self.submitted_s - self.waited_s

    def assigned(self, assignment: Assignment, peer_block_tokens: int) -> None:
        """There is a place for its KV, some of which may be here already."""
        self.assignment = assignment
        self.peer_block_tokens = peer_block_tokens
        self.posted = assignment.prefix_tokens
        self.timings.prefix_blocks = assignment.prefix_tokens // assignment.block_size

    def account(self, now_s: float, machine: bytes) -> None:
        """It may decode now: what its client waited for the transfer.

        Args:
            machine: Ours; clocks of one machine can be compared.
        """
        heard_s, end = self.prefilled_s, self.prefilled
        assert end is not None
        one_clock = end.machine and end.machine == machine
        computed_s = min(end.computed_s, heard_s) if one_clock else heard_s
        self.timings.transfer_tail_s = max(0.0, self.last_done_s - heard_s)
        self.timings.transfer_exposed_s = now_s - computed_s

    def flaw(self, announce: pb.Announce) -> str:
        """Why an announcement that leaves no gap cannot be read; empty: it can."""
        assert self.assignment is not None
        size, tokens = self.peer_block_tokens, self.assignment.tokens
        known = {part.group: (0, tokens) for part in self.assignment.parts}
        for group, theirs in self.remote.items():
            begin = theirs.first_token
            known[group] = (begin, begin + len(theirs.blocks) * size)
        flaw = announce_flaw(announce, tokens, size, known)
        return flaw or ("" if self.understands(announce) else "other blocks than are expected")

    def understands(self, announce: pb.Announce) -> bool:
        """Whether an announcement that leaves no gap names every block that is wanted of it."""
        assert self.assignment is not None
        size, given = self.peer_block_tokens, {part.group: part for part in announce.groups}
        end = min(announce.end_token, self.assignment.tokens)
        for part in self.assignment.parts:
            begin = max(self.announced, part.first_token, part.first_needed)
            if begin < end:
                theirs = given.get(part.group)
                if theirs is None or theirs.first_token > begin or theirs.first_token % size:
                    return False
                if theirs.first_token + len(theirs.blocks) * size < end:
                    return False
        return True

    def hear(self, announce: pb.Announce) -> None:
        """Take in an announcement that is understood."""
        for part in announce.groups:
            known = self.remote.setdefault(part.group, RemoteBlocks(part.first_token))
            ahead = (part.first_token - known.first_token) // self.peer_block_tokens
            known.blocks.extend(part.blocks[len(known.blocks) - ahead :])
        self.announced = max(self.announced, announce.end_token)

    def take_unread(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """What is announced, has a place and is not pulled yet, up to the last whole local block.

        Returns:
            (remote, local) units, the local blocks that they are in, and the local units whose
            digests are compared.
        """
        place = self.assignment
        assert place is not None
        size, theirs_size = place.block_size, self.peer_block_tokens
        unit, end = math.gcd(size, theirs_size), min(self.announced, place.tokens)
        if end < place.tokens:
            end -= end % size
        pairs: list[tuple[int, int]] = []
        blocks: list[int] = []
        check: list[int] = []
        for part in place.parts:
            begin = max(self.posted, part.first_token)
            theirs = self.remote.get(part.group)
            if begin < end and (theirs is None or theirs.first_token > begin):
                self.hollow.add(part.group)
                begin = end if theirs is None else theirs.first_token
            if begin < end and theirs is not None:
                count = -(-(end - begin) // unit)
                ours_at, theirs_at = begin - part.first_token, begin - theirs.first_token
                remote = _units(theirs.blocks, theirs_at // unit, count, theirs_size // unit)
                local = _units(part.blocks, ours_at // unit, count, size // unit)
                pairs += zip(remote, local, strict=True)
                if self.check is not None:
                    check += self.check.choose(part.group, begin, end, local)
                first = ours_at // size
                blocks += part.blocks[first : -(-(end - part.first_token) // size)]
        self.posted = max(self.posted, end)
        return pairs, blocks, check


def _units(blocks: Sequence[int], first: int, count: int, per_block: int) -> Sequence[int]:
    """`count` units of a sequence's blocks, from unit `first` of the first block on."""
    if per_block == 1:
        return blocks[first : first + count]
    at = range(first, first + count)
    return [blocks[index // per_block] * per_block + index % per_block for index in at]


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
    timings.transfer_post_s += done.post_s
    timings.transfer_descriptors += done.descriptors
    if handoff.first_posted_s is None or done.posted_s < handoff.first_posted_s:
        handoff.first_posted_s = done.posted_s
    timings.transfer_s = handoff.last_done_s - handoff.first_posted_s
