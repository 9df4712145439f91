"""Runs a deployment: workers where the engine has places, the router here, until told to stop."""

from __future__ import annotations

import http.client
import json
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from urllib.parse import SplitResult, urlsplit

from tasuki import _native
from tasuki.errors import TasukiError
from tasuki.launch import topology
from tasuki.launch.banner import banner
from tasuki.launch.config import ServeConfig
from tasuki.launch.control import ControlServer
from tasuki.launch.engine import Engine
from tasuki.launch.errors import LaunchError
from tasuki.launch.logs import Logs, log_folder
from tasuki.launch.machine import router_port
from tasuki.launch.place import make_engine
from tasuki.launch.supervisor import Call, Stop, StoppedError, Supervisor, say, tell
from tasuki.launch.worker_set import WorkerSet
from tasuki.launch.workers_file import WorkersFile
from tasuki.models.fetch import resolve_model

_ROUTER = "router"
_HEALTH_TIMEOUT_S = 30.0
_WORKER_GRACE_S = 10.0  # beyond the drain, to end
_WRITE_AGAIN_S = 1.0


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
    check_features(config)
    with (
        closing(ControlServer(config.control_socket)) as control,
        closing(make_engine(config)) as engine,
        log_folder(config.log_dir) as logs,
    ):
        return _serve(config, engine, control, logs, job, begun_s)


def check_features(config: ServeConfig) -> None:
    """Refuse now what the router and the workers would refuse after a long start.

    Raises:
        LaunchError: This build lacks what an option requires.
        FleetError: The fleet's certificates cannot be used.
    """
    router = config.router
    for option, given, feature, is_there in (
        ("--tls-cert", router.tls_cert, "tls", _native.HAS_TLS),
        ("--fleet-cert", config.worker.fleet_cert, "tls", _native.HAS_TLS),
        ("--otlp-endpoint", router.otlp_endpoint, "otel", _native.HAS_OTEL),
    ):
        if given is not None and not is_there:
            raise LaunchError(
                f"{option} requires the feature `{feature}`, which this build leaves out:"
                f" `make setup FEATURES={feature}` adds it"
            )
    if config.worker.fleet is not None:
        config.worker.fleet.check()


def _serve(
    config: ServeConfig,
    engine: Engine,
    control: ControlServer,
    logs: Logs,
    job: Job | None,
    begun_s: float,
) -> int:
    logs.keep = False  # no process has written yet
    model = resolve_model(config.model)
    dtype = _dtype(config, engine, model)
    with router_port(config.host, config.port) as port:
        logs.keep = True

        def on_stale() -> None:
            supervisor.call_later(_WRITE_AGAIN_S, file.retry)

        file = WorkersFile(logs.path / "workers.txt", on_stale)

        def on_ready(name: str, address: str) -> None:
            if name != _ROUTER:
                file.put(name, address)

        supervisor = Supervisor(
            logs.path, config.echo_logs, starter=engine.start, on_ready=on_ready
        )
        workers = WorkerSet(config, engine, supervisor, file)
        orderly = False
        with _signals(supervisor):
            try:
                # First: it reads the model's tokenizer while the workers load.
                supervisor.start([topology.router_spec(config, model, file.path, port)])
                workers.start(model, dtype)
                file.publish()
                url = _await_router(config, supervisor)
                took_s = time.monotonic() - begun_s
                deployment = _describe(config, model, url, f"{dtype}, ready after {took_s:.1f} s")
                control.begin(workers.scale, lambda function: supervisor.post(Call(function)))
                _begin(deployment, job, supervisor)
                code = supervisor.run()
                orderly = True
                return code
            except StoppedError as stopped:
                orderly = True
                return stopped.code or 130
            finally:
                control.close()
                engine.interrupt()
                _end(supervisor, config.router.drain_s if orderly else 0.0)
                logs.keep = supervisor.died or not orderly
                if logs.keep or config.log_dir:
                    say(f"logs kept in {logs.path}")


def _dtype(config: ServeConfig, engine: Engine, model: Path) -> str:
    """The one dtype of all workers."""
    if config.worker.dtype == "auto" and config.worker.quantization != "none":
        return "bfloat16"  # of everything but the quantized weights
    return engine.settle_dtype(model)


def _await_router(config: ServeConfig, supervisor: Supervisor) -> str:
    """Wait until the router serves; gives its URL."""
    (url,) = supervisor.await_ready([_ROUTER], config.startup_timeout_s)
    url = _reachable(url)
    supervisor.await_condition(lambda: _why_not_ready(url), _HEALTH_TIMEOUT_S)
    return url


def _describe(config: ServeConfig, model: Path, url: str, how: str) -> Deployment:
    summary = f"{config.topology}, {how}"
    if config.router.admin_port:
        summary += f"; dashboard: http://127.0.0.1:{config.router.admin_port}/dashboard"
    served = topology.served_names(config, model)[0]
    return Deployment(url, served, summary, config.router.key_variable)


def _begin(deployment: Deployment, job: Job | None, supervisor: Supervisor) -> None:
    if job is None:
        text = banner(deployment.url, deployment.model, deployment.summary, deployment.key_variable)
        tell(text, sys.stdout)
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
    workers = [name for name in supervisor.names() if name != _ROUTER]
    if len(workers) < len(supervisor.names()):
        say("stopping: the router drains …" if drain_s else "stopping")
        supervisor.stop([_ROUTER], drain_s + 2.0)
    # With the router gone nothing is left to drain: they end at once unless one hangs.
    supervisor.stop(workers, drain_s + _WORKER_GRACE_S)
    say("stopped")


@contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        supervisor.post(Stop(0))

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else `nohup` wants it to stay
        numbers.append(signal.SIGHUP)
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


def _why_not_ready(url: str) -> str:
    """Why the router is not ready, in its own words; empty: it is."""
    parts = urlsplit(url)
    connection = _connection(parts)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        if answer.status == 200:
            return ""
        why = f"/ready answers {answer.status}: {_message(answer.read())}"
    except (OSError, http.client.HTTPException) as error:
        why = f"/ready does not answer: {error}"
    finally:
        connection.close()
    return f"the router at {url} is not ready ({why})"


def _message(body: bytes) -> str:
    """The message of an error that the router answers."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()
