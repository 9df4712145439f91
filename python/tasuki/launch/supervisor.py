"""Keeps a set of processes running: start, readiness, restart with backoff, end.

Everything here runs on the main thread; news arrive through one queue.
"""

from __future__ import annotations

import queue
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tasuki.errors import ERROR_PREFIX
from tasuki.launch.backoff import Backoff, BackoffPolicy
from tasuki.launch.errors import LaunchError
from tasuki.launch.forking import Starter, spawn
from tasuki.launch.process import Child, ChildIo, Exited, Ready, describe_exit
from tasuki.launch.topology import ProcessSpec, with_port

_PROGRESS_EVERY_S = 5.0
_KILL_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the end: a signal, or the work is done.

    Attributes:
        code: The launcher's exit code.
    """

    code: int


class StoppedError(Exception):
    """A `Stop` came while something else was awaited."""

    def __init__(self, code: int) -> None:
        """Keep the exit code."""
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class _Member:
    spec: ProcessSpec
    backoff: Backoff
    child: Child | None = None
    address: str = ""
    restart_at_s: float | None = None


def say(message: str) -> None:
    """One line of the launcher's own news, on stderr."""
    print(f"tasuki: {message}", file=sys.stderr, flush=True)


def last_words(tail: Iterable[str]) -> list[str]:
    """What of a dead process's last lines explains its end: its error if it names one."""
    lines = list(tail) or ["(no output)"]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith(ERROR_PREFIX):
            return [lines[index].removeprefix(ERROR_PREFIX), *lines[index + 1 :]]
    return lines


class Supervisor:
    """Owns the children.

    Attributes:
        post: Puts an event into the queue; safe from any thread and from signal handlers.
        died: Whether any child ended by itself.
    """

    def __init__(
        self,
        log_dir: Path,
        echo: bool,
        policy: BackoffPolicy | None = None,
        starter: Starter = spawn,
    ) -> None:
        """Own no child yet; logs go to `log_dir`, which must exist."""
        self._starter = starter
        self._log_dir = log_dir
        self._echo = echo
        self._policy = policy or BackoffPolicy()
        self._members: dict[str, _Member] = {}
        self._events: queue.SimpleQueue[Ready | Exited | Stop] = queue.SimpleQueue()
        self.post: Callable[[Ready | Exited | Stop], None] = self._events.put
        self.died = False

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Start one process for each of `specs`."""
        for spec in specs:
            member = _Member(spec, Backoff(self._policy))
            self._members[spec.name] = member
            member.child = self._spawn(spec)

    def await_ready(self, names: Collection[str], timeout_s: float) -> list[str]:
        """Wait until all of `names` are ready, and give their addresses in that order.

        Raises:
            LaunchError: One of the children ended, with its own last words, or
                the time is over.
            StoppedError: A `Stop` came.
        """
        begun_s = time.monotonic()
        told_s = begun_s
        while waiting := [n for n in names if not self._members[n].address]:
            now_s = time.monotonic()
            if now_s - begun_s > timeout_s:
                raise LaunchError(
                    f"{', '.join(waiting)} not ready after {timeout_s:g} s; "
                    f"see {self._log_dir}, or give it longer: --startup-timeout"
                )
            if now_s - told_s >= _PROGRESS_EVERY_S:
                told_s = now_s
                say(f"loading: {', '.join(waiting)} ({now_s - begun_s:.0f} s)")
            self._take(timeout_s=0.5, restart=False)
        return [self._members[n].address for n in names]

    def await_condition(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Poll `holds` until it does; a child's end or a `Stop` ends it as in `await_ready`."""
        begun_s = time.monotonic()
        while not holds():
            if time.monotonic() - begun_s > timeout_s:
                raise LaunchError(f"{what}: not so after {timeout_s:g} s; see {self._log_dir}")
            self._take(timeout_s=0.05, restart=False)

    def run(self) -> int:
        """Restart what dies, until a `Stop`; gives its exit code."""
        while True:
            try:
                self._take(timeout_s=self._restart_due(), restart=True)
            except StoppedError as stopped:
                return stopped.code

    def stop(self, names: Collection[str], grace_s: float) -> None:
        """End the named children: SIGTERM, and SIGKILL after `grace_s` or on another `Stop`."""
        for name in names:
            if name in self._members:
                self._members[name].restart_at_s = None
        self._signal(names, signal.SIGTERM)
        if not self._await_end(names, grace_s):
            self._signal(names, signal.SIGKILL)
            if not self._await_end(names, _KILL_GRACE_S, hurry=False):
                say(f"could not end {', '.join(self._alive(names))}")

    def names(self) -> list[str]:
        """All children's names."""
        return list(self._members)

    def _spawn(self, spec: ProcessSpec) -> Child:
        prefix = f"{spec.name:<9} | "

        def echo(line: str) -> None:
            if self._echo:
                sys.stderr.write(f"{prefix}{line}\n")

        return Child(
            spec, ChildIo(self._log_dir / f"{spec.name}.log", echo, self.post), self._starter
        )

    def _take(self, timeout_s: float | None, restart: bool) -> None:
        try:
            event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            event = None
        match event:
            case Stop():
                raise StoppedError(event.code)
            case Ready():
                self._on_ready(event)
            case Exited():
                self._on_exit(event, restart)
            case None:
                pass
        self._restart_what_is_due()

    def _on_ready(self, event: Ready) -> None:
        member = self._members[event.child.spec.name]
        if member.child is not event.child:
            return
        if member.address:
            say(f"{member.spec.name} is back")
        member.address = event.address
        member.spec = with_port(member.spec, event.address)

    def _on_exit(self, event: Exited, restart: bool) -> None:
        member = self._members[event.child.spec.name]
        if member.child is not event.child:
            return
        member.child = None
        self.died = True
        log = self._log_dir / f"{member.spec.name}.log"
        how = describe_exit(event.code)
        if not restart:
            words = "\n".join(f"  {line}" for line in last_words(event.child.tail))
            raise LaunchError(
                f"{member.spec.name} ended during start-up ({how}); it said:\n{words}\n"
                f"Its whole log: {log}"
            )
        now_s = time.monotonic()
        delay_s = member.backoff.next_delay_s(now_s - event.child.started_s)
        member.restart_at_s = now_s + delay_s
        say(f"{member.spec.name} died ({how}); starting it again in {delay_s:g} s; its log: {log}")

    def _restart_due(self) -> float | None:
        due = [m.restart_at_s for m in self._members.values() if m.restart_at_s is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _restart_what_is_due(self) -> None:
        for member in self._members.values():
            if member.restart_at_s is not None and member.restart_at_s <= time.monotonic():
                member.restart_at_s = None
                member.child = self._spawn(member.spec)

    def _signal(self, names: Collection[str], number: signal.Signals) -> None:
        for name in self._alive(names):
            child = self._members[name].child
            if child is not None:
                child.signal(number)

    def _alive(self, names: Collection[str]) -> list[str]:
        return [n for n in names if n in self._members and self._members[n].child is not None]

    def _await_end(self, names: Collection[str], timeout_s: float, hurry: bool = True) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self._alive(names):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            try:
                event = self._events.get(timeout=left_s)
            except queue.Empty:
                return False
            if isinstance(event, Stop) and hurry:
                say("ending at once")
                return False
            if isinstance(event, Exited):
                member = self._members[event.child.spec.name]
                if member.child is event.child:
                    member.child = None
        return True
