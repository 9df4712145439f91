"""Keeps a set of processes running: start, readiness, restart with backoff, end.

Everything here runs on the main thread; news arrive through one queue.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tasuki.errors import ERROR_PREFIX
from tasuki.launch.backoff import Backoff, BackoffPolicy
from tasuki.launch.errors import LaunchError
from tasuki.launch.forking import Starter, spawn
from tasuki.launch.process import Child, ChildIo, Exited, Ready
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


@dataclass(frozen=True, slots=True)
class Call:
    """Something to do on the main thread, between other events, while `run` runs."""

    function: Callable[[], None]


Event = Ready | Exited | Stop | Call


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
    again: ProcessSpec | None = None  # at the port that it has had
    child: Child | None = None
    address: str = ""
    restart_at_s: float | None = None
    retiring: bool = False


def say(message: str) -> None:
    """One line of the launcher's own news, on stderr."""
    tell(f"tasuki: {message}", sys.stderr)


def tell(text: str, stream: TextIO) -> None:
    """Print a text. An error of the stream is ignored: workers and router run without a reader."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # The reader is gone for good. Without this the exit status would be that of a failed flush.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except OSError:
        pass  # the disk is full, for now


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
        on_ready: Callable[[str, str], None] = lambda name, address: None,
    ) -> None:
        """Own no child yet.

        Args:
            log_dir: Gets the logs; it must exist.
            echo: Show the children's output on stderr.
            policy: When the dead are started again.
            starter: Starts a process.
            on_ready: Called with a child's name and address whenever it is ready.
        """
        self._starter = starter
        self._on_ready_hook = on_ready
        self._log_dir = log_dir
        self._echo = echo
        self._policy = policy or BackoffPolicy()
        self._members: dict[str, _Member] = {}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self._later: list[tuple[float, Callable[[], None]]] = []  # when, what
        self.post: Callable[[Event], None] = self._events.put
        self.died = False

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Start one process for each of `specs`."""
        for spec in specs:
            member = _Member(spec, Backoff(self._policy))
            self._members[spec.name] = member
            member.child = self._spawn(spec)

    def await_ready(
        self, names: Collection[str], timeout_s: float, restart: bool = False
    ) -> list[str]:
        """Wait until all of `names` are ready, and give their addresses in that order.

        Args:
            names: Children that were started.
            timeout_s: For all of them.
            restart: Whether others that die are started again; else their end is an error, too.

        Raises:
            LaunchError: One of the children ended, with its own last words, or
                the time is over.
            StoppedError: A `Stop` came.
        """
        required = set(names) if restart else None
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
            self._take(timeout_s=0.5, required=required)
        return [self._members[n].address for n in names]

    def await_condition(self, missing: Callable[[], str], timeout_s: float) -> None:
        """Poll until nothing is missing; a child's end or a `Stop` ends it as in `await_ready`.

        Args:
            missing: What is missing, for the error; empty: nothing.
            timeout_s: Until it is an error.
        """
        begun_s = time.monotonic()
        while what := missing():
            if time.monotonic() - begun_s > timeout_s:
                raise LaunchError(f"{what}, after {timeout_s:g} s; see {self._log_dir}")
            self._take(timeout_s=0.05)

    def wait(self, seconds: float, restart: bool = False) -> None:
        """Wait for one event, for so many seconds at most, and handle it.

        Args:
            seconds: At most.
            restart: Whether children that die are started again; else their end is an error.

        Raises:
            LaunchError: A child ended.
            StoppedError: A `Stop` came.
        """
        self._take(timeout_s=seconds, required=() if restart else None)

    def run(self) -> int:
        """Restart what dies and make the calls that come, until a `Stop`; gives its exit code."""
        while True:
            try:
                self._take(timeout_s=self._next_due(), required=())
                while self._calls:
                    self._calls.popleft()()
            except StoppedError as stopped:
                return stopped.code

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have `run` call a function between other events. For the main thread."""
        self._later.append((time.monotonic() + seconds, function))

    def retire(self, names: Collection[str], grace_s: float) -> None:
        """End some children for good, while the others are kept running.

        Args:
            names: Whom; they are told by SIGTERM to end when their work is done.
            grace_s: Then they are killed.

        Raises:
            StoppedError: A `Stop` came; the children are still there.
        """
        for name in names:
            self._members[name].retiring = True
            self._members[name].restart_at_s = None
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_GRACE_S)):
            self._signal(names, number)
            deadline_s = time.monotonic() + patience_s
            while self._alive(names) and (left_s := deadline_s - time.monotonic()) > 0:
                self._take(timeout_s=min(left_s, 0.5), required=())
        if left := self._alive(names):
            say(f"could not end {', '.join(left)}")
        for name in names:
            del self._members[name]

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

    def _take(self, timeout_s: float | None, required: Collection[str] | None = None) -> None:
        """Handle one event, if one comes in time.

        Args:
            timeout_s: None: wait for it.
            required: Whose end is an error, others are restarted; None: everybody's.
        """
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
                self._on_exit(event, required)
            case Call():
                self._calls.append(event.function)
            case None:
                pass
        self._do_what_is_due()

    def _on_ready(self, event: Ready) -> None:
        member = self._member(event.child)
        if member is None:
            return
        if member.address:
            say(f"{member.spec.name} is back")
        member.address = event.address
        member.again = with_port(member.spec, event.address)
        if not member.retiring:
            self._on_ready_hook(member.spec.name, event.address)

    def _on_exit(self, event: Exited, required: Collection[str] | None) -> None:
        member = self._member(event.child)
        if member is None:
            return
        member.child = None
        if member.retiring:
            return
        self.died = True
        log = self._log_dir / f"{member.spec.name}.log"
        how = event.how
        if required is None or member.spec.name in required:
            words = "\n".join(f"  {line}" for line in last_words(event.child.tail))
            raise LaunchError(
                f"{member.spec.name} ended during start-up ({how}); it said:\n{words}\n"
                f"Its whole log: {log}"
            )
        now_s = time.monotonic()
        delay_s = member.backoff.next_delay_s(now_s - event.child.started_s)
        member.restart_at_s = now_s + delay_s
        say(f"{member.spec.name} died ({how}); starting it again in {delay_s:g} s; its log: {log}")

    def _member(self, child: Child) -> _Member | None:
        """Whose present process `child` is; None: it has been replaced or given up."""
        member = self._members.get(child.spec.name)
        return member if member is not None and member.child is child else None

    def _next_due(self) -> float | None:
        due = [m.restart_at_s for m in self._members.values() if m.restart_at_s is not None]
        due += [at_s for at_s, _ in self._later]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _do_what_is_due(self) -> None:
        now_s = time.monotonic()
        self._calls += [function for at_s, function in self._later if at_s <= now_s]
        self._later = [later for later in self._later if later[0] > now_s]
        for member in self._members.values():
            if member.restart_at_s is not None and member.restart_at_s <= time.monotonic():
                member.restart_at_s = None
                member.child = self._spawn(member.again or member.spec)
                if member.spec.may_move:  # unless this one is ready: another process may have it
                    member.again = None

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
                member = self._member(event.child)
                if member is not None:
                    member.child = None
        return True
