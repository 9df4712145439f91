"""What the two sides of a handoff want done: plain data, carried out by `handoff.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.kv.digest import UnitDigests
from tasuki.kv.ways import Way
from tasuki.v1 import kv_pb2


@dataclass(frozen=True, slots=True)
class ToPrefill:
    """Say `message` to the prefill engine `peer`; it may get lost."""

    peer: str
    message: kv_pb2.FromDecode


@dataclass(frozen=True, slots=True)
class ToDecode:
    """Say `message` to the decode engine `peer`; it may get lost."""

    peer: str
    message: kv_pb2.FromPrefill


@dataclass(frozen=True, slots=True)
class Pull:
    """Read blocks of `peer` into blocks of ours; answered with one `PullDone`.

    Attributes:
        order_id: names the order; unique for the life of this engine.
        pairs: (remote unit, local unit). A unit is a block where both sides' blocks have the same
            size, else a part of one (`transfer_plan.py`).
        check: local units whose digests are computed once they are read.
    """

    order_id: int
    peer: str
    pairs: Sequence[tuple[int, int]]
    check: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Post no more of this order. What is posted goes on: `PullDone` still comes."""

    order_id: int


@dataclass(frozen=True, slots=True)
class Redial:
    """`peer` has been silent: its stream may be dead without knowing; make a new one."""

    peer: str


@dataclass(frozen=True, slots=True)
class Digest:
    """Compute digests of units of our own pool; answered with one `Digested`."""

    order_id: int
    units: Sequence[int]
    unit_tokens: int


Effect = ToPrefill | ToDecode | Pull | CancelPull | Redial | Digest


@dataclass(frozen=True, slots=True)
class PullProgress:
    """A part of this order has arrived, and more of it is to come."""

    order_id: int


@dataclass(frozen=True, slots=True)
class PullDone:
    """Nothing of this order writes to our blocks any more.

    Attributes:
        posted_s: when its first transfer was posted, by the handoff's clock.
        finished_s: read off the clock after its last transfer was seen to end.
        moved_bytes: bytes that arrived.
        descriptors: runs of adjacent blocks that it took.
        error: empty, or why the blocks do not hold what was asked for.
        digests: of the units to check, as they are here; a part for each piece and rank.
        post_s: what handing its descriptors to the transport took.
        reconnects: connections that were made anew for it.
        way: how it travelled, of several ways the slowest; None: not known.
    """

    order_id: int
    posted_s: float
    finished_s: float
    moved_bytes: int
    descriptors: int
    error: str = ""
    digests: Sequence[UnitDigests] = ()
    post_s: float = 0.0
    reconnects: int = 0
    way: Way | None = None


@dataclass(frozen=True, slots=True)
class Digested:
    """The digests of a `Digest`, a part for each rank; `error`: why there are none."""

    order_id: int
    digests: Sequence[UnitDigests] = ()
    error: str = ""
