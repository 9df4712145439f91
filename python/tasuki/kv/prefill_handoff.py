"""One handoff as the prefill worker keeps it: plain state.

`prefill_side.py` moves it from state to state; `decode_peers.py` reads what to
say of it. Both run under the lock of `handoff.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tasuki.engine.api import Announced, LegEndReason
from tasuki.v1 import kv_pb2 as pb


@dataclass(slots=True)
class PrefillHandoff:
    """One PREFILL leg.

    Attributes:
        target: decode engine that gets the KV; empty after it gave the work back.
        wanted: the target has credit and is told everything.
        heard: `seq` of the last want or renewal of this target since it became the target.
        admitted: there was credit once; what is computed from then on is leased.
        announced: what may be read, each beginning where the one before ends.
        expires_s: end of the lease; None before the first announcement.
        residual: earlier targets that may still accept a read, and until when.
        past: earlier targets whose renewals must not be answered "alive".
        ending: set once nothing more is computed and the blocks only wait.
        leg_over: the engine dropped the leg by itself; only what it said is kept.
        digests: of announced blocks, for the target, in order; nothing if it asks for none.
        digests_ordered: announcements whose digests are there or being computed.
    """

    request_id: str
    target: str
    wanted: bool = False
    heard: int = 0
    admitted: bool = False
    scheduled: bool = False
    announced: list[Announced] = field(default_factory=list)
    prefilled: pb.Prefilled | None = None
    expires_s: float | None = None
    residual: dict[str, float] = field(default_factory=dict)
    past: set[str] = field(default_factory=set)
    ending: tuple[LegEndReason, str] | None = None
    leg_over: bool = False
    digests: list[pb.Digests] = field(default_factory=list)
    digests_ordered: int = 0

    @property
    def tokens(self) -> int:
        """Leading tokens whose KV may be read."""
        return self.announced[-1].end_token if self.announced else 0

    @property
    def num_blocks(self) -> int:
        """Blocks that hold these."""
        return sum(len(part.blocks) for item in self.announced for part in item.parts)

    @property
    def leased(self) -> bool:
        """Whether blocks are announced and not given up."""
        return self.expires_s is not None and not self.leg_over

    def leave_target(self) -> None:
        """Nobody gets the KV for now; digests are the next target's, which may have other units."""
        self.target, self.wanted, self.heard = "", False, 0
        self.digests, self.digests_ordered = [], 0

    def drop_residual(self, now_s: float) -> bool:
        """Forget earlier targets that may accept a read no more. Whether there were any."""
        over = [engine for engine, until_s in self.residual.items() if until_s <= now_s]
        for engine in over:
            del self.residual[engine]
        return bool(over)

    def deadlines(self) -> Iterator[float]:
        """When the lease ends, and when each earlier target's does."""
        if self.expires_s is not None:
            yield self.expires_s
        yield from self.residual.values()
