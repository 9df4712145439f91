"""One worker process: KV side and server around the engine, run until told to stop.

Threads: asyncio (this one: gRPC), the engine thread (worker/loop.py), its
watchdog (worker/watchdog.py) and the transfer thread (kv/puller.py).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import queue
import sys
from dataclasses import replace

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from tasuki import background
from tasuki.kv.clock import machine
from tasuki.kv.config import DIGESTS
from tasuki.kv.handoff import HandoffConfig, Handoffs
from tasuki.v1.kv_pb2_grpc import add_KvServicer_to_server
from tasuki.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from tasuki.worker.address import BindError, check_address
from tasuki.worker.build import Built, build
from tasuki.worker.checked import check_first
from tasuki.worker.config import WorkerConfig, join_host_port
from tasuki.worker.failures import Failures
from tasuki.worker.host_process import run_host
from tasuki.worker.hosts import nodes_key
from tasuki.worker.loop import Command, EngineLoop, Stop, Wake
from tasuki.worker.server import SERVER_OPTIONS, WorkerService
from tasuki.worker.shutdown import Shutdown
from tasuki.worker.startup import Phases, keep_compiled, process_begun_s
from tasuki.worker.state_log import State, StateLog
from tasuki.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

_GRACE_S = 1.0  # for streams to end after the engine has stopped


def run(config: WorkerConfig) -> int:
    """Serve until SIGTERM or SIGINT, and then until what runs has ended (`shutdown.py`).

    A worker's process exits from here: with 0 after a signal, with 1 after a failure (failures.py).

    Returns:
        The exit code of a host other than the first.

    Raises:
        TasukiError: The worker cannot start: settings, model, memory, transport or port.
    """
    if config.fleet is not None:
        config.fleet.check()
    phases = Phases(process_begun_s())
    phases.until_now("imports")
    with phases.phase("preflight"):
        check_first(config)
    if config.rank:
        return run_host(config.nodes, config.rank, config.tensor_parallel, nodes_key())
    check_address(config.host, config.port)
    keep_compiled()
    failures = Failures()
    failures.catch_threads()
    built = build(config, phases, failures.put)
    code = asyncio.run(_serve(config, built, phases, failures))
    # Nothing depends on Python's own end, which takes a second or two with torch. After a failure a
    # hung device, or a collective that a rank has left, may hold a thread for ever.
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


async def _serve(config: WorkerConfig, built: Built, phases: Phases, failures: Failures) -> int:
    loop = asyncio.get_running_loop()
    failures.catch_tasks(loop)
    watchdog = Watchdog(lambda: built.engine.step_limit_s, failures.put)
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    handoffs = Handoffs(
        host=built.engine,
        config=HandoffConfig(
            lease_s=config.lease_s,
            pull_timeout_s=config.pull_timeout_s,
            machine=machine(),
            fleet=config.fleet,
            digest_one_in=DIGESTS[config.kv_digest],
        ),
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
    add_WorkerServicer_to_server(WorkerService(inbox, lambda: watchdog.late), server)
    add_KvServicer_to_server(handoffs.servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = _bind(server, config)
    built.info.kv_endpoint = endpoint = config.endpoint(port)

    done = loop.create_future()

    def finish(code: int) -> None:
        if not done.done():
            done.set_result(code)

    def on_failure() -> None:
        loop.call_soon_threadsafe(finish, 1)

    failures.serve(on_failure)

    def state() -> State:
        counters, pulled = replace(built.engine.counters()), replace(handoffs.counters)
        return State(built.engine.load(), counters, pulled)

    engine_loop = EngineLoop(
        built.engine,
        handoffs,
        built.info,
        inbox,
        on_failure=failures.put,
        watchdog=watchdog,
        grammars=built.grammars,
        state_log=StateLog(config.state_log_s, state),
    )

    def on_drain() -> None:
        stopped = health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        background.start(stopped, "health")

    shutdown = Shutdown(loop, inbox, config.drain_s, on_drain, lambda: finish(0))
    shutdown.listen()
    gc.collect()
    gc.freeze()  # what is here stays: no collection looks at it again in the middle of a step
    atexit.register(gc.unfreeze)  # else Triton reports leaks at the end
    engine_loop.start()
    watchdog.start()
    await server.start()
    await health.set("", health_pb2.HealthCheckResponse.SERVING)
    log.info("%s", phases.summary())
    print(f"ready {endpoint}", flush=True)
    if built.ranks is not None:
        built.ranks.watch_hosts(lambda: loop.call_soon_threadsafe(shutdown.drain))

    code: int = await done
    await health.enter_graceful_shutdown()
    watchdog.stop()
    inbox.put(Stop())
    await asyncio.to_thread(engine_loop.join, _GRACE_S)
    handoffs.close()  # first: its streams end in order, and the server waits for none of them
    await server.stop(_GRACE_S)
    if built.ranks is not None:
        built.ranks.close()
    return code


def _bind(server: grpc.aio.Server, config: WorkerConfig) -> int:
    address = join_host_port(config.host, config.port)
    try:
        if config.fleet is None:
            port = server.add_insecure_port(address)
        else:
            port = config.fleet.listen(server, address)
    except RuntimeError:
        port = 0
    if port == 0:
        check_address(config.host, config.port)  # its error has the cause
        raise BindError(f"cannot listen on {address}: choose another --port or --host")
    return port


def configure_logging(config: WorkerConfig) -> None:
    """Log to stderr, each line with the worker's name and role."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s worker={config.name} role={config.role} %(message)s",
    )
