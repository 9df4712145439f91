"""What the first rank of a worker and the others say to each other, pickled.

Over a pipe, or from host to host over an authenticated connection (hosts.py).

    first rank ─▶ RankPlan, PoolShape, then orders until StopOrder or the pipe's end
    other rank ─▶ Fits, Ready; Failed at any time

A `StepOrder` is followed by the bytes of its slab. KV traffic has a pipe of its
own (kv/rank_channel.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from tasuki.execution.step_arrays import StepHeader
from tasuki.worker.config import Limits, WorkerConfig
from tasuki.worker.device import Dtypes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What a rank is built from; the same for all but `rank`.

    Attributes:
        config: The worker's settings; `host` is that of this rank.
        limits: What they come to on the device.
        dtypes: Settled by the first rank.
        device_type: `cpu` or `cuda`.
        rank: This one's number.
        port: Where the ranks meet, on this host's loopback device.
        device_index: This rank's GPU among those of its host.
    """

    config: WorkerConfig
    limits: Limits
    dtypes: Dtypes
    device_type: str
    rank: int = 0
    port: int = 0
    device_index: int = 0


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The pool that every rank is to have, and the longest request."""

    num_blocks: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Compute a step; its slab follows."""

    header: StepHeader


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy blocks, (from, to)."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ScrubOrder:
    """Overwrite blocks' slots from `first_slot` on with zeros."""

    blocks: tuple[int, ...]
    first_slot: int


class StopOrder:
    """The worker ends."""


@dataclass(frozen=True, slots=True)
class Fits:
    """So many bytes this rank's pool may take; None: that is not known here."""

    available_bytes: int | None


class Ready:
    """Everything is built."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank has ended, and why."""

    message: str


Order = StepOrder | CopyOrder | ScrubOrder | StopOrder
Report = Fits | Ready | Failed
