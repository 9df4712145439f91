"""The one object of the KV side that the engine thread talks to.

Wires the two state machines to the streams (`link.py`, asyncio loop) and, over
all ranks (`ranked.py`), to the transfer threads (`puller.py`). Both put what
happened into an inbox and wake the engine thread; `poll` takes it out. So the
engine is touched by the engine thread only. A step may take longer than a lease, so
the loop's thread does what needs no engine: it sends heartbeats, answers wants and
renewals, and orders the pull of announced blocks that have a place here. A lock keeps
the two threads apart; the loop's thread never waits for it, but leaves a message to
the engine thread, and tries a heartbeat again.

    engine thread:  submit abort retarget
                    on_started on_step poll ──▶ PrefillSide, DecodeSide ──▶ effects
                                        ▲                   ▲                  │
    inbox  ◀── streams (loop), puller ──┘                   │                  ▼
                  ├── wants, renewals, announced blocks ────┤          streams, puller
                  └── heartbeats ───────────────────────────┘

`carrier.py` carries the effects out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from tasuki.engine.api import KvHost, Leg, LegEndReason, RequestSpec, StepResult
from tasuki.errors import TasukiError
from tasuki.kv.carrier import Carrier, Streams
from tasuki.kv.clock import now_s as clock_now_s
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.decode_peers import DigestSource
from tasuki.kv.decode_side import DecodeSide
from tasuki.kv.effects import Digested, PullDone, PullProgress
from tasuki.kv.layout import CacheLayout
from tasuki.kv.link import (
    Connected,
    Disconnected,
    FromDecodeEngine,
    FromPrefillEngine,
    Greeted,
    HandoffServicer,
    LinkEvent,
    Refused,
)
from tasuki.kv.prefill_side import PrefillSide
from tasuki.kv.puller import PeerFailed, Puller, PullerReport
from tasuki.kv.rank_channel import KvRankError, RemoteRanks
from tasuki.kv.ranked import RankedPuller
from tasuki.kv.transport import Transport, rank_pool
from tasuki.v1 import kv_pb2

__all__ = ["HandoffConfig", "HandoffCounters", "Handoffs"]

log = logging.getLogger(__name__)

_BUSY_S = 1e-3  # until a heartbeat is tried again that found the engine thread at work here

_Event = LinkEvent | PullerReport


class HandoffDefectError(RuntimeError):
    """A transfer thread died: nothing can be pulled any more."""


class Handoffs:
    """Every handoff of this engine, on either side.

    Args:
        host: the engine.
        config: times.
        transport: registered with the engine's pool; handed over.
        layout: of that pool.
        identity: of the model (16 bytes); peers must have the same.
        engine_id: new at every start.
        loop: where the streams run; may not be running yet.
        wake: called from other threads when `poll` has something to do.
        clock: seconds, suspended time counted.
        ranks: pipes to the KV side (`KvRank`) of ranks 1, 2, ...; handed over.

    Raises:
        KvRankError: a rank did not tell of its pool.
    """

    def __init__(
        self,
        host: KvHost,
        config: HandoffConfig,
        transport: Transport,
        layout: CacheLayout,
        identity: bytes,
        engine_id: str,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None],
        clock: Callable[[], float] = clock_now_s,
        ranks: Sequence[Connection] = (),
    ) -> None:
        self.counters = HandoffCounters()
        self._digests_asked: dict[str, kv_pb2.DigestRequest] = {}  # written by the loop's thread
        digests = DigestSource(identity, layout.block_size, self._digests_asked)
        self._prefill = PrefillSide(host, config, self.counters, digests)
        self._decode = DecodeSide(host, config, self.counters, identity)
        self._engine_id = engine_id
        self._config = config
        self._loop = loop
        self._wake = wake
        self._clock = clock
        self._lock = threading.RLock()  # of both machines and their effects
        self._inbox: deque[tuple[_Event, float]] = deque()  # with the time of each
        self._deadline_s: float | None = None
        self._beat_s = config.beat_s(config.lease_s)  # loop's thread only, as is the next
        self._beat: asyncio.TimerHandle | None = None
        self._closed = False
        asked = kv_pb2.DigestRequest(block_size=layout.block_size, one_in=config.digest_one_in)
        self._streams = Streams(
            loop,
            identity,
            engine_id,
            self._make_reply,
            self._hear,
            config.fleet,
            asked if config.digest_one_in else None,
        )
        puller = Puller(transport, self._put, clock)
        remote = RemoteRanks(ranks, self._put)
        self._threads = [puller, remote] if ranks else [puller]
        self._pools = [rank_pool(transport), *remote.pools]
        layouts = [pool.layout for pool in self._pools]
        assert all(x.pool.num_blocks == layout.num_blocks for x in layouts), "register first"
        self._pullers = RankedPuller(layouts, [puller.put, *remote.put])
        self._carrier = Carrier(self._streams, self._pullers, self._decode)
        self._stop = (remote.close, puller.stop)
        for thread in self._threads:
            thread.start()
        self._streams.in_loop(self._keep_beating)

    # What the worker reads.

    @property
    def servicer(self) -> HandoffServicer:
        """Serves the streams of decode engines."""
        return self._streams.servicer

    @property
    def leased_blocks(self) -> int:
        """Prefill: blocks announced and not given up."""
        return self._prefill.leased_blocks

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request."""
        return self._prefill.idle and self._decode.idle

    def next_deadline(self) -> float | None:
        """When `poll` is due next if nothing wakes it, or sooner; None: never."""
        return self._deadline_s

    # What the engine thread tells.

    def submit(self, spec: RequestSpec, peer_engine_id: str, peer_endpoint: str) -> None:
        """A PREFILL or DECODE leg, after the engine took it."""
        with self._lock:
            if spec.leg is Leg.PREFILL:
                self._prefill.submit(spec.request_id, peer_engine_id, self._clock())
            elif spec.leg is Leg.DECODE:
                self._carrier.dial(peer_engine_id, peer_endpoint)
                now_s = self._clock()
                self._decode.submit(spec.request_id, peer_engine_id, now_s, spec.waited_s)
            self._finish_turn()

    def abort(self, request_id: str) -> bool:
        """The router aborts a whole request (the engine was told already).

        Returns:
            Whether a handoff goes by that name: then the leg's end comes from
            here, if the engine has not ended it.
        """
        with self._lock:
            now_s = self._clock()
            known = self._prefill.abort(request_id, now_s)
            known = self._decode.abort(request_id, now_s) or known
            self._finish_turn()
            return known

    def retarget(self, request_id: str, engine_id: str) -> bool:
        """Hand a PREFILL leg over to another decode worker, which dials us.

        Returns:
            False when there is nothing (any more) to hand over.
        """
        with self._lock:
            known = self._prefill.retarget(request_id, engine_id, self._clock())
            self._finish_turn()
            return known

    def on_started(self, request_ids: Sequence[str]) -> None:
        """The first chunks of PREFILL legs are about to be computed: places are needed.

        Said before the step, the places are there when the step announces blocks, and
        these are pulled at once. Does not call the engine.
        """
        with self._lock:
            self._prefill.on_started(request_ids)
            self._carry_out()

    def on_step(self, result: StepResult) -> None:
        """What a step brought, whether or not it concerns a handoff."""
        with self._lock:
            self._prefill.on_step(result.announced, result.prefilled, self._clock())
            for ended in result.ended:
                self.on_leg_ended(ended.request_id)
            self._finish_turn()

    def on_leg_ended(self, request_id: str) -> None:
        """A leg ended; harmless for unknown ones and when repeated."""
        with self._lock:
            now_s = self._clock()
            self._prefill.on_leg_ended(request_id, now_s)
            self._decode.on_leg_ended(request_id, now_s)
            self._carry_out()

    def poll(self, now_s: float) -> None:
        """Take what the other threads brought, then let time pass.

        Events are given the time at which they are taken out, read after that:
        a lease renewed with a stale time would end before its holder thinks. When
        they happened is told besides, for the account of where the time went.

        Raises:
            HandoffDefectError: a transfer thread is dead.
        """
        with self._lock:
            while self._inbox:
                event, heard_s = self._inbox.popleft()
                self._on_event(event, heard_s, self._clock())
            self._prefill.tick(now_s)
            self._decode.tick(now_s)
            self._finish_turn()
            self._carrier.hang_up_needless()
        if not self._closed and not all(thread.is_alive() for thread in self._threads):
            raise HandoffDefectError("a KV transfer thread died; its error is in the log")

    def close(self) -> None:
        """Stop the transfer thread and the streams."""
        if self._closed:
            return
        self._closed = True
        for stop in self._stop:
            stop()
        self._streams.close()

    # Inside.

    def _make_reply(self) -> kv_pb2.HelloReply:
        return kv_pb2.HelloReply(
            engine_id=self._engine_id,
            lease_s=self._config.lease_s,
            pools=self._pools,
            digests=True,
        )

    def _put(self, event: _Event) -> None:
        """Called from any thread."""
        self._inbox.append((event, self._clock()))
        self._wake()

    def _on_event(self, event: _Event, heard_s: float, now_s: float) -> None:
        match event:
            case FromDecodeEngine(peer, message):
                self._prefill.on_message(peer, message, now_s)
            case FromPrefillEngine(peer, message):
                self._decode.on_message(peer, message, now_s, heard_s)
            case PullDone():
                if (whole := self._pullers.ended(event)) is not None:
                    self._decode.on_pull_done(whole, now_s)
            case Digested():
                if (digested := self._pullers.digested(event)) is not None:
                    self._prefill.on_digested(digested)
            case PullProgress(part):
                self._decode.on_pull_progress(self._pullers.whole(part), now_s)
            case Connected(peer, reply):
                self._on_connected(peer, reply, now_s)
            case Disconnected(peer):
                self._carrier.disconnected(peer)
            case Refused(peer, message, gone):
                reason = LegEndReason.KV_LOST if gone else LegEndReason.FAILED
                self._on_peer_gone(peer, message, reason, now_s)
            case PeerFailed(rank, message):
                if (engine := self._pullers.engine_of(rank)) is not None:
                    self._on_peer_gone(engine, message, LegEndReason.KV_LOST, now_s)

    def _on_connected(self, peer: str, reply: kv_pb2.HelloReply, now_s: float) -> None:
        if not self._carrier.has_link(peer):
            return  # hung up meanwhile
        try:
            self._pullers.connect(peer, reply.pools)
        except TasukiError as error:
            self._on_peer_gone(peer, str(error), LegEndReason.FAILED, now_s)
            return
        self._carrier.connected(peer)
        self.counters.pairs.of(peer).transport = reply.pools[0].layout.transport
        block_tokens = reply.pools[0].layout.block_size
        if self._config.digest_one_in and not reply.digests:
            log.warning(
                "prefill worker %s sends no digests: its KV is not checked (--kv-digest); run the"
                " same version of tasuki",
                peer,
            )
        self._decode.on_connected(peer, reply.lease_s, block_tokens, now_s, reply.digests)

    def _on_peer_gone(self, peer: str, message: str, reason: LegEndReason, now_s: float) -> None:
        log.warning("prefill worker %s: %s", peer, message)
        self._decode.on_peer_gone(peer, message, now_s, reason)
        self._carry_out()
        self._carrier.hang_up(peer)

    def _finish_turn(self) -> None:
        """Do what the machines want done, and note when time alone brings more."""
        self._carry_out()
        deadlines = (self._prefill.next_deadline(), self._decode.next_deadline())
        self._deadline_s = min((d for d in deadlines if d is not None), default=None)

    def _carry_out(self) -> None:
        """Do what the machines want done; in order for each peer."""
        self._carrier.carry_out(self._prefill.drain() + self._decode.drain())

    # In the loop's thread.

    def _hear(self, event: LinkEvent) -> None:
        """What came over a stream; what cannot be read ahead is for the engine thread."""
        if isinstance(event, Greeted):  # before any message of that stream
            if event.digests is None:
                self._digests_asked.pop(event.peer, None)
            else:
                self._digests_asked[event.peer] = event.digests
            return
        if isinstance(event, Connected):
            self._beat_s = min(self._beat_s, self._config.beat_s(event.reply.lease_s))
            self._keep_beating()
        if not self._read_ahead(event):
            self._put(event)

    def _read_ahead(self, event: LinkEvent) -> bool:
        """Whether all is done that the message means, but for what `poll` tells the engine."""
        if isinstance(event, FromDecodeEngine):
            peer, request = event.peer, event.message
            return self._ahead(lambda: self._prefill.read_ahead(peer, request, self._clock()))
        if isinstance(event, FromPrefillEngine) and event.message.HasField("announce"):
            peer, announce = event.peer, event.message.announce
            return self._ahead(lambda: self._decode.read_ahead(peer, announce, self._clock()))
        return False

    def _keep_beating(self) -> None:
        """Heartbeats to prefill workers, now and from now on."""
        if self._beat is not None:
            self._beat.cancel()
        if self._closed:
            return
        sent = self._ahead(lambda: self._decode.beat(self._clock()))
        delay_s = self._beat_s if sent else _BUSY_S
        self._beat = self._loop.call_later(
            delay_s, lambda: self._streams.in_loop(self._keep_beating)
        )

    def _ahead(self, act: Callable[[], bool]) -> bool:
        """Let a machine act, if the engine thread does not use it: what `act` returns, or False."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            done = act()
            with contextlib.suppress(KvRankError):  # `poll` finds the rank gone
                self._carry_out()
            if self._prefill.tells_engine:
                self._wake()
            return done
        finally:
            self._lock.release()
