"""Whether a request may be decoded from the KV that was pulled for it.

Part of the state machine of `decode_side.py`, which acts on the verdict: no I/O, no clock. KV is
proven when all of it is here, its pulls were complete before the fence (`prefill_peers.py`), and
its digests are those of what was announced, where digests are asked for.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_handoff import DecodeHandoff
from tasuki.kv.digest import DigestCheck, Seal
from tasuki.kv.pairs import LossCause
from tasuki.kv.prefill_peers import PrefillPeers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loss:
    """The KV cannot be used."""

    cause: LossCause
    message: str


class DecodeProof:
    """Judges handoffs that have a place, and asks for what their proof still lacks.

    Args:
        config: times, and whether digests are asked for.
        counters: digests are counted here.
        peers: has the fence, and asks.
        identity: of the model, which digests are bound to.
    """

    def __init__(
        self,
        config: HandoffConfig,
        counters: HandoffCounters,
        peers: PrefillPeers,
        identity: bytes,
    ) -> None:
        self._config = config
        self._counters = counters
        self._peers = peers
        self._identity = identity

    def begin(self, handoff: DecodeHandoff) -> None:
        """The handoff has a place: digests of what is read into it are compared, if asked for."""
        one_in = self._config.digest_one_in
        if one_in and handoff.assignment is not None and self._peers.digests(handoff.peer):
            unit = math.gcd(handoff.assignment.block_size, handoff.peer_block_tokens)
            seal = Seal.of(self._identity, handoff.request_id, unit, one_in)
            handoff.check = DigestCheck(seal)

    def judge(self, handoff: DecodeHandoff, now_s: float) -> bool | Loss:
        """True: decode from it; False: not yet, what is missing was asked for."""
        if handoff.prefilled is None or handoff.assignment is None:
            return False
        total, said = handoff.assignment.tokens, handoff.prefilled.tokens
        if said != total:
            why = f"prefill worker has {said} tokens, {total} are expected"
            return Loss(LossCause.MESSAGE, why)
        if handoff.posted < total or handoff.orders:
            return False
        if handoff.last_done_s > self._peers.fence_s(handoff):
            if self._wait(handoff, now_s, leases=0.0):
                self._peers.renew(handoff.peer, [handoff], now_s)
            return False
        return handoff.check is None or self._compare(handoff, handoff.check, total, now_s)

    def give_up_s(self, handoff: DecodeHandoff) -> float | None:
        """When silence has lasted too long; None: nothing was asked."""
        if handoff.credited_s is None:
            return None
        if handoff.ask_until_s is not None:
            return handoff.ask_until_s
        heard_s = max(handoff.credited_s, handoff.greeted_s, handoff.acked_s)
        return heard_s + self._peers.lease_s(handoff.peer) * (1.0 + self._config.ask_leases)

    def _compare(
        self, handoff: DecodeHandoff, check: DigestCheck, total: int, now_s: float
    ) -> bool | Loss:
        if check.told < total:
            self._wait(handoff, now_s, leases=1.0)
            return False
        wrong = check.wrong()
        self._counters.kv_digests += check.compared
        if not wrong:
            return True
        self._counters.kv_digest_mismatches += 1
        message = check.verdict(handoff.peer, wrong)
        log.error("request_id=%s: %s", handoff.request_id, message)
        return Loss(LossCause.DIGEST, message)

    def _wait(self, handoff: DecodeHandoff, now_s: float, leases: float) -> bool:
        """Wait for an answer, for `leases` and what an answer takes. Whether that begins now."""
        if handoff.ask_until_s is not None:
            return False
        lease_s = self._peers.lease_s(handoff.peer)
        handoff.ask_until_s = now_s + lease_s * (leases + self._config.ask_leases)
        return True
