"""mTLS of the streams between workers: who is refused, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest
from support.certificates import Authority

from tasuki.kv.fleet import REMEDY, Fleet, FleetError
from tasuki.kv.link import (
    Connected,
    DialledLink,
    Disconnected,
    HandoffServicer,
    LinkEvent,
)
from tasuki.v1 import kv_pb2
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server

pytestmark = pytest.mark.system  # it runs openssl

IDENTITY = bytes(16)
HELLO = kv_pb2.Hello(protocol_version=1, identity=IDENTITY, engine_id="d", expected_engine_id="p")
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("fleet") / "ca")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other") / "ca")


async def first_events(
    server_fleet: Fleet | None,
    clients: Sequence[Fleet | None],
    after_each: Callable[[], None] = lambda: None,
) -> list[type]:
    """What each client hears first, of one server."""
    servicer = HandoffServicer(
        IDENTITY, "p", lambda: kv_pb2.HelloReply(engine_id="p", lease_s=10.0), lambda _: None, 1
    )
    server = grpc.aio.server()
    add_KvServicer_to_server(servicer, server)
    address = "127.0.0.1:0"
    if server_fleet is None:
        port = server.add_insecure_port(address)
    else:
        port = server_fleet.listen(server, address)
    await server.start()
    heard = []
    try:
        for fleet in clients:
            events: asyncio.Queue[LinkEvent] = asyncio.Queue()
            link = DialledLink("p", f"127.0.0.1:{port}", HELLO, events.put_nowait, fleet=fleet)
            try:
                heard.append(type(await asyncio.wait_for(events.get(), DEADLINE_S)))
            finally:
                link.close()
            after_each()
    finally:
        await server.stop(0)
    return heard


def test_certificates_of_one_ca_are_accepted(ca: Authority) -> None:
    fleets = [ca.fleet("shared"), ca.fleet("own")]
    assert asyncio.run(first_events(fleets[0], fleets)) == [Connected, Connected]


def test_without_certificates_streams_are_plain() -> None:
    assert asyncio.run(first_events(None, [None])) == [Connected]


@pytest.mark.parametrize("who", ["plain", "other ca", "other name", "expired"])
@pytest.mark.parametrize("side", ["client", "server"])
def test_strangers_are_refused_with_the_remedy(
    ca: Authority, other: Authority, who: str, side: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = ca.fleet("good")
    elsewhere = other.fleet("stranger")
    stranger = {
        "plain": None,
        "other ca": Fleet(elsewhere.cert, elsewhere.key, good.ca),
        "other name": ca.fleet("name", dns="example.com"),
        "expired": ca.fleet("old", days=-1),
    }[who]
    with caplog.at_level(logging.WARNING):
        if side == "client":
            heard = asyncio.run(first_events(good, [stranger]))
        else:
            heard = asyncio.run(first_events(stranger, [good]))
    assert heard == [Disconnected]
    assert REMEDY in caplog.text


def test_new_certificates_are_used_for_new_connections(ca: Authority) -> None:
    old, new = ca.fleet("replaced", days=-1), ca.fleet("new")

    def renew() -> None:
        shutil.copyfile(new.cert, old.cert)
        shutil.copyfile(new.key, old.key)

    assert asyncio.run(first_events(old, [new, new], renew)) == [Disconnected, Connected]


def test_errors_in_files_end_the_start(ca: Authority, tmp_path: Path) -> None:
    good = ca.fleet("checked")
    good.check()
    with pytest.raises(FleetError, match=r"--fleet-ca .*nowhere"):
        Fleet(good.cert, good.key, tmp_path / "nowhere").check()
    with pytest.raises(FleetError, match=r"--fleet-key .* cannot be used: .*MISMATCH"):
        Fleet(good.cert, ca.fleet("another").key, good.ca).check()
    with pytest.raises(FleetError, match=r"^--fleet-key and --fleet-ca missing: give"):
        Fleet.of(good.cert, None, None)
    assert Fleet.of(None, None, None) is None
