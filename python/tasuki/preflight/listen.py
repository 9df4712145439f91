"""`tasuki preflight --listen`: a peer with known blocks, for `--peer` on other machines.

It answers as a worker does, but serves no model: routers refuse it by its identity.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Callable

import grpc

from tasuki.kv.fleet import refuse_strangers
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.link import HandoffServicer
from tasuki.kv.measure import Blocks
from tasuki.kv.transport import TransportError
from tasuki.preflight.transfers import BLOCK_BYTES, IDENTITY, SEED, Plan
from tasuki.v1 import kv_pb2, worker_pb2
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server
from tasuki.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

_GRACE_S = 0.5


class _Introduces(WorkerServicer):
    """Tells who this is, and nothing more."""

    def __init__(self, info: worker_pb2.WorkerInfo) -> None:
        self._info = info

    async def Serve(  # noqa: N802 - gRPC names it
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[worker_pb2.RouterMessage, worker_pb2.WorkerMessage],
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        await refuse_strangers(context)
        yield worker_pb2.WorkerMessage(info=self._info)


async def listen(
    plan: Plan,
    port: int,
    on_ready: Callable[[str], None],
    ending: asyncio.Event,
    blocks: Blocks | None = None,
) -> None:
    """Answer peers until `ending` is set.

    Args:
        plan: Where the blocks are, and what transfers may use.
        port: 0: any free one.
        on_ready: Called with HOST:PORT.
        ending: Of the running loop.
        blocks: What is read; None: as many as `plan` has bytes.

    Raises:
        TransportError: The transport does not start, or the port cannot be had.
    """
    if blocks is None:
        count = max(1, plan.payload_bytes // BLOCK_BYTES)
        blocks = Blocks(BLOCK_BYTES, count, plan.device, network=plan.network)
        blocks.fill(SEED)
    engine_id, pool = uuid.uuid4().hex, blocks.pool
    info = worker_pb2.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=engine_id,
        model="tasuki preflight --listen",
        identity=IDENTITY,
    )

    def reply() -> kv_pb2.HelloReply:
        return kv_pb2.HelloReply(engine_id=engine_id, pools=[pool])

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = HandoffServicer(IDENTITY, engine_id, reply, lambda _: None, PROTOCOL_VERSION)
    add_WorkerServicer_to_server(_Introduces(info), server)
    add_KvServicer_to_server(servicer, server)
    host = f"[{plan.network.host}]" if ":" in plan.network.host else plan.network.host
    bound = _bind(server, plan, f"{host}:{port}")
    await server.start()
    on_ready(f"{host}:{bound}")
    await ending.wait()
    await server.stop(_GRACE_S)


def _bind(server: grpc.aio.Server, plan: Plan, address: str) -> int:
    try:
        if plan.fleet is None:
            return server.add_insecure_port(address)
        return plan.fleet.listen(server, address)
    except RuntimeError as error:
        raise TransportError(
            f"cannot listen on {address}: choose another --host or --port ({error})"
        ) from error


async def listen_until_signal(plan: Plan, port: int, on_ready: Callable[[str], None]) -> None:
    """See `listen`: until SIGINT or SIGTERM. Main thread."""
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    await listen(plan, port, on_ready, ending)
