"""Runs a deployment on this machine: workers, router, until told to stop."""

from __future__ import annotations

import http.client
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import SplitResult, urlsplit

from tasuki import _native
from tasuki.errors import TasukiError
from tasuki.kv.fleet import Fleet
from tasuki.launch import topology
from tasuki.launch.banner import banner
from tasuki.launch.config import ServeConfig
from tasuki.launch.errors import LaunchError
from tasuki.launch.forking import ForkServer
from tasuki.launch.gpus import is_on_gpus
from tasuki.launch.logs import log_folder
from tasuki.launch.machine import look_at_machine, router_port
from tasuki.launch.settle import settle_dtype
from tasuki.launch.supervisor import Stop, StoppedError, Supervisor, say
from tasuki.models.fetch import resolve_model
from tasuki.nvidia_driver import driver_problem

_HEALTH_TIMEOUT_S = 30.0
_WORKER_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is up.

    Attributes:
        url: Of the router.
        model: The served name.
        summary: Topology, dtype and start-up time in one line.
        key_variable: See `RouterOptions`.
    """

    url: str
    model: str
    summary: str
    key_variable: str | None = None


Job = Callable[[Deployment], int]


def serve(config: ServeConfig, job: Job | None = None) -> int:
    """Serve until SIGINT or SIGTERM, or until `job` returns.

    Args:
        config: The settings.
        job: Runs in a thread once everything is ready; its result is the exit
            code. None: print the banner and serve.

    Returns:
        The exit code: 0 after a signal once everything was ready, 130 before.

    Raises:
        TasukiError: It cannot start; a worker's own error is in the message.
    """
    begun_s = time.monotonic()
    _check_features(config)
    machine = look_at_machine()
    if config.device == "auto" and (problem := driver_problem()):
        say(f"using the CPU: {problem}")
    environment = topology.worker_environment(config, machine)
    with ForkServer(topology.PRELOAD, environment) as forks:
        return _serve(config, machine, forks, job, begun_s)


def _check_features(config: ServeConfig) -> None:
    """Refuse now what the router and the workers would refuse after a long start."""
    router = config.router
    for option, given, feature, is_there in (
        ("--tls-cert", router.tls_cert, "tls", _native.HAS_TLS),
        ("--fleet-cert", router.fleet_cert, "tls", _native.HAS_TLS),
        ("--otlp-endpoint", router.otlp_endpoint, "otel", _native.HAS_OTEL),
    ):
        if given is not None and not is_there:
            raise LaunchError(
                f"{option} requires the feature `{feature}`, which this build leaves out:"
                f" `make setup FEATURES={feature}` adds it"
            )
    fleet = Fleet.of(router.fleet_cert, router.fleet_key, router.fleet_ca)
    if fleet is not None:
        fleet.check()


def _serve(
    config: ServeConfig,
    machine: topology.Machine,
    forks: ForkServer,
    job: Job | None,
    begun_s: float,
) -> int:
    model = resolve_model(config.model)
    dtype = _dtype(config, model, machine)
    specs = topology.worker_specs(config, model, dtype, machine)
    with log_folder(config.log_dir) as logs:
        supervisor = Supervisor(logs.path, config.echo_logs, starter=forks.start)
        orderly = False
        with _signals(supervisor):
            try:
                if topology.stages_in_host(config, machine):
                    say("these GPUs cannot read one another: --transport host-staged")
                say(f"starting {config.topology}: {', '.join(s.name for s in specs)}")
                supervisor.start(specs)
                names = [s.name for s in specs]
                addresses = supervisor.await_ready(names, config.startup_timeout_s)
                port = router_port(config.host, config.port)
                supervisor.start([topology.router_spec(config, model, addresses, port)])
                (url,) = supervisor.await_ready(["router"], config.startup_timeout_s)
                url = _reachable(url)
                supervisor.await_condition(
                    lambda: _is_ready(url), f"the router at {url} is ready", _HEALTH_TIMEOUT_S
                )
                took_s = time.monotonic() - begun_s
                summary = f"{config.topology}, {dtype}, ready after {took_s:.1f} s"
                if config.router.admin_port:
                    summary += f"; dashboard: http://127.0.0.1:{config.router.admin_port}/dashboard"
                served = topology.served_names(config, model)[0]
                variable = config.router.key_variable
                _begin(Deployment(url, served, summary, variable), job, supervisor)
                code = supervisor.run()
                orderly = True
                return code
            except StoppedError as stopped:
                orderly = True
                return stopped.code or 130
            finally:
                forks.close()
                _end(supervisor, config.router.drain_s)
                logs.keep = supervisor.died or not orderly
                if logs.keep or config.log_dir:
                    say(f"logs kept in {logs.path}")


def _dtype(config: ServeConfig, model: Path, machine: topology.Machine) -> str:
    """The one dtype of all workers."""
    if config.dtype == "auto" and config.worker.quantization not in (None, "none"):
        return "bfloat16"  # of everything but the quantized weights
    if is_on_gpus(config.device, machine.gpus) and config.dtype == "auto":
        return "bfloat16"  # what GPUs are made for: nothing to measure
    dtype, reason = settle_dtype(
        model,
        config.dtype,
        topology.worker_environment(config, machine),
        on_measure=lambda: say("measuring dtypes …"),
    )
    say(f"dtype {reason}")
    return dtype


def _begin(deployment: Deployment, job: Job | None, supervisor: Supervisor) -> None:
    if job is None:
        text = banner(deployment.url, deployment.model, deployment.summary, deployment.key_variable)
        print(text, flush=True)
        return
    work = job

    def run() -> None:
        code = 1
        try:
            code = work(deployment)
        except (OSError, http.client.HTTPException, TasukiError) as error:
            say(f"error: {error}")
        finally:
            supervisor.post(Stop(code))

    threading.Thread(target=run, name="job", daemon=True).start()


def _end(supervisor: Supervisor, drain_s: float) -> None:
    workers = [name for name in supervisor.names() if name != "router"]
    if len(workers) < len(supervisor.names()):
        say("stopping: the router drains …")
        supervisor.stop(["router"], drain_s + 2.0)
    supervisor.stop(workers, _WORKER_GRACE_S)
    say("stopped")


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        supervisor.post(Stop(0))

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reachable(url: str) -> str:
    parts = urlsplit(url)
    if parts.port is None:
        raise LaunchError(f"the router says that it listens on {url!r}, which has no port")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port}"


def _connection(parts: SplitResult) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme != "https":
        return http.client.HTTPConnection(host, parts.port, timeout=2.0)
    # Our own child at an address of this machine, which its certificate need not name.
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, parts.port, timeout=2.0, context=unverified)


def _is_ready(url: str) -> bool:
    parts = urlsplit(url)
    connection = _connection(parts)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
