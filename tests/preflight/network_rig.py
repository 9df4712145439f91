"""Two hosts as network namespaces with a cable between them, and processes that are in them."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tasuki.kv.net_devices import Network
from tasuki.preflight.listen import listen
from tasuki.preflight.result import Check
from tasuki.preflight.transfers import BLOCK_BYTES, SEED, Plan, peer_transfer

DEADLINE_S = 60.0
PEER, READER = "10.77.0.1", "10.77.0.2"
# Of setns(2), unshare(2) and mount(2).
_NEW_NETWORK, _NEW_MOUNTS, _SLAVE_AND_BELOW = 0x40000000, 0x00020000, 0x80000 | 0x4000

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "tasuki.preflight.listen", "tasuki.kv.nixl"])


@dataclass(frozen=True, slots=True)
class Hosts:
    """The namespaces of two hosts: `10.77.0.1` (the peer) and `10.77.0.2` (the reader)."""

    peer: str
    reader: str
    _processes: list[BaseProcess] = field(default_factory=list)

    def listen(self, port: int = 0, damage: int | None = None) -> str:
        """Start a peer; the address at which it answers.

        Args:
            port: 0: any.
            damage: A block of which one bit is turned after it was filled.
        """
        return str(self._start(_listen, self.peer, {"UCX_TLS": "tcp"}, port, damage).recv())

    def read(
        self, peer: str, expected: float = 0.0, timeout_s: float = 20.0, **environment: str
    ) -> Check:
        """What the reader finds."""
        variables = {"UCX_TLS": "tcp", **environment}
        pipe = self._start(_read, self.reader, variables, peer, expected, timeout_s)
        check: Check = pipe.recv()
        return check

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(DEADLINE_S)

    def _start(
        self, target: Callable[..., None], namespace: str, variables: dict[str, str], *more: Any
    ) -> Connection:
        ours, theirs = _CONTEXT.Pipe()
        arguments = (theirs, target, namespace, variables, *more)
        process = _CONTEXT.Process(target=_inside, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that its end is noticed
        self._processes.append(process)
        assert ours.poll(DEADLINE_S), "the process says nothing"
        return ours


def why_not() -> str:
    """Why network namespaces cannot be made here; empty: they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the programs ip and tc (iproute2) are not installed"
    if os.geteuid() != 0:
        return "network namespaces require root"
    probe = f"tasuki-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    run("ip", "netns", "del", probe)
    return ""


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make them, and remove them."""
    hosts = Hosts(f"tasuki-peer-{os.getpid()}", f"tasuki-reader-{os.getpid()}")
    try:
        for namespace in (hosts.peer, hosts.reader):
            run("ip", "netns", "add", namespace)
        cable = ["type", "veth", "peer", "name", "cable", "netns", hosts.reader]
        run("ip", "link", "add", "cable", "netns", hosts.peer, *cable)
        for namespace, address in ((hosts.peer, PEER), (hosts.reader, READER)):
            run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "cable")
            run("ip", "-n", namespace, "link", "set", "cable", "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")
        for namespace in (hosts.peer, hosts.reader):
            _await_cable(namespace)
        yield hosts
    finally:
        hosts.end()
        for namespace in (hosts.peer, hosts.reader):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


def run(*words: str) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(words, check=True, capture_output=True, timeout=DEADLINE_S, text=True)
    return done.stdout


def _await_cable(namespace: str) -> None:
    """Until the interface runs: the kernel tells later than it is set up, and UCX leaves it out."""
    until_s = time.monotonic() + DEADLINE_S
    while "state UP" not in run("ip", "-n", namespace, "-o", "link", "show", "dev", "cable"):
        assert time.monotonic() < until_s, f"the interface of {namespace} does not start"
        time.sleep(0.02)


def _inside(
    pipe: Connection,
    target: Callable[..., None],
    namespace: str,
    variables: dict[str, str],
    *more: Any,
) -> None:
    """In a process of its own: go to a namespace, then do something there."""
    with open(f"/run/netns/{namespace}") as network:
        _call("setns", network.fileno(), _NEW_NETWORK)
    # As `ip netns exec`: sysfs shows the interfaces of the namespace that it is mounted in.
    _call("unshare", _NEW_MOUNTS)
    _call("mount", b"", b"/", b"none", _SLAVE_AND_BELOW, None)
    _call("mount", namespace.encode(), b"/sys", b"sysfs", 0, None)
    for name in [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]:
        del os.environ[name]  # what an agent in the test's process has set
    os.environ.update(variables)
    target(pipe, *more)


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert getattr(libc, name)(*arguments) == 0, f"{name}: {os.strerror(ctypes.get_errno())}"


def _listen(pipe: Connection, port: int, damage: int | None) -> None:
    from tasuki.kv.measure import Blocks

    network = Network(PEER)
    blocks = Blocks(BLOCK_BYTES, 16, network=network)
    blocks.fill(SEED)
    if damage is not None:
        blocks.memory[damage, 12_345] ^= 1

    async def serve() -> None:
        await listen(Plan(network), port, pipe.send, asyncio.Event(), blocks)

    asyncio.run(serve())


def _read(pipe: Connection, peer: str, expected: float, timeout_s: float) -> None:
    pipe.send(peer_transfer(peer, Plan(Network(READER), timeout_s=timeout_s), expected))
