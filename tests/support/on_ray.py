"""`tasuki serve` on a Ray cluster of this machine, as a test sees it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from support.namespace import Namespace
from support.processes import REPOSITORY, Process, environment, has_ended
from support.waiting import until

SETTINGS = ("--dtype", "float32", "--device", "cpu", "--kv-memory", "8MB")


class RayCluster:
    """Nodes of a Ray cluster, and what runs beside them in their namespace.

    Args:
        cpus: Of each node; the head has none.
        host: Address of all of them.
        devices: Commands of `ip` that give the namespace this address.

    Attributes:
        address: Of the cluster.
    """

    def __init__(self, *cpus: int, host: str = "127.0.0.1", devices: Sequence[str] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short path
        self.namespace = Namespace(*devices)
        self._served: list[Process] = []
        command = [sys.executable, str(REPOSITORY / "tests" / "support" / "ray_cluster.py")]
        self._process = self.namespace.run(
            subprocess.Popen,
            [*command, host, *map(str, cpus)],
            # All that Ray writes; it notes a cluster's address where it keeps files by default.
            env=environment(RAY_TMPDIR=str(self.folder), TASUKI_CACHE=str(self.folder / "cache")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "cluster.log").open("wb"),
            text=True,
            start_new_session=True,
        )
        self.address = self._read("cluster ")

    def serve(self, *arguments: str, on_ray: bool = True) -> Process:
        """Starts `tasuki serve`."""
        place = ("--on", f"ray://{self.address}") if on_ray else ()
        log = self.folder / f"serve-{len(self._served)}.log"
        process = Process("serve", ["serve", *place, *arguments, "--port", "0"], log)
        self.namespace.run(process.start)
        self._served.append(process)
        return process

    def look(self, order: str = "look") -> dict[str, Any]:
        """What the cluster says of itself, after an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._read("looks ")))

    def close(self) -> None:
        for process in self._served:
            process.kill()
        family = psutil.Process(self._process.pid).children(recursive=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.namespace.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, beginning: str) -> str:
        """The rest of the next line that begins so; Ray says things in between."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise AssertionError((self.folder / "cluster.log").read_text())


def workers() -> dict[str, psutil.Process]:
    """Every `tasuki worker` under this test that lives, by name; they are in actors' processes."""
    return {name: process for (name, _), process in hosts_of_workers().items()}


def hosts_of_workers() -> dict[tuple[str, int], psutil.Process]:
    """The same, by name and the host's number among those of the worker."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
            if "worker" in command and "--name" in command:
                number = command[command.index("--rank") + 1] if "--rank" in command else "0"
                found[command[command.index("--name") + 1], int(number)] = process
        except psutil.NoSuchProcess:
            continue
    return found


def await_end(processes: list[psutil.Process]) -> None:
    """Waits until none of them is left."""
    until(
        lambda: all(map(has_ended, processes)),
        lambda: f"the end of {processes}",
        deadline_s=30,
    )


def scale(*words: str) -> subprocess.CompletedProcess[str]:
    """`tasuki scale` to the only `tasuki serve`."""
    return subprocess.run(
        [sys.executable, "-m", "tasuki", "scale", *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
