"""One worker process: KV side and server around the engine, run until told to stop.

Threads: asyncio (this one: gRPC), the engine thread (worker/loop.py) and the
transfer thread (kv/puller.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from tasuki.errors import ERROR_PREFIX, TasukiError
from tasuki.kv.handoff import HandoffConfig, Handoffs
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server
from tasuki.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from tasuki.worker.build import Built, build
from tasuki.worker.config import WorkerConfig
from tasuki.worker.loop import Command, EngineLoop, Stop, Wake
from tasuki.worker.ranks import RankError
from tasuki.worker.server import SERVER_OPTIONS, WorkerService
from tasuki.worker.startup import Phases, keep_compiled, process_begun_s

log = logging.getLogger(__name__)

_STUCK_S = 5.0  # until a start that a rank has left is given up
_GRACE_S = 1.0  # for streams to end after the engine has stopped


class BindError(TasukiError):
    """The port cannot be had."""


def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT.

    Returns:
        The exit code: 0 after a signal, 1 when the engine died of a defect.

    Raises:
        TasukiError: The worker cannot start: settings, model, memory, transport or port.
    """
    phases = Phases(process_begun_s())
    phases.until_now("imports")
    keep_compiled()
    failures = RankFailures()
    built = build(config, phases, failures.put)
    code = asyncio.run(_serve(config, built, phases, failures))
    if built.ranks is not None:
        logging.shutdown()
        os._exit(code)  # a collective that a rank has left may hold a thread for ever
    return code


class RankFailures:
    """What ended a rank: ends the process while it starts, later whatever `handle` says.

    While it starts the main thread may be in a collective that the rank has left,
    where nothing can reach it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handle: Callable[[RankError], None] | None = None
        self._came: RankError | None = None

    def put(self, error: RankError) -> None:
        """Take the error of a rank; any thread."""
        with self._lock:
            self._came, handle = error, self._handle
        if handle is not None:
            handle(error)
            return
        time.sleep(_STUCK_S)
        if self._handle is None:
            print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
            os._exit(1)

    def handle(self, handle: Callable[[RankError], None]) -> None:
        """From now on errors are for `handle`; one that came already too."""
        with self._lock:
            self._handle, came = handle, self._came
        if came is not None:
            handle(came)


async def _serve(config: WorkerConfig, built: Built, phases: Phases, failures: RankFailures) -> int:
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
        ranks=[] if built.ranks is None else built.ranks.kv,
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
        what = "a rank has ended" if isinstance(failure, RankError) else "the engine is broken"
        log.critical("%s (%r): this worker ends, to be started anew", what, failure)
        loop.call_soon_threadsafe(finish, 1)

    failures.handle(on_failure)
    engine_loop = EngineLoop(
        built.engine,
        handoffs,
        built.info,
        inbox,
        on_failure=on_failure,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, finish, 0)
    gc.collect()
    gc.freeze()  # what is here stays: no collection looks at it again in the middle of a step
    engine_loop.start()
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("%s", phases.summary())
    print(f"ready {config.host}:{port}", flush=True)

    code: int = await done
    await health.enter_graceful_shutdown()
    inbox.put(Stop())
    await asyncio.to_thread(engine_loop.join, _GRACE_S)
    await server.stop(_GRACE_S)
    handoffs.close()
    if built.ranks is not None:
        built.ranks.close()
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
