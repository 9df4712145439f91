"""One handoff as the decode worker keeps it: plain state.

`decode_side.py` moves it from state to state; `prefill_peers.py` reads what to
say of it and writes `acked_s`. Both run under the lock of `handoff.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki.engine.api import Assignment, LegTimings
from tasuki.kv.flaws import announce_flaw
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
        greeted_s: when that was taken in, if the handoff had to wait for it.
        credited_s: when credit was given and the want sent; None: waits for room.
        prefix_hint: tokens that were cached here when credit was given.
        scheduled: the prefill worker schedules it (heard, or implied).
        prefilled_s: when prefill's end was heard, whenever it was taken in.
        announced: tokens whose announcement was heard, contiguously from 0.
        remote: the blocks that hold them, by group.
        posted: tokens up to which pulls are ordered.
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
    announced: int = 0
    remote: dict[int, RemoteBlocks] = field(default_factory=dict)
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

    def assigned(self, assignment: Assignment) -> None:
        """There is a place for its KV, some of which may be here already."""
        self.assignment = assignment
        self.posted = assignment.prefix_tokens
        self.timings.prefix_blocks = assignment.prefix_tokens // assignment.block_size

    def flaw(self, announce: pb.Announce) -> str:
        """Why an announcement that leaves no gap cannot be read; empty: it can."""
        assert self.assignment is not None
        size, tokens = self.assignment.block_size, self.assignment.tokens
        known = {part.group: (0, tokens) for part in self.assignment.parts}
        for group, theirs in self.remote.items():
            begin = theirs.first_token
            known[group] = (begin, begin + len(theirs.blocks) * size)
        flaw = announce_flaw(announce, tokens, size, known)
        return flaw or ("" if self.understands(announce) else "other blocks than are expected")

    def understands(self, announce: pb.Announce) -> bool:
        """Whether an announcement that leaves no gap names every block that is wanted of it."""
        assert self.assignment is not None
        size, given = self.assignment.block_size, {part.group: part for part in announce.groups}
        end = min(announce.end_token, self.assignment.tokens)
        for part in self.assignment.parts:
            begin = max(self.announced, part.first_token)
            if begin < end:
                theirs = given.get(part.group)
                if theirs is None or theirs.first_token > begin:
                    return False
                if theirs.first_token + len(theirs.blocks) * size < end:
                    return False
        return True

    def hear(self, announce: pb.Announce) -> None:
        """Take in an announcement that is understood."""
        assert self.assignment is not None
        for part in announce.groups:
            known = self.remote.setdefault(part.group, RemoteBlocks(part.first_token))
            ahead = (part.first_token - known.first_token) // self.assignment.block_size
            known.blocks.extend(part.blocks[len(known.blocks) - ahead :])
        self.announced = max(self.announced, announce.end_token)

    def take_unread(self) -> list[tuple[int, int]]:
        """(remote, local) blocks that are announced, have a place and are not pulled yet."""
        place = self.assignment
        assert place is not None
        size, end = place.block_size, min(self.announced, place.tokens)
        pairs: list[tuple[int, int]] = []
        for part in place.parts:
            begin = max(self.posted, part.first_token)
            if begin < end:
                count, theirs = -(-(end - begin) // size), self.remote[part.group]
                ours_at = (begin - part.first_token) // size
                theirs_at = (begin - theirs.first_token) // size
                ours = part.blocks[ours_at : ours_at + count]
                pairs += zip(theirs.blocks[theirs_at : theirs_at + count], ours, strict=True)
        self.posted = max(self.posted, end)
        return pairs
