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
from dataclasses import dataclass, replace

from tasuki.engine.api import Leg, LegEnd, LegEndReason, RequestSpec, StepResult
from tasuki.engine.engine import Engine
from tasuki.engine.errors import GrammarBusyError
from tasuki.engine.grammar import GrammarSource
from tasuki.kv.clock import now_s
from tasuki.kv.handoff import Handoffs
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.convert import ROLES, add_waiting, failed_leg, load_to_wire
from tasuki.worker.drain import Drain, Held
from tasuki.worker.grammar_pool import Compiled, GrammarPool
from tasuki.worker.sessions import MOST_HELD, Session, Sessions
from tasuki.worker.state_log import StateLog
from tasuki.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
LOAD_AGE_S = 0.1
"""A change is reported to every router after so long at most, steps excepted."""
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
    number: int = 0
    grammar: GrammarSource | None = None


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The grammar of a request that waits for it, or why there is none."""

    request_id: str
    source: GrammarSource
    grammar: Compiled


@dataclass(frozen=True, slots=True)
class Aborted:
    session: Session
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
    session: Session
    setting: pb.RoleSetting


@dataclass(frozen=True, slots=True)
class Resynced:
    """A router has missed events of the prefix cache."""

    session: Session


@dataclass(frozen=True, slots=True)
class Flushed:
    """The prefix cache is to be emptied."""


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    """The worker is to end when nothing is lost by it.

    Attributes:
        on_drained: Called then, once, from the engine thread.
    """

    on_drained: Callable[[], None]


class Wake:
    """Something happened elsewhere (a KV message, a finished pull): take a turn."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = (
    Opened
    | Closed
    | Submitted
    | GrammarReady
    | Aborted
    | Retargeted
    | RoleSet
    | Resynced
    | Flushed
    | DrainOrdered
    | Wake
    | Stop
)


class EngineLoop(threading.Thread):
    """Runs the engine until told to stop.

    Args:
        engine: The engine; handed over, nobody else calls it from now on.
        handoffs: The KV side; likewise.
        info: What new routers are told first; its role may change.
        on_failure: Called from this thread with what escaped, when the loop dies of a defect.
        watchdog: Is told of every turn.
        grammars: Compiles those of requests.
        state_log: Is let write its lines.
    """

    def __init__(
        self,
        engine: Engine,
        handoffs: Handoffs,
        info: pb.WorkerInfo,
        inbox: queue.SimpleQueue[Command],
        on_failure: Callable[[BaseException], None],
        watchdog: Watchdog,
        grammars: GrammarPool,
        state_log: StateLog | None = None,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._handoffs = handoffs
        engine.on_started = handoffs.on_started
        self._info = info
        self._inbox = inbox
        self._on_failure = on_failure
        self._watchdog = watchdog
        self._state_log = state_log
        self._grammars = grammars
        self._compiling: dict[str, Submitted] = {}
        """Legs that the engine gets when their grammar is there."""
        self._sessions = Sessions()
        self._steps = 0
        self._reported_s = 0.0
        self._heartbeat_s = now_s()
        self._report_s = self._heartbeat_s
        """When routers get the load next, unless a step of theirs brings it."""
        self._stopping = False
        self._drain: Drain | None = None
        self._on_drained: Callable[[], None] = lambda: None

    def run(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        try:
            while not self._stopping:
                self._watchdog.progress(self._engine.counters().steps, self._engine.in_flight)
                if self._take():
                    self._handoffs.poll(now_s())
                if self._engine.has_work() and self._engine.due_in_s() == 0.0:
                    self._turn()  # launches, or collects what is over
                if now_s() >= self._report_s:
                    self._report()
                if self._drain is not None:
                    self._end_if_drained(self._drain)
        except BaseException as failure:
            log.exception("the engine thread failed")
            self._on_failure(failure)

    def _take(self) -> bool:
        """Apply what waits in the inbox; with nothing to compute or launch now, wait for it.

        Returns:
            Whether the handoffs may have something to do: False after a mere
            glance at a device that still computes.
        """
        until_s = min(self._report_s, self._handoffs.next_deadline() or self._report_s)
        if self._drain is not None:
            until_s = min(until_s, self._drain.next_look_s(now_s()))
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
        self._note_change()
        self._pass_cache_changes()
        if result.outputs or result.ended:
            for request_id in self._sessions.publish(self._steps, result, self._load()):
                self._abort(request_id, ())

    def _note_change(self) -> None:
        """The load is another one: routers get it soon."""
        self._sessions.load_changed()
        self._report_s = min(self._report_s, self._reported_s + LOAD_AGE_S)

    def _report(self) -> None:
        """Send the load to routers that do not have it; once a second to all."""
        self._reported_s = now_s()
        heartbeat = self._reported_s >= self._heartbeat_s
        if heartbeat:
            self._heartbeat_s = self._reported_s + HEARTBEAT_S
        self._report_s = self._heartbeat_s
        if self._engine.in_flight and self._watchdog.late:
            return  # routers are to notice that a device hangs; one that was idle does not
        if heartbeat:
            self._sessions.load_changed()
            if self._state_log is not None:
                self._state_log.tick(self._reported_s)
        self._pass_cache_changes()
        self._sessions.publish_load(self._steps, self._load)
        if self._sessions.caches_behind:
            self._report_s = min(self._report_s, self._reported_s + LOAD_AGE_S)

    def _pass_cache_changes(self) -> None:
        changes = self._engine.cache.chunks.take_changes()
        if changes is None or changes:
            self._sessions.cache_changed(changes, self._cached_chunks)

    def _cached_chunks(self) -> list[int]:
        return self._engine.cache.chunk_names(MOST_HELD)

    def _apply(self, command: Command) -> None:
        self._note_change()
        match command:
            case Opened(session):
                self._sessions.open(session)
                session.send(pb.WorkerMessage(info=self._info))
                self._reset_cache(session)
            case Closed(session):
                for request_id in self._sessions.close(session):
                    self._abort(request_id, ())
            case Submitted(session, spec):
                session.applied = max(session.applied, command.number)
                if not self._sessions.bind(spec.request_id, session):
                    log.warning(
                        "request_id=%s is not run: its stream is gone, or it runs", spec.request_id
                    )
                    return
                if command.grammar is None:
                    self._submit(command)
                else:
                    self._compile(command, command.grammar)
            case GrammarReady(request_id, source, grammar):
                waiting = self._compiling.get(request_id)
                if waiting is None or waiting.grammar != source:
                    pass
                elif isinstance(grammar, GrammarBusyError):
                    self._end_compiling(waiting, LegEndReason.REFUSED, str(grammar))
                else:
                    del self._compiling[request_id]
                    self._submit(replace(waiting, spec=replace(waiting.spec, grammar=grammar)))
            case Aborted(session, request_id, choices):
                if self._sessions.may_change(request_id, session):
                    self._abort(request_id, choices)
            case Retargeted(session, request_id, peer_engine_id, peer_endpoint):
                if not self._sessions.may_change(request_id, session):
                    pass
                elif (waiting := self._compiling.get(request_id)) is not None:
                    self._compiling[request_id] = replace(
                        waiting, peer_engine_id=peer_engine_id, peer_endpoint=peer_endpoint
                    )
                elif not self._handoffs.retarget(request_id, peer_engine_id):
                    message = "nothing is left here to hand over: prefill again"
                    session.send(failed_leg(request_id, message))
            case RoleSet(session, setting):
                if setting.epoch > self._info.role.epoch and setting.role in ROLES:
                    self._info.role.CopyFrom(setting)
                    self._sessions.broadcast(pb.WorkerMessage(info=self._info))
                else:  # its sender does not know the role that holds, or names none
                    session.send(pb.WorkerMessage(info=self._info))
            case Resynced(session):
                self._reset_cache(session)
            case Flushed():
                self._engine.flush_cache()
            case DrainOrdered(on_drained):
                self._drain, self._on_drained = Drain(now_s()), on_drained
                self._report_s = now_s()  # the sooner routers know, the fewer submits cross
            case Stop():
                self._stopping = True
            case Wake():
                pass

    def _end_if_drained(self, drain: Drain) -> None:
        held = Held(
            routers=len(self._sessions.all()),
            legs=self._sessions.requests,
            leased_blocks=self._handoffs.leased_blocks,
        )
        if drain.may_end(now_s(), held):
            self._on_drained()
            self._on_drained = lambda: None

    def _reset_cache(self, session: Session) -> None:
        self._pass_cache_changes()  # what happened before is in the list of all
        session.cache.reset(self._cached_chunks())

    def _submit(self, command: Submitted) -> None:
        spec = command.spec
        self._engine.submit(spec, command.arrived_s)
        if spec.leg is not Leg.COLOCATED:
            self._handoffs.submit(spec, command.peer_engine_id, command.peer_endpoint)

    def _compile(self, command: Submitted, source: GrammarSource) -> None:
        request_id, inbox = command.spec.request_id, self._inbox
        self._compiling[request_id] = command
        self._grammars.get(
            source, lambda grammar: inbox.put(GrammarReady(request_id, source, grammar))
        )

    def _abort_compiling(self, waiting: Submitted, choices: tuple[int, ...]) -> None:
        """Abort a leg that the engine does not have yet, or some of its choices."""
        spec = waiting.spec
        left = tuple(choice for choice in spec.choices if choice not in choices)
        if choices and left:
            self._compiling[spec.request_id] = replace(waiting, spec=replace(spec, choices=left))
            return
        self._end_compiling(waiting, LegEndReason.ABORTED)

    def _end_compiling(self, waiting: Submitted, reason: LegEndReason, message: str = "") -> None:
        """End a leg that the engine does not have yet."""
        del self._compiling[waiting.spec.request_id]
        ended = StepResult(ended=[LegEnd(waiting.spec.request_id, reason, message)])
        self._sessions.publish(self._steps, ended, self._load())

    def _abort(self, request_id: str, choices: tuple[int, ...]) -> None:
        if (waiting := self._compiling.get(request_id)) is not None:
            self._abort_compiling(waiting, choices)
            return
        whole = self._engine.abort(request_id, choices)
        if whole or not choices:
            self._handoffs.abort(request_id)

    def _load(self) -> pb.Load:
        load = self._engine_load()
        add_waiting(load, (waiting.spec for waiting in self._compiling.values()))
        load.draining = self._drain is not None
        return load

    def _engine_load(self) -> pb.Load:
        return load_to_wire(self._engine.load(), self._engine.counters(), self._handoffs)
