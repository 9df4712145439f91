"""Router streams: whose request's tokens each gets, and what it is told of the prefix cache.

A `Session` is one router's stream. Its queue belongs to the asyncio thread;
the engine thread only ever hands messages over with `send`. What it is told of the prefix cache
are changes, and after a reset all that is held:

    changes of the engine ─▶ CacheFeed of each stream ─▶ KvEvents of its next report

A change overtakes what was held before it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from tasuki.engine.api import LegEnd, LegEndReason, Output, StepResult
from tasuki.engine.errors import FailureKind
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.convert import failed_leg, leg_end_to_wire, output_to_wire

MOST_HELD = 1 << 16
"""Chunks that a router is told of after a reset."""
MOST_PENDING = 1 << 16
"""Changes that wait for a router: with more, a reset is shorter."""
MOST_A_REPORT = 1_024
"""Chunks in one report: 8 bytes each."""
MESSAGE_BYTES = 64 << 20
"""gRPC's limit for a message between router and worker; a larger one breaks the stream."""
_MOST_SCORES_BYTES = MESSAGE_BYTES - (4 << 20)
"""Of an output with log-probabilities of its prompt: the message holds more than that."""
_SPLIT_BYTES = 4 << 20
"""With more in outputs of that kind, a step's report takes several messages."""


class CacheFeed:
    """The chunks that one router has not been told of."""

    def __init__(self) -> None:
        self._changes: dict[int, bool] = {}
        self._held: dict[int, None] = {}
        self._number = 0
        self._resets = False

    @property
    def is_behind(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._changes or self._held or self._resets)

    @property
    def overflows(self) -> bool:
        """Whether so much has changed that it must be reset."""
        return len(self._changes) > MOST_PENDING

    def reset(self, held: Iterable[int]) -> None:
        """Begin again: these are the chunks that are held, the last used first."""
        self._changes.clear()
        self._held = dict.fromkeys(held)
        self._resets = True

    def change(self, changes: Mapping[int, bool]) -> None:
        """Chunks were stored (True) or dropped; the last state of each counts."""
        self._changes.update(changes)
        if self._held:
            for name in changes:
                self._held.pop(name, None)

    def take(self) -> pb.KvEvents | None:
        """What the next report tells; None: nothing."""
        if not self.is_behind:
            return None
        self._number += 1
        names = list(islice(self._changes, MOST_A_REPORT))
        changes = {name: self._changes.pop(name) for name in names}
        held = list(islice(self._held, MOST_A_REPORT - len(names)))
        for name in held:
            del self._held[name]
        events = pb.KvEvents(
            number=self._number,
            reset=self._resets,
            stored=[name for name in names if changes[name]],
            dropped=[name for name in names if not changes[name]],
            held=held,
        )
        self._resets = False
        return events


class Session:
    """One router's stream, from its first byte to its last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[pb.WorkerMessage | None] = asyncio.Queue()
        """What the router is to get; None: the router has ended the stream."""
        self.applied = 0
        """Number of the last submit that the engine has; engine thread only."""
        self.load_version = 0
        """Which load the router has (`Sessions.load_changed`); engine thread only."""
        self.cache = CacheFeed()
        """What the router is to be told of the prefix cache; engine thread only."""

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message for the router. Any thread; the order of one caller is kept."""
        self._loop.call_soon_threadsafe(self.queue.put_nowait, message)


class Sessions:
    """All streams of a worker and the requests of each. Engine thread only."""

    def __init__(self) -> None:
        self._open: dict[Session, set[str]] = {}
        self._owner: dict[str, Session] = {}
        self._load_version = 0

    def open(self, session: Session) -> None:
        self._open[session] = set()

    def close(self, session: Session) -> set[str]:
        """Forget a stream; returns the requests that came over it and still run."""
        requests = self._open.pop(session, set())
        for request_id in requests:
            del self._owner[request_id]
        return requests

    def bind(self, request_id: str, session: Session) -> bool:
        """Route a new request's tokens to a stream.

        Another router that uses the id is told that the leg has ended; this one is
        not when it repeats itself: that would end the leg which runs.

        Returns:
            False when the stream is gone already or the id is in use: do not run it.
        """
        if session not in self._open:
            return False
        owner = self._owner.get(request_id, session)
        if owner is not session:
            session.send(_in_use(request_id))
        if request_id in self._owner:
            return False
        self._open[session].add(request_id)
        self._owner[request_id] = session
        return True

    def may_change(self, request_id: str, session: Session) -> bool:
        """Whether a stream may abort or retarget a request: another's is said to be in use."""
        if self._owner.get(request_id, session) is session:
            return True
        session.send(_in_use(request_id))
        return False

    def publish(self, step: int, result: StepResult, load: pb.Load) -> list[str]:
        """Send each router its part of a step: first and second tokens before the others.

        What comes last in a report reaches its client last, a hundred answers later.

        Returns:
            Requests that end here because an output does not fit into a message: the engine may
            still compute them.
        """
        reports: defaultdict[Session, _Report] = defaultdict(lambda: _Report(step, load))
        refused = []
        for output in sorted(result.outputs, key=_position):
            if (session := self._owner.get(output.request_id)) is not None:
                report = reports[session]
                wire = output_to_wire(output)
                size = wire.ByteSize() if output.prompt_logprobs else 0
                if size <= _MOST_SCORES_BYTES:
                    report.add(wire, size)
                else:
                    refused.append(output.request_id)
                    report.end(_too_large(output.request_id, size))
                    self._release(output.request_id)
        for ended in result.ended:
            if (session := self._release(ended.request_id)) is not None:
                reports[session].end(ended)
        for session, report in reports.items():
            for message in report.messages:
                self._send(session, message)
        return refused

    def _release(self, request_id: str) -> Session | None:
        """Forget a request that has ended; returns its stream."""
        if (session := self._owner.pop(request_id, None)) is not None:
            self._open[session].discard(request_id)
        return session

    def load_changed(self) -> None:
        """What routers know of the load is out of date."""
        self._load_version += 1

    def cache_changed(
        self, changes: Mapping[int, bool] | None, held: Callable[[], Iterable[int]]
    ) -> None:
        """Chunks entered or left the prefix cache: routers get it with their next report.

        Args:
            changes: By name, whether each is held; None: unknown, all routers begin again.
            held: All names.
        """
        for session in self._open:
            if changes is not None:
                session.cache.change(changes)
            if changes is None or session.cache.overflows:
                session.cache.reset(held())

    @property
    def caches_behind(self) -> bool:
        """Whether some router has not been told all of the prefix cache."""
        return any(session.cache.is_behind for session in self._open)

    def publish_load(self, step: int, load: Callable[[], pb.Load]) -> None:
        """Send the load to every router that has not got it since it changed, or lacks events."""
        version = self._load_version
        behind = [s for s in self._open if s.load_version != version or s.cache.is_behind]
        if behind:
            current = load()
            for session in behind:
                self._send(session, pb.StepReport(step=step, load=current))

    def _send(self, session: Session, report: pb.StepReport) -> None:
        report.applied_submits = session.applied
        if (events := session.cache.take()) is not None:
            report.kv.CopyFrom(events)
        session.load_version = self._load_version
        session.send(pb.WorkerMessage(step=report))

    def broadcast(self, message: pb.WorkerMessage) -> None:
        """Send the same to every router."""
        for session in self.all():
            session.send(message)

    def all(self) -> Collection[Session]:
        return tuple(self._open)

    @property
    def requests(self) -> int:
        """Legs of all routers that have not ended."""
        return len(self._owner)


def _position(output: Output) -> int:
    return output.position


def _in_use(request_id: str) -> pb.WorkerMessage:
    return failed_leg(request_id, f"the request id {request_id} is in use by another router")


def _too_large(request_id: str, size: int) -> LegEnd:
    message = (
        f"the log-probabilities of the prompt take {size} bytes, a message to the router may have"
        f" {_MOST_SCORES_BYTES}: ask for fewer logprobs, or echo a shorter prompt"
    )
    return LegEnd(request_id, LegEndReason.FAILED, message, failure=FailureKind.CLIENT)


class _Report:
    """One router's part of a step, in messages that are sent one after another.

    Only the first has the load.
    """

    def __init__(self, step: int, load: pb.Load) -> None:
        self.messages = [pb.StepReport(step=step, load=load)]
        self._bytes = 0

    def add(self, output: pb.Output, size: int) -> None:
        """Append an output that takes `size` bytes; 0: so few that they do not count."""
        if self._bytes and self._bytes + size > _SPLIT_BYTES:
            self.messages.append(pb.StepReport(step=self.messages[0].step))
            self._bytes = 0
        self._bytes += size
        self.messages[-1].outputs.append(output)

    def end(self, ended: LegEnd) -> None:
        """Append the end of a leg, whose outputs came before."""
        self.messages[-1].ended.append(leg_end_to_wire(ended))
