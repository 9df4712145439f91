"""Streams between workers whose machines vanish without a word."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import pytest

from tasuki.kv.fleet import REMEDY
from tasuki.kv.grpc_streams import keepalive_options
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.link import (
    Connected,
    DialledLink,
    Disconnected,
    HandoffServicer,
    LinkEvent,
    Refused,
)
from tasuki.v1 import kv_pb2
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server
from tasuki.worker.server import SERVER_OPTIONS

IDENTITY = bytes(16)
HELLO = kv_pb2.Hello(protocol_version=1, identity=IDENTITY, engine_id="d", expected_engine_id="p")
KEEPALIVE_S = 0.5
DEADLINE_S = 60.0


class Network:
    """A port that leads to another one, until it swallows everything and says nothing."""

    def __init__(self) -> None:
        self.swallows = False

    @contextlib.asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[int]:
        pipes: list[asyncio.Task[None]] = []

        async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            for source, target in ((reader, far_writer), (far_reader, writer)):
                pipes.append(asyncio.ensure_future(self._pipe(source, target)))

        server = await asyncio.start_server(join, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for pipe in pipes:
                pipe.cancel()

    async def _pipe(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not self.swallows:
                target.write(data)
        await asyncio.Event().wait()  # not even an end is passed on


def heard(events: list[LinkEvent], kind: type[LinkEvent]) -> Callable[[], bool]:
    return lambda: any(isinstance(event, kind) for event in events)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(
    options: Sequence[tuple[str, int]] = SERVER_OPTIONS,
) -> AsyncIterator[tuple[grpc.aio.Server, HandoffServicer, int]]:
    """A prefill engine `p`: its server, its streams and its port."""
    served = HandoffServicer(
        IDENTITY, "p", lambda: kv_pb2.HelloReply(engine_id="p", lease_s=10.0), lambda _: None, 1
    )
    server = grpc.aio.server(options=options)
    add_KvServicer_to_server(served, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield server, served, port
    finally:
        await server.stop(0)


async def vanish(client_keepalive_s: float, server_options: list[tuple[str, int]]) -> None:
    """Connects the two over a network that vanishes; ends when the stream is given up."""
    network = Network()
    events: list[LinkEvent] = []
    async with (
        serving(server_options) as (_, served, port),
        network.to(port) as entrance,
    ):
        link = DialledLink("p", f"127.0.0.1:{entrance}", HELLO, events.append, client_keepalive_s)
        try:
            await until(heard(events, Connected))
            assert served._streams
            network.swallows = True
            if client_keepalive_s == KEEPALIVE_S:
                await until(heard(events, Disconnected))
                assert not heard(events, Refused)(), "it may come back"
            else:
                await until(lambda: not served._streams)
        finally:
            link.close()


def test_the_decode_worker_notices() -> None:
    asyncio.run(vanish(KEEPALIVE_S, list(SERVER_OPTIONS)))


def test_the_prefill_worker_notices() -> None:
    known = [option for option in SERVER_OPTIONS if option not in keepalive_options()]
    asyncio.run(vanish(1_000.0, [*known, *keepalive_options(KEEPALIVE_S)]))


def test_an_engine_at_whose_address_nobody_listens_is_gone() -> None:
    async def run() -> None:
        async with serving() as (server, _, port):
            events: list[LinkEvent] = []
            link = DialledLink("p", f"127.0.0.1:{port}", HELLO, events.append)
            await until(heard(events, Connected))
            await server.stop(0)
            await until(heard(events, Refused))
            event = events[-1]
            assert isinstance(event, Refused) and event.gone
            assert event.message == f"engine p is gone: nobody listens at 127.0.0.1:{port}"
            assert heard(events, Disconnected)(), "at the first attempts it may come back"
            link.close()

    asyncio.run(run())


def test_the_worker_s_server_pings() -> None:
    assert set(keepalive_options()) <= set(SERVER_OPTIONS)


def test_another_version_is_refused_with_both_versions() -> None:
    served = HandoffServicer(IDENTITY, "p", kv_pb2.HelloReply, lambda _: None, PROTOCOL_VERSION)
    for theirs in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        hello = kv_pb2.Hello(protocol_version=theirs, identity=IDENTITY, expected_engine_id="p")
        refusal = served.refusal(hello)
        # Read at the decode worker, too, where "here" is the other side.
        assert f"{theirs} at the decode worker" in refusal
        assert f"{PROTOCOL_VERSION} at the prefill worker" in refusal
    hello = kv_pb2.Hello(protocol_version=PROTOCOL_VERSION, identity=b"x", expected_engine_id="p")
    refusal = served.refusal(hello)
    assert f"identity is {b'x'.hex()} at the decode worker and {IDENTITY.hex()} at the" in refusal


def test_a_decode_worker_without_a_name_is_refused() -> None:
    served = HandoffServicer(IDENTITY, "p", kv_pb2.HelloReply, lambda _: None, PROTOCOL_VERSION)
    hello = kv_pb2.Hello(
        protocol_version=PROTOCOL_VERSION, identity=IDENTITY, expected_engine_id="p"
    )
    assert "no engine id" in served.refusal(hello)
    hello.engine_id = "d"
    assert served.refusal(hello) == ""
    hello.expected_engine_id = "before"
    assert served.refusal(hello) == (
        "the decode worker looks for engine before and this address is that of engine p by now:"
        " a request that is placed anew finds it"
    )


@pytest.mark.parametrize("in_order", [True, False])
def test_a_worker_that_stops_is_no_stranger(
    in_order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    took_s = 0.0

    async def run() -> None:
        nonlocal took_s
        events: list[LinkEvent] = []
        async with serving() as (server, served, port):
            link = DialledLink("p", f"127.0.0.1:{port}", HELLO, events.append)
            try:
                await until(heard(events, Connected))
                begun_s = time.monotonic()
                if in_order:
                    served.close()
                await server.stop(DEADLINE_S if in_order else 0)
                took_s = time.monotonic() - begun_s
                await until(heard(events, Disconnected))
            finally:
                link.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    assert took_s < DEADLINE_S / 2, "the server waited for the stream's peer"
    assert REMEDY not in caplog.text
    said = [(record.levelno, record.message.split()[-1]) for record in caplog.records]
    assert said[:1] == [(logging.INFO, "ended") if in_order else (logging.WARNING, "broke")]
    assert all(record.levelno < logging.ERROR for record in caplog.records) or not in_order
