"""Hosts as network namespaces: a prefill worker, a decode worker, and a router that reaches both.

    prefill 10.78.0.1 ══ kv ══ 10.78.0.2 decode         the cable that tests shape and cut
          10.78.1.1 ── ctl ──┐   ┌── ctl ── 10.78.2.1
                           router                       cables that stay as they are

Workers bind their address of the kv cable; the router reaches it over their other one. So a cut
between the workers is not one between them and the router.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from support.processes import REPOSITORY, Process, environment

T = TypeVar("T")

ADDRESSES = {"prefill": "10.78.0.1", "decode": "10.78.0.2"}
ROUTER = "10.78.1.254"
_DEADLINE_S = 60.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def why_not() -> str:
    """Why namespaces cannot be made here; empty: they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "the programs ip and tc (iproute2) are not installed"
    if os.geteuid() != 0:
        return "network namespaces require root"
    probe = f"tasuki-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


class HostProcess(Process):
    """A process of one host. Its KV goes over TCP: shared memory reaches across namespaces."""

    def __init__(self, name: str, namespace: str, arguments: Sequence[str], log: Path) -> None:
        super().__init__(name, arguments, log)
        self._namespace = namespace

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._popen = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace, sys.executable, "-m", *self.arguments],
                cwd=REPOSITORY,
                env=environment(UCX_TLS="tcp"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class Hosts:
    """The namespaces, by host; made and removed by `three_hosts`."""

    def __init__(self) -> None:
        self.names = {
            host: f"tasuki-{host}-{os.getpid()}" for host in ("prefill", "decode", "router")
        }
        self._inside = ThreadPoolExecutor(4, initializer=self._enter)

    def make(self) -> None:
        """The namespaces and their cables."""
        for name in self.names.values():
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        self._cable("kv", "prefill", "10.78.0.1", "decode", "10.78.0.2")
        self._cable("ctl1", "prefill", "10.78.1.1", "router", ROUTER)
        self._cable("ctl2", "decode", "10.78.2.1", "router", "10.78.2.254")
        router = self.names["router"]
        _run("ip", "-n", router, "route", "add", "10.78.0.1/32", "via", "10.78.1.1")
        _run("ip", "-n", router, "route", "add", "10.78.0.2/32", "via", "10.78.2.1")

    def remove(self) -> None:
        self._inside.shutdown(wait=False, cancel_futures=True)
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def begin_at_router(self, act: Callable[[], T]) -> Future[T]:
        """Call a function in a thread that is on the router's host, beside others."""
        return self._inside.submit(act)

    def at_router(self, act: Callable[[], T]) -> T:
        """Call a function in a thread that is on the router's host."""
        return self.begin_at_router(act).result(2 * _DEADLINE_S)

    def rate(self, megabits: float) -> None:
        """Between the workers at most so many megabits go through in a second."""
        self._shape("tbf", "rate", f"{megabits}mbit", "burst", "16kb", "latency", "400ms")

    def cut(self) -> None:
        """Between the workers nothing goes through any more, and nobody is told."""
        self._shape("pfifo", "limit", "0")

    def heal(self) -> None:
        """The cable between the workers is as it was made."""
        for host in ADDRESSES:
            command = ["tc", "-n", self.names[host], "qdisc", "del", "dev", "kv", "root"]
            subprocess.run(command, capture_output=True)

    def dropped(self) -> int:
        """Packets that the cable between the workers did not take since it was last shaped."""
        dropped = 0
        for host in ADDRESSES:
            said = _run("tc", "-n", self.names[host], "-s", "qdisc", "show", "dev", "kv")
            dropped += int(said.split("dropped ")[1].split(",")[0])
        return dropped

    def _shape(self, *discipline: str) -> None:
        for host in ADDRESSES:
            _run("tc", "-n", self.names[host], "qdisc", "replace", "dev", "kv", "root", *discipline)

    def _cable(self, name: str, one: str, address: str, other: str, other_address: str) -> None:
        ends = {one: address, other: other_address}
        kind = ["type", "veth", "peer", "name", name, "netns", self.names[other]]
        _run("ip", "link", "add", name, "netns", self.names[one], *kind)
        for host, own in ends.items():
            _run("ip", "-n", self.names[host], "addr", "add", f"{own}/24", "dev", name)
            _run("ip", "-n", self.names[host], "link", "set", name, "up")

    def _enter(self) -> None:
        with open(f"/run/netns/{self.names['router']}") as network:
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.setns(network.fileno(), _NEW_NETWORK)
        assert not failed, os.strerror(ctypes.get_errno())


@contextmanager
def three_hosts() -> Iterator[Hosts]:
    """Make them, and remove them."""
    hosts = Hosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_DEADLINE_S)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
