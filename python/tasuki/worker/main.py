"""One worker process: builds engine, KV side and server, and runs them until told to stop.

Threads: asyncio (this one: gRPC), the engine thread (worker/loop.py) and the
transfer thread (kv/puller.py).
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import queue
import signal
import sys
import uuid
from dataclasses import dataclass

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from tasuki.attention.sdpa import SdpaAttention
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.runner import ModelRunner
from tasuki.errors import TasukiError
from tasuki.kv.handoff import HandoffConfig, Handoffs
from tasuki.kv.identity import PROTOCOL_VERSION, model_identity
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transport import Transport, create_transport
from tasuki.models.loader import choose_dtype, load_model
from tasuki.models.spec import ModelSpec, read_spec
from tasuki.v1 import worker_pb2 as pb
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server
from tasuki.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from tasuki.worker.config import WorkerConfig
from tasuki.worker.convert import ROLE_TO_WIRE
from tasuki.worker.loop import Command, EngineLoop, Stop, Wake
from tasuki.worker.memory import PoolSize, available_bytes, size_pool
from tasuki.worker.server import SERVER_OPTIONS, WorkerService

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # for streams to end after the engine has stopped


class BindError(TasukiError):
    """The port cannot be had."""


@dataclass(frozen=True, slots=True)
class _Built:
    """What is settled before the first thread starts."""

    engine: Engine
    transport: Transport
    layout: CacheLayout
    identity: bytes
    info: pb.WorkerInfo


def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a signal, 1 when the engine died of a defect.

    Raises:
        TasukiError: The worker cannot start: settings, model, memory, transport or port.
    """
    return asyncio.run(_serve(config, _build(config)))


def _build(config: WorkerConfig) -> _Built:
    device = torch.device("cpu")
    transport = create_transport(config.transport)  # first: a wrong name shows before the load
    spec = read_spec(config.model, trust_remote_code=config.trust_remote_code)
    dtype = _dtype(config, spec, device)
    layout, size = _layout(config, spec, dtype)
    model = load_model(
        config.model, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code
    )
    pool = layout.allocate(device)
    identity = model_identity(config.model, dtype=dtype, kv_dtype=dtype)
    engine = Engine(
        EngineConfig(
            block_size=config.block_size,
            num_blocks=size.num_blocks,
            max_model_len=size.max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_running_requests=config.max_running_requests,
            identity=identity,
            vocab_size=spec.vocab_size,
        ),
        ModelRunner(model, SdpaAttention(pool), pool),
    )
    transport.register(pool, layout)
    name = str(dtype).removeprefix("torch.")
    info = pb.WorkerInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=uuid.uuid4().hex,
        role=ROLE_TO_WIRE[config.role],
        model=config.served_name or config.model.name,
        identity=identity,
        vocab_size=spec.vocab_size,
        max_model_len=size.max_model_len,
        block_size=config.block_size,
        num_blocks=size.num_blocks,
        dtype=name,
        kv_dtype=name,
        tensor_parallel_size=1,
        version=importlib.metadata.version("tasuki"),
    )
    return _Built(engine, transport, layout, identity, info)


def _dtype(config: WorkerConfig, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    dtype, reason = choose_dtype(spec, device)
    log.info("dtype %s: %s", dtype, reason)
    return dtype


def _layout(
    config: WorkerConfig, spec: ModelSpec, dtype: torch.dtype
) -> tuple[CacheLayout, PoolSize]:
    make = functools.partial(
        CacheLayout,
        kv_heads=spec.num_kv_heads,
        layers=spec.num_layers,
        block_size=config.block_size,
        head_dim=spec.head_dim,
        dtype=dtype,
    )
    block_bytes = make(num_blocks=1).block_bytes
    size = size_pool(
        block_bytes=block_bytes,
        block_size=config.block_size,
        model_context=spec.max_position,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
        available=available_bytes(),
    )
    log.info(
        "KV pool: %d blocks of %d tokens, %.0f MB (--kv-memory); requests of up to %d tokens"
        " (--max-model-len)",
        size.num_blocks,
        config.block_size,
        size.num_blocks * block_bytes / 1e6,
        size.max_model_len,
    )
    return make(num_blocks=size.num_blocks), size


async def _serve(config: WorkerConfig, built: _Built) -> int:
    loop = asyncio.get_running_loop()
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    handoffs = Handoffs(
        host=built.engine,
        config=HandoffConfig(lease_s=config.lease_s),
        transport=built.transport,
        layout=built.layout,
        identity=built.identity,
        engine_id=built.info.engine_id,
        loop=loop,
        wake=lambda: inbox.put(Wake()),
    )
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health = HealthServicer()
    add_WorkerServicer_to_server(WorkerService(inbox), server)
    add_KvServicer_to_server(handoffs.servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = _bind(server, config)
    built.info.kv_endpoint = f"{config.host}:{port}"

    done = loop.create_future()

    def finish(code: int) -> None:
        if not done.done():
            done.set_result(code)

    def on_failure(failure: BaseException) -> None:
        log.critical("the engine is broken (%r): this worker ends, to be started anew", failure)
        loop.call_soon_threadsafe(finish, 1)

    engine_loop = EngineLoop(
        built.engine,
        handoffs,
        built.info,
        inbox,
        on_failure=on_failure,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, finish, 0)
    engine_loop.start()
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    print(f"ready {config.host}:{port}", flush=True)

    code: int = await done
    await health.enter_graceful_shutdown()
    inbox.put(Stop())
    await asyncio.to_thread(engine_loop.join, _GRACE_S)
    await server.stop(_GRACE_S)
    handoffs.close()
    return code


def _bind(server: grpc.aio.Server, config: WorkerConfig) -> int:
    address = f"{config.host}:{config.port}"
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: choose another --port ({error})") from error
    if port == 0:
        raise BindError(f"cannot listen on {address}: choose another --port")
    return port


def configure_logging(config: WorkerConfig) -> None:
    """Log to stderr, each line with the worker's name and role."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s worker={config.name} role={config.role} %(message)s",
    )
