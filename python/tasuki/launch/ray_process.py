"""A worker's process in an actor of a Ray cluster, or its processes in one actor on each host.

The hosts of a worker find one another by `--nodes`, which is made of their actors' addresses at
each start. They end together: when the process or the actor of one has ended, the others get a
few seconds to end by themselves and say why, and are killed then.

Threads: `wait` is called by one, `signal` by another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from tasuki.errors import ERROR_PREFIX
from tasuki.launch.placement import Bundle, Group
from tasuki.launch.ray_child import Output
from tasuki.launch.topology import ProcessSpec

_TELL_EVERY_S = 10.0
_END_TOGETHER_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's bundles in a placement group.

    Attributes:
        group: Of bundles.
        indices: There, of this worker's: one for each host, the first one's first.
        bundle: What each of them has.
        spread: Of the group, see `placement.Group`.
    """

    group: PlacementGroup
    indices: tuple[int, ...]
    bundle: Bundle
    spread: str

    @property
    def asked(self) -> Group:
        """What this worker has asked of the cluster."""
        return Group(self.spread, (self.bundle,) * len(self.indices))


class RayProcess:
    """`Process` of one worker.

    Args:
        spec: The worker.
        actors: A `RayChild` for each host, the first host's first.
        output: Handle that gets what the processes say; owned.
        describe: Where the start of the actors stands, for people who wait.
    """

    where = "in a Ray actor"

    def __init__(
        self, spec: ProcessSpec, actors: Sequence[Any], output: int, describe: Callable[[], str]
    ) -> None:
        self._spec, self._actors = spec, actors
        self._output, self._describe = output, describe
        self._partial = [b""] * len(actors)  # of each host, the line that it has not ended
        self._has_begun = False  # else there is no process to tell, nor an actor maybe

    def signal(self, number: signal.Signals) -> None:
        """See `Process`. The first host ends the others with itself, after its drain."""
        if number == signal.SIGKILL or not self._has_begun:
            self._kill()  # wherever they are; the kernel ends their processes
        else:
            self._actors[0].signal.remote(int(number))

    def wait(self) -> int:
        """See `Process`. The code of the host that ended first; a lost actor counts as killed."""
        try:
            self._start(self._await_places())
            return self._await_end()
        except RayError as error:
            self._say_lost(error)
            return -signal.SIGKILL
        finally:
            self._kill()  # the bundles are free for the next ones
            os.close(self._output)

    def _await_places(self) -> list[str]:
        """The hosts' addresses."""
        placed = [actor.host.remote() for actor in self._actors]
        while True:
            there, waiting = ray.wait(placed, num_returns=len(placed), timeout=_TELL_EVERY_S)
            hosts: list[str] = ray.get(placed if not waiting else there)
            if not waiting:
                return hosts
            self._say(self._describe())

    def _start(self, hosts: Sequence[str]) -> None:
        nodes: list[str] = []
        if len(hosts) > 1:
            nodes = [ray.get(self._actors[0].meeting.remote()), *hosts[1:]]
        spec = self._spec
        self._has_begun = True
        words = (spec.name, spec.arguments, spec.environment, spec.assigned, nodes)
        started = [actor.start.remote(*words, n) for n, actor in enumerate(self._actors)]
        for number, where in enumerate(ray.get(started)):
            self._say(f"host {number} is on {where}" if nodes else f"on {where}")

    def _await_end(self) -> int:
        """Pass on what the processes say, until all have ended; the first one's exit code."""
        reads = {actor.read.remote(): number for number, actor in enumerate(self._actors)}
        code: int | None = None
        deadline_s: float | None = None
        while reads:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            there, _ = ray.wait(list(reads), timeout=left_s)
            if not there:
                break
            number = reads.pop(there[0])
            ended = self._take(number, there[0])
            if ended is None:
                reads[self._actors[number].read.remote()] = number
            elif code is None:
                code, deadline_s = ended, time.monotonic() + _END_TOGETHER_S
        assert code is not None
        return code

    def _take(self, number: int, read: Any) -> int | None:
        """Pass on what a host has said; its exit code if it has ended."""
        try:
            said: Output = ray.get(read)
        except RayError as error:
            self._say_lost(error, number)
            return -signal.SIGKILL
        lines = (self._partial[number] + said.text).split(b"\n")
        self._partial[number] = lines.pop()
        if said.code is not None and self._partial[number]:
            lines.append(self._partial[number])
        prefix = ERROR_PREFIX.encode()
        for line in lines:
            if number and line.startswith(prefix):
                line = prefix + f"host {number}: ".encode() + line.removeprefix(prefix)
            elif number:
                line = f"host {number}: ".encode() + line
            os.write(self._output, line + b"\n")
        return said.code

    def _say_lost(self, error: RayError, number: int = 0) -> None:
        whose = f"host {number}'s" if len(self._actors) > 1 else "its"
        reason = " ".join(str(error).split())
        self._say(f"{whose} Ray actor is gone: {type(error).__name__}: {reason}")

    def _say(self, text: str) -> None:
        os.write(self._output, f"tasuki: {text}\n".encode())

    def _kill(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
