"""Reads from a peer over a real network: a good one, and set-ups that are really broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from network_rig import PEER, READER, Hosts, run, two_hosts, why_not

from tasuki.preflight.transfers import Plan, self_transfer

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLOCKED_PORT = 7_100
LIMIT_MBIT = 200


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def peer(hosts: Hosts) -> str:
    return hosts.listen()


def test_a_peer_is_read_and_what_arrived_is_compared(hosts: Hosts, peer: str) -> None:
    check = hosts.read(peer, expected=1e6)
    assert check.status == "ok", check
    assert "tcp (tcp/cable)" in check.found and "checksums equal" in check.found
    assert check.figures["payload_bytes"] >= 1 << 20
    assert 0 < check.figures["latency_s"] < 3.0


def test_a_turned_bit_is_found(hosts: Hosts) -> None:
    damaged = hosts.listen(damage=0)
    check = hosts.read(damaged)
    assert (check.status, "block 0" in check.found) == ("fail", True), check
    assert "BLAKE2b differs" in check.expected and "memtest" in check.remedy


def test_a_slow_cable_is_slower_than_expected(hosts: Hosts, peer: str) -> None:
    limit = ["tbf", "rate", f"{LIMIT_MBIT}mbit", "burst", "64kb", "latency", "100ms"]
    run("tc", "-n", hosts.peer, "qdisc", "add", "dev", "cable", "root", *limit)
    try:
        check = hosts.read(peer, expected=1e9 / 8)
    finally:
        run("tc", "-n", hosts.peer, "qdisc", "del", "dev", "cable", "root")
    assert check.status == "fail" and check.expected == "at least 0.125 GB/s", check
    assert check.figures["bytes_per_s"] < 1.1 * LIMIT_MBIT * 1e6 / 8


def test_a_blocked_port_is_no_answer(hosts: Hosts) -> None:
    rule = ("ipproto", "tcp", "sport", str(BLOCKED_PORT), "blackhole")
    run("ip", "-n", hosts.peer, "rule", "add", *rule)  # its answers get lost
    check = hosts.read(hosts.listen(BLOCKED_PORT), timeout_s=3.0)
    assert (check.status, check.found) == ("fail", "no answer within 3 s"), check
    assert check.remedy.startswith("open the port")
    run("ip", "-n", hosts.peer, "rule", "del", *rule)
    assert hosts.read(f"{PEER}:{BLOCKED_PORT}").status == "ok"


def test_the_wrong_interface_moves_no_bytes(hosts: Hosts, peer: str) -> None:
    check = hosts.read(peer, timeout_s=5.0, UCX_NET_DEVICES="lo")
    assert check.status == "fail" and "--host" in check.remedy, check


def test_nobody_there_is_said_at_once(hosts: Hosts) -> None:
    check = hosts.read(f"{READER}:9")
    assert check.status == "fail" and "--listen" in check.remedy, check


def test_the_transport_works_inside_this_machine() -> None:
    check = self_transfer(Plan())
    assert check.status == "ok" and check.found.startswith("shm"), check
