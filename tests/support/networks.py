"""Hosts as network namespaces: a prefill worker, a decode worker, and a router that reaches both.

    prefill 10.78.0.1 ══ kv ══ 10.78.0.2 decode         the cable that tests shape and cut
          10.78.1.1 ── ctl ──┐   ┌── ctl ── 10.78.2.1
                           router                       cables that stay as they are

Workers bind their address of the kv cable; the router reaches it over their other one. So a cut
between the workers is not one between them and the router.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from support.namespace import Namespace
from support.processes import Process

T = TypeVar("T")

ADDRESSES = {"prefill": "10.78.0.1", "decode": "10.78.0.2"}
ROUTER = "10.78.1.254"
_DEADLINE_S = 60.0
# Classic BPF (linux/filter.h), and what a filter of packets decides (linux/pkt_cls.h).
_LOAD, _IF_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: a new number at each load
_PASS, _DROP = 0, 2


class HostProcess(Process):
    """A process of one host. Its KV goes over TCP: shared memory reaches across namespaces."""

    def __init__(self, name: str, host: Namespace, arguments: Sequence[str], log: Path) -> None:
        over_tcp = ("env", "UCX_TLS=tcp", sys.executable, "-m", "tasuki")
        super().__init__(name, arguments, log, program=over_tcp)
        self._host = host

    def start(self) -> None:
        self._host.run(super().start)


class Hosts:
    """The namespaces, by host."""

    def __init__(self) -> None:
        self.by_name = {host: Namespace() for host in (*ADDRESSES, "router")}
        self._cable("kv", "prefill", "10.78.0.1", "decode", "10.78.0.2")
        self._cable("ctl1", "prefill", "10.78.1.1", "router", ROUTER)
        self._cable("ctl2", "decode", "10.78.2.1", "router", "10.78.2.254")
        self.by_name["router"].ip(
            "route add 10.78.0.1/32 via 10.78.1.1", "route add 10.78.0.2/32 via 10.78.2.1"
        )

    def close(self) -> None:
        for host in self.by_name.values():
            host.close()

    def begin_at_router(self, act: Callable[[], T]) -> Future[T]:
        """Call a function in a thread that is on the router's host, beside others."""
        return self.by_name["router"].begin(act)

    def at_router(self, act: Callable[[], T]) -> T:
        """Call a function in a thread that is on the router's host."""
        return self.begin_at_router(act).result(2 * _DEADLINE_S)

    def rate(self, megabits: float) -> None:
        """Between the workers at most so many megabits go through in a second."""
        self._shape(f"tbf rate {megabits}mbit burst 16kb latency 400ms")

    def cut(self) -> None:
        """Between the workers nothing goes through any more, and nobody is told."""
        self._shape("pfifo limit 0")

    def lose(self, share: float) -> None:
        """Between the workers this share of the packets is lost, in either direction.

        A filter that draws a number for each packet does it: kernels without netem have that.
        """
        keep_from = int(share * (1 << 32))
        program = f"4,{_LOAD} 0 0 {_RANDOM},{_IF_AT_LEAST} 1 0 {keep_from},{_RETURN} 0 0 {_DROP}"
        attach = ["tc", "filter", "add", "dev", "kv", "egress", "bpf", "da", "bytecode"]
        for host in ADDRESSES:
            self.by_name[host].command("tc qdisc add dev kv clsact")
            command = [*attach, f"{program},{_RETURN} 0 0 {_PASS}"]
            self.by_name[host].run(subprocess.run, command, check=True, timeout=60)

    def heal(self) -> None:
        """The cable between the workers is as it was made."""
        for host in ADDRESSES:
            for kind in ("root", "clsact"):
                command = ["tc", "qdisc", "del", "dev", "kv", kind]  # fails where there is none
                self.by_name[host].run(subprocess.run, command, capture_output=True, timeout=60)

    def dropped(self) -> int:
        """Packets that the cable between the workers did not take since it was last shaped."""
        dropped = 0
        for host in ADDRESSES:
            said = self.by_name[host].command("tc -s qdisc show dev kv")
            dropped += sum(int(each.split(",")[0]) for each in said.split("dropped ")[1:])
        return dropped

    def _shape(self, discipline: str) -> None:
        for host in ADDRESSES:
            self.by_name[host].command(f"tc qdisc replace dev kv root {discipline}")

    def _cable(self, name: str, one: str, address: str, other: str, other_address: str) -> None:
        near, far = self.by_name[one], self.by_name[other]
        near.ip(f"link add {name} type veth peer name {name} netns {far.path()}")
        for host, own in ((near, address), (far, other_address)):
            # Packets as an Ethernet has them: by default one of 64 KB would go through, or be lost.
            host.ip(f"link set {name} gso_max_segs 1")
            host.ip(f"addr add {own}/24 dev {name}", f"link set {name} up")


@contextmanager
def three_hosts() -> Iterator[Hosts]:
    """Make them, and remove them; the test is skipped where that cannot be."""
    if shutil.which("tc") is None:
        pytest.skip("the program tc (iproute2) is not installed")
    hosts = Hosts()
    try:
        yield hosts
    finally:
        hosts.close()
