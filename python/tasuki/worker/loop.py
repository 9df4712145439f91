"""The engine thread: the only one that touches engine, handoff and sessions.

    router streams ─┐
    kv streams ─────┼──▶ inbox ──▶ apply ▶ poll handoffs ▶ step ▶ publish ──▶ router streams
    transfer thread ┘                └──────────── one turn ───────────┘

It sleeps on the inbox when there is nothing to compute, at most until the
handoff's next deadline or the next heartbeat.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tasuki.engine.api import Leg, RequestSpec, StepResult
from tasuki.engine.engine import Engine
from tasuki.kv.clock import now_s
from tasuki.kv.handoff import Handoffs
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.convert import failed_leg
from tasuki.worker.sessions import Session, Sessions
from tasuki.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
_POLL_S = 0.5e-3  # between looks at the device while a step runs on it
_SWITCH_S = 0.2e-3  # how long another thread may keep the interpreter: handoffs need three


@dataclass(frozen=True, slots=True)
class Opened:
    session: Session


@dataclass(frozen=True, slots=True)
class Closed:
    session: Session


@dataclass(frozen=True, slots=True)
class Submitted:
    session: Session
    spec: RequestSpec
    peer_engine_id: str
    peer_endpoint: str
    arrived_s: float


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retargeted:
    session: Session
    request_id: str
    peer_engine_id: str
    peer_endpoint: str


@dataclass(frozen=True, slots=True)
class RoleSet:
    role: pb.Role


class Wake:
    """Something happened elsewhere (a KV message, a finished pull): take a turn."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Opened | Closed | Submitted | Aborted | Retargeted | RoleSet | Wake | Stop


class EngineLoop(threading.Thread):
    """Runs the engine until told to stop.

    Args:
        engine: The engine; handed over, nobody else calls it from now on.
        handoffs: The KV side; likewise.
        info: What new routers are told first; its role may change.
        on_failure: Called from this thread with what escaped, when the loop dies of a defect.
        watchdog: Is told of every turn.
    """

    def __init__(
        self,
        engine: Engine,
        handoffs: Handoffs,
        info: pb.WorkerInfo,
        inbox: queue.SimpleQueue[Command],
        on_failure: Callable[[BaseException], None],
        watchdog: Watchdog,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._handoffs = handoffs
        engine.on_started = handoffs.on_started
        self._info = info
        self._inbox = inbox
        self._on_failure = on_failure
        self._watchdog = watchdog
        self._sessions = Sessions()
        self._steps = 0
        self._stopping = False

    def run(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        try:
            heartbeat_s = now_s()
            while not self._stopping:
                self._watchdog.progress(self._engine.counters().steps, self._engine.in_flight)
                if self._take(heartbeat_s):
                    self._handoffs.poll(now_s())
                if self._engine.has_work() and self._engine.due_in_s() == 0.0:
                    self._turn()  # launches, or collects what is over
                if now_s() >= heartbeat_s:
                    heartbeat_s = now_s() + HEARTBEAT_S
                    if not self._watchdog.late:  # routers are to notice that a device hangs
                        report = pb.StepReport(step=self._steps, load=self._load())
                        self._sessions.broadcast(pb.WorkerMessage(step=report))
        except BaseException as failure:
            log.exception("the engine thread failed")
            self._on_failure(failure)

    def _take(self, heartbeat_s: float) -> bool:
        """Apply what waits in the inbox; with nothing to compute or launch now, wait for it.

        Returns:
            Whether the handoffs may have something to do: False after a mere
            glance at a device that still computes.
        """
        until_s = min(heartbeat_s, self._handoffs.next_deadline() or heartbeat_s)
        glance = False
        if self._engine.has_work():
            look_s = now_s() + min(self._engine.due_in_s(), _POLL_S)
            glance = now_s() < look_s < until_s
            until_s = min(until_s, look_s)
        try:
            self._apply(self._inbox.get(timeout=max(0.0, until_s - now_s())))
        except queue.Empty:
            return not glance
        while not self._inbox.empty():  # nobody else takes from it
            self._apply(self._inbox.get())
        return True

    def _turn(self) -> None:
        result = self._engine.step(wait=False)
        self._steps += 1
        self._handoffs.on_step(result)
        self._publish(result)

    def _publish(self, result: StepResult) -> None:
        if result.outputs or result.ended:
            self._sessions.publish(self._steps, result, self._load())

    def _apply(self, command: Command) -> None:
        match command:
            case Opened(session):
                self._sessions.open(session)
                session.send(pb.WorkerMessage(info=self._info))
            case Closed(session):
                for request_id in self._sessions.close(session):
                    self._abort(request_id, ())
            case Submitted(session, spec, peer_engine_id, peer_endpoint, arrived_s):
                if not self._sessions.bind(spec.request_id, session):
                    log.warning(
                        "request_id=%s is not run: its stream is gone, or it runs", spec.request_id
                    )
                    return
                self._engine.submit(spec, arrived_s)
                if spec.leg is not Leg.COLOCATED:
                    self._handoffs.submit(spec, peer_engine_id, peer_endpoint)
            case Aborted(request_id, choices):
                self._abort(request_id, choices)
            case Retargeted(session, request_id, peer_engine_id, peer_endpoint):
                if not self._handoffs.retarget(request_id, peer_engine_id, peer_endpoint):
                    message = "nothing is left here to hand over: prefill again"
                    session.send(failed_leg(request_id, message))
            case RoleSet(role):
                self._info.role = role
                self._sessions.broadcast(pb.WorkerMessage(info=self._info))
            case Stop():
                self._stopping = True
            case Wake():
                pass

    def _abort(self, request_id: str, choices: tuple[int, ...]) -> None:
        whole = self._engine.abort(request_id, choices)
        if whole or not choices:
            self._handoffs.abort(request_id)

    def _load(self) -> pb.Load:
        engine = self._engine.load()
        counters = self._engine.counters()
        kv = self._handoffs.counters
        return pb.Load(
            role=self._info.role,
            waiting_requests=engine.waiting_requests,
            running_requests=engine.running_requests,
            waiting_prefill_tokens=engine.waiting_prefill_tokens,
            free_blocks=engine.free_blocks,
            total_blocks=engine.total_blocks,
            leased_blocks=self._handoffs.leased_blocks,
            quarantined_blocks=engine.quarantined_blocks,
            stuck_blocks=kv.stuck_blocks,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            decode_step_s=engine.decode_step_s,
            counters=pb.Counters(
                prompt_tokens_computed=counters.prompt_tokens_computed,
                prompt_tokens_cached=counters.prompt_tokens_cached,
                output_tokens=counters.output_tokens,
                steps=counters.steps,
                preemptions=counters.preemptions,
                kv_pulled_bytes=kv.kv_pulled_bytes,
                kv_pulled_blocks=kv.kv_pulled_blocks,
                kv_pulls=kv.kv_pulls,
                kv_pull_failures=kv.kv_pull_failures,
                kv_pull_timeouts=kv.kv_pull_timeouts,
                leases_granted=kv.leases_granted,
                leases_expired=kv.leases_expired,
            ),
        )
