"""The workers of a deployment: how many of each role there are, and how that is changed.

Main thread only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tasuki.launch.config import ServeConfig
from tasuki.launch.engine import Engine, Member
from tasuki.launch.errors import LaunchError
from tasuki.launch.supervisor import Supervisor, say
from tasuki.launch.workers_file import WorkersFile

_WORKER_GRACE_S = 10.0  # beyond the time in which its requests may end


@dataclass(frozen=True, slots=True)
class Change:
    """What makes so many workers of one role.

    Attributes:
        start: Names of the workers to start.
        stop: Names of the workers to end.
    """

    start: tuple[str, ...]
    stop: tuple[str, ...]


def plan_change(names: Collection[str], role: str, count: int) -> Change:
    """From the workers that there are to `count` of a role: the newest numbers go first.

    Args:
        names: Of all workers, such as `decode-0`.
        role: prefill, decode or mixed.
        count: How many of them there are to be.
    """
    numbers = sorted(int(n.rpartition("-")[2]) for n in names if n.rpartition("-")[0] == role)
    free = (n for n in range(len(numbers) + count) if n not in numbers)
    more = [next(free) for _ in range(count - len(numbers))]
    return Change(tuple(f"{role}-{n}" for n in more), tuple(f"{role}-{n}" for n in numbers[count:]))


class WorkerSet:
    """Owns the set of workers.

    Args:
        config: The settings; its topology is what is started first.
        engine: Has the places.
        supervisor: Runs the processes, and says each ready worker's address to `file`.
        file: What the router reads.
    """

    def __init__(
        self, config: ServeConfig, engine: Engine, supervisor: Supervisor, file: WorkersFile
    ) -> None:
        self._config, self._engine = config, engine
        self._supervisor, self._file = supervisor, file
        self._topology = config.topology
        self._model, self._dtype = Path(), ""
        self.names: list[str] = []

    def start(self, model: Path, dtype: str) -> None:
        """Start all workers of the topology, and wait until they are ready.

        Args:
            model: The model's local folder.
            dtype: Of all workers.

        Raises:
            LaunchError: One does not start, or there is no room for them.
            StoppedError: See `Supervisor`.
        """
        self._model, self._dtype = model, dtype
        specs = self._engine.place(model, dtype, None, self._supervisor.wait)
        self.names = [spec.name for spec in specs]
        say(f"starting {self._topology}: {', '.join(self.names)}")
        self._supervisor.start(specs)
        self._supervisor.await_ready(self.names, self._config.startup_timeout_s)

    def scale(self, role: str, count: int) -> str:
        """Start or drain workers until there are `count` of a role; what was done, in one line.

        A worker that goes gets no new requests, and ends when those that it has are done.

        Raises:
            LaunchError: The number is refused, there is no room, or a new worker does not
                start; the deployment is as before then.
            StoppedError: See `Supervisor`.
        """
        wanted = self._topology.with_count(role, count)
        before = len(self.names)
        change = plan_change(self.names, role, count)
        if change.start:
            self._add([(name, role) for name in change.start])
        if change.stop:
            say(f"draining {', '.join(change.stop)}")
            self._remove(change.stop)
        self._topology = wanted
        done = f"{self._topology}: {len(self.names)} workers, {before} before"
        say(done)
        return done

    def _add(self, members: list[Member]) -> None:
        names = [name for name, _ in members]

        def wait(seconds: float) -> None:
            self._supervisor.wait(seconds, restart=True)

        specs = self._engine.place(self._model, self._dtype, members, wait)
        say(f"starting {', '.join(names)}")
        self._supervisor.start(specs)
        try:
            self._supervisor.await_ready(names, self._config.startup_timeout_s, restart=True)
        except LaunchError:
            self._remove(names)
            raise
        self.names += names

    def _remove(self, names: Collection[str]) -> None:
        self._file.remove(names)
        self.names = [name for name in self.names if name not in names]
        self._supervisor.retire(names, self._config.router.drain_s + _WORKER_GRACE_S)
        self._engine.release(names)
