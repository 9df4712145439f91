"""Real transfers by the workers' own transport: inside this machine, and from every peer.

A peer is `tasuki preflight --listen`, whose blocks hold bytes that both sides can compute, or a
worker that serves: its blocks are read too, but what they hold is not known here. Either is
asked as a router and a decode worker ask: it tells who it is, then where its blocks are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from tasuki.errors import TasukiError
from tasuki.kv.fleet import Fleet
from tasuki.kv.identity import PROTOCOL_VERSION
from tasuki.kv.measure import Blocks, Link, Reading
from tasuki.kv.net_devices import LOCAL, Network
from tasuki.kv.transport import TransportError
from tasuki.preflight.result import Check, PreflightError, fail, ok, warn
from tasuki.v1 import kv_pb2, worker_pb2
from tasuki.v1.kv_pb2_grpc import KvStub
from tasuki.v1.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

IDENTITY = b"tasuki-preflight"  # of a peer that only listens
BLOCK_BYTES = 1 << 20
SEED = 16
_LATENCY_READS = 16
_ENOUGH_S = 0.3  # a round that takes so long is not repeated with more
_CPU = torch.device("cpu")
_CHANNEL = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


@dataclass(frozen=True, slots=True)
class Plan:
    """How peers are read.

    Attributes:
        network: What transfers may use, and must.
        device: Where their bytes go.
        payload_bytes: Of the largest read; what is slow ends with less.
        timeout_s: For each step: an answer, a read.
        fleet: Certificates; None: plain.
    """

    network: Network = LOCAL
    device: torch.device = _CPU
    payload_bytes: int = 64 << 20
    timeout_s: float = 5.0
    fleet: Fleet | None = None


@dataclass(frozen=True, slots=True)
class Peer:
    """What a peer told; `serves`: it is a worker with a model."""

    pool: kv_pb2.RankPool
    serves: bool


def device_of(said: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        PreflightError: It is none of them, or not there.
    """
    has_gpu = torch.cuda.is_available()
    if said == "auto":
        return torch.device("cuda", 0) if has_gpu else _CPU
    try:
        device = torch.device(said)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not has_gpu):
        raise PreflightError(
            f"--device is {said!r}: use auto, cpu or cuda:N, and install the driver for cuda"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise PreflightError(
            f"--device is {said!r}, this process sees {count} GPUs: use one from cuda:0 on"
        )
    return device


def self_transfer(plan: Plan) -> Check:
    """Whether the transport starts and moves bytes right, and by which way inside this machine."""
    name, count = "self-transfer", 8
    try:
        theirs = Blocks(BLOCK_BYTES, count, plan.device, network=plan.network)
        ours = Blocks(BLOCK_BYTES, count, plan.device, network=plan.network)
        theirs.fill(SEED)
        link = Link(ours, theirs.pool, "this machine")
        link.read(range(count), plan.timeout_s)  # connects
        reading = link.read(range(count), plan.timeout_s)
        link.close()
        damaged = ours.first_damaged(SEED, range(count))
    except TasukiError as error:
        remedy = "check the installation (nixl-cu13) and UCX_* of the environment"
        return fail(name, str(error), "a transport that works", remedy)
    if damaged is not None:
        return _corrupt(name, damaged, ours.block_bytes)
    return ok(name, f"{reading.way or 'by a way that UCX does not name'}, {_rate(reading)}")


def peer_transfer(peer: str, plan: Plan, expected: float) -> Check:
    """Read from a peer: latency, rate against what is expected, way, and what arrived.

    Args:
        peer: HOST:PORT.
        plan: How.
        expected: Bytes a second; 0: nothing is expected.
    """
    name = f"transfer {peer}"
    try:
        told = asyncio.run(ask(peer, plan))
    except TimeoutError:
        remedy = "open the port in firewalls and network policies between the two machines"
        return fail(name, f"no answer within {plan.timeout_s:g} s", "an answer", remedy)
    except (grpc.RpcError, OSError) as error:
        return fail(name, _said(error), "an answer", f"start `tasuki preflight --listen` on {peer}")
    except TasukiError as error:
        return fail(name, str(error), "a peer of this version", "install one version on both")
    try:
        return _measured(name, peer, told, plan, expected)
    except TransportError as error:
        remedy = (
            "allow all ports between the two machines, or name the interface that they share"
            " (--host, UCX_NET_DEVICES)"
        )
        return fail(name, str(error), "bytes", remedy)


def _measured(name: str, peer: str, told: Peer, plan: Plan, expected: float) -> Check:
    pool = told.pool.layout.pool
    transport = told.pool.layout.transport.partition("/")[0]
    count = max(1, min(pool.num_blocks, plan.payload_bytes // pool.block_bytes))
    ours = Blocks(pool.block_bytes, count, plan.device, transport, plan.network)
    ours.clear()  # so that the system has provided its memory
    link = Link(ours, told.pool, peer)
    try:
        reading, latency_s = _read(link, count, pool.block_bytes, plan)
    finally:
        link.close()
    checked = range(reading.payload_bytes // pool.block_bytes)
    damaged = None if told.serves else ours.first_damaged(SEED, checked)
    if damaged is not None:
        return _corrupt(name, damaged, pool.block_bytes)
    figures = {
        "bytes_per_s": reading.bytes_per_s,
        "latency_s": latency_s,
        "payload_bytes": float(reading.payload_bytes),
    }
    way = reading.way or "by a way that UCX does not name"
    content = "of a worker that serves: not compared" if told.serves else "checksums equal"
    size = f"blocks of {pool.block_bytes:,} bytes"
    found = f"{_rate(reading)}, {latency_s * 1e3:.2f} ms a block, {way}, {size} {content}"
    if reading.bytes_per_s < expected:
        remedy = "look at the rate of the interface, the RDMA devices and what else uses the link"
        return fail(name, found, f"at least {expected / 1e9:.3g} GB/s", remedy, **figures)
    if reading.way is not None and reading.way.kind == "tcp" and plan.device.type != "cpu":
        remedy = "see RDMA above; --require-transport rdma refuses such a peer"
        return warn(name, found, "RDMA or CUDA IPC between GPUs", remedy, **figures)
    return ok(name, found, **figures)


def _read(link: Link, count: int, block_bytes: int, plan: Plan) -> tuple[Reading, float]:
    """The largest read that fits the time, and the median of a block's."""
    link.read([0], plan.timeout_s)  # connects
    single: list[float] = []
    begun_s = time.monotonic()
    while len(single) < _LATENCY_READS and time.monotonic() - begun_s < _ENOUGH_S:
        single.append(link.read([0], plan.timeout_s).seconds)
    some = max(1, min(count, (1 << 20) // block_bytes))
    while True:
        reading = link.read(range(some), plan.timeout_s)
        if reading.seconds < _ENOUGH_S:  # the first one may find cold memory and new connections
            again = link.read(range(some), plan.timeout_s)
            reading = min(reading, again, key=lambda each: each.seconds)
        if some == count or reading.seconds > _ENOUGH_S:
            return reading, sorted(single)[len(single) // 2]
        some = min(count, 4 * some)


async def ask(peer: str, plan: Plan) -> Peer:
    """Who a peer is, and where its blocks are.

    Raises:
        TimeoutError, OSError, grpc.RpcError: There is no answer.
        TransportError: It refuses.
    """
    options = list(_CHANNEL)
    if plan.fleet is None:
        channel = grpc.aio.insecure_channel(peer, options=options)
    else:
        channel = plan.fleet.channel(peer, options)
    async with channel, asyncio.timeout(plan.timeout_s):
        worker, kv = _stubs(channel)
        call = worker.Serve()
        info: worker_pb2.WorkerInfo | None = None
        async for message in call:
            if message.WhichOneof("message") == "info":
                info = message.info
                break
        call.cancel()
        if info is None:
            raise OSError("it ended the stream before it told who it is")
        hello = kv_pb2.Hello(
            protocol_version=PROTOCOL_VERSION,
            identity=info.identity,
            engine_id=f"preflight-{time.time_ns()}",
            expected_engine_id=info.engine_id,
        )
        handoff = kv.Handoff()
        await handoff.write(kv_pb2.FromDecode(hello=hello))
        reply = (await _first(handoff)).hello
        handoff.cancel()
    if reply.refusal or not reply.pools:
        raise TransportError(f"{peer} refuses: {reply.refusal or 'it tells of no blocks'}")
    return Peer(reply.pools[0], info.identity != IDENTITY)


async def _first(call: AsyncIterator[kv_pb2.FromPrefill]) -> kv_pb2.FromPrefill:
    async for message in call:
        return message
    raise OSError("it ended the stream before the handshake")


def _stubs(channel: grpc.aio.Channel) -> tuple[Any, Any]:
    worker: Any = WorkerStub  # generated without types
    kv: Any = KvStub
    return worker(channel), kv(channel)


def _corrupt(name: str, block: int, block_bytes: int) -> Check:
    return fail(
        name,
        f"block {block} of {block_bytes:,} bytes arrived damaged",
        "the bytes that were sent: their BLAKE2b differs",
        "test memory and NICs of both machines (memtest, ethtool -S: CRC errors), then repeat",
    )


def _rate(reading: Reading) -> str:
    return f"{reading.bytes_per_s / 1e9:.3g} GB/s"


def _said(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)
