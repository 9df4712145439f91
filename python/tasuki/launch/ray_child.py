"""The actor that holds a process on a node of a Ray cluster: a worker, or one host of a worker.

The process ends with its actor, however that ends: by its driver, by Ray, by SIGKILL, or
because its node lost the cluster. The kernel sees to it (`parent_death.py`), and it means
the *thread* that forked: a thread of our own forks and waits, as Ray's threads come and go.

Threads: that one; Ray's, of which one may wait in `read` and another one sends signals.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import ray

from tasuki.launch.forking import LocalProcess, spawn
from tasuki.launch.placement import at_address, divided
from tasuki.launch.topology import ProcessSpec
from tasuki.worker.config import join_host_port

CALLS_AT_ONCE = 4  # `read` waits in one of them
_READ_BYTES = 1 << 16
_LAST_OUTPUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Output:
    """What a process said since the last one of these.

    Attributes:
        text: Of its output, errors too.
        code: Its exit code, once it has ended and said everything; negative for a signal.
    """

    text: bytes
    code: int | None


class RayChild:
    """Starts one process, when it is told to."""

    def __init__(self) -> None:
        self._host: str = ray.util.get_node_ip_address()
        self._meeting: socket.socket | None = None
        self._said: queue.SimpleQueue[bytes | int] = queue.SimpleQueue()
        self._process: LocalProcess | None = None
        self._begun = threading.Event()

    def host(self) -> str:
        """The address of this node."""
        return self._host

    def meeting(self) -> str:
        """HOST:PORT here where the other hosts of the worker may come to.

        The port stays bound, so no other process gets it before the worker listens: both sockets
        have SO_REUSEADDR, and this one does not listen.
        """
        self._meeting = _socket(self._host)
        self._meeting.bind((self._host, 0))
        return join_host_port(self._host, self._meeting.getsockname()[1])

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        environment: tuple[tuple[str, str], ...],
        assigned: tuple[tuple[str, str], ...],
        nodes: Sequence[str],
        number: int,
    ) -> str:
        """Start the process; its place, for the log.

        Args:
            name: Of the worker.
            arguments: Of `tasuki`. The address to bind is put in here: this node's, and the port
                that is said if it is free here, else any.
            environment: Added to that of the actor; the actor's own wins.
            assigned: Added too; wins over everything.
            nodes: Hosts of the worker, HOST:PORT first; none: it has one.
            number: This host's among them.
        """
        port = _free_or_any(self._host, int(arguments[list(arguments).index("--port") + 1]))
        words = divided(at_address(arguments, self._host, 0 if number else port), nodes, number)
        program = (sys.executable, "-m", "tasuki")
        spec = ProcessSpec(name, tuple(words), environment, "", program, assigned)
        threading.Thread(target=self._run, args=(spec,), name="fork", daemon=True).start()
        self._begun.wait()
        place = f"node {self._host}"
        return place if self._process is None else f"{place}, {self._process.where}"

    def read(self) -> Output:
        """Wait for output, or for the end."""
        said, code = bytearray(), None
        while code is None and (not said or not self._said.empty()) and len(said) < _READ_BYTES:
            match self._said.get():
                case bytes(text):
                    said += text
                case int(number):
                    code = number
        return Output(bytes(said), code)

    def signal(self, number: int) -> None:
        """Send a signal to the process group."""
        self._begun.wait()
        if self._process is not None:
            self._process.signal(signal.Signals(number))

    def _run(self, spec: ProcessSpec) -> None:
        """Fork the process and wait for its end; the kernel ends it with this thread."""
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray starts its workers with niceness 15
        read, write = os.pipe()
        try:
            self._process = spawn(spec, write)
        except OSError as error:
            self._said.put(f"cannot start it: {error}\n".encode())
            self._said.put(1)
            return
        finally:
            os.close(write)
            self._begun.set()
        copier = threading.Thread(target=self._copy, args=(read,), daemon=True)
        copier.start()
        code = self._process.wait()
        copier.join(_LAST_OUTPUT_S)  # a grandchild may hold the pipe open for ever
        self._said.put(code)

    def _copy(self, output: int) -> None:
        while text := os.read(output, _READ_BYTES):
            self._said.put(text)
        os.close(output)


def _free_or_any(host: str, port: int) -> int:
    """`port`, or 0 if another process of this node has it."""
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port


def _socket(host: str) -> socket.socket:
    """A socket that can be bound at an address of this node."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
