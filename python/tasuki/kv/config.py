"""Settings and counters of the handoff."""

from __future__ import annotations

from dataclasses import dataclass, field

from tasuki.errors import TasukiError
from tasuki.kv.fleet import Fleet
from tasuki.kv.pairs import Pairs

LEASE_RANGE_S = (0.1, 3_600.0)
DIGESTS = {"off": 0, "sample": 16, "all": 1}  # --kv-digest: one unit in how many is compared


class HandoffConfigError(TasukiError):
    """A handoff setting is out of its range."""


@dataclass(frozen=True, slots=True)
class HandoffConfig:
    """Times of the handoff. Peers need not agree: the lease travels in the handshake.

    Attributes:
        lease_s: how long a prefill worker keeps announced blocks for a silent
            decode worker; within `LEASE_RANGE_S`.
        margin_fraction: share of the lease by which the decode worker's
            deadline lies before the lease's end: covers what two clocks drift
            apart within one lease; in (0, 0.5].
        heartbeats_per_lease: renewals sent in one lease; at least 2. The timer that
            sends them looks twice as often.
        park_leases: how long, in leases, a want waits for its request.
        ask_leases: how long, in leases, an answer is waited for once the
            deadline has passed; a worker in a long step is slow to answer.
        machine: see `kv.clock.machine`; workers of equal machines compare their clocks
            to measure exposed transfer time. Empty: unknown.
        pull_timeout_s: how long a pull may make no progress while its peer lives;
            at least 0.1. Then the KV is lost.
        fleet: certificates of the streams; None: they are plain.
        digest_one_in: what is pulled is compared with digests of what was announced, one
            unit in so many; 0: none.
    """

    lease_s: float = 10.0
    margin_fraction: float = 0.1
    heartbeats_per_lease: int = 5
    park_leases: float = 2.0
    ask_leases: float = 0.5
    machine: bytes = b""
    pull_timeout_s: float = 30.0
    fleet: Fleet | None = None
    digest_one_in: int = 0

    def __post_init__(self) -> None:
        limits = (
            ("lease_s", self.lease_s, *LEASE_RANGE_S),
            ("margin_fraction", self.margin_fraction, 0.001, 0.5),
            ("heartbeats_per_lease", self.heartbeats_per_lease, 2, 1_000),
            ("park_leases", self.park_leases, 0.1, 1_000.0),
            ("ask_leases", self.ask_leases, 0.01, 1_000.0),
            ("pull_timeout_s", self.pull_timeout_s, 0.1, 86_400.0),
            ("digest_one_in", self.digest_one_in, 0, 1 << 20),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                raise HandoffConfigError(f"{name} is {value}: use a value from {low} to {high}")

    def beat_s(self, lease_s: float) -> float:
        """How often to look whether a heartbeat is due for leases of so many seconds."""
        return lease_s / self.heartbeats_per_lease / 2


@dataclass(slots=True)
class HandoffCounters:
    """Since the worker's start: pulls (as decode worker), then leases (as prefill worker).

    Attributes:
        kv_pull_timeouts: handoffs given up because a pull made no progress.
        stuck_blocks: now in quarantine because of it, not since the start.
        kv_digests: digests that were compared, one for each unit and head.
        kv_digest_mismatches: handoffs whose KV was not what was announced.
        pairs: by prefill engine.
    """

    kv_pulled_bytes: int = 0
    kv_pulled_blocks: int = 0
    kv_pulls: int = 0
    kv_pull_failures: int = 0
    kv_pull_timeouts: int = 0
    stuck_blocks: int = 0
    kv_digests: int = 0
    kv_digest_mismatches: int = 0
    leases_granted: int = 0
    leases_expired: int = 0
    pairs: Pairs = field(default_factory=Pairs, compare=False, repr=False)
