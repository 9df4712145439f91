"""The health check of images: a worker that serves, one that drains, none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from support.certificates import Authority, options

from tasuki.worker.health import is_serving, main


@pytest.fixture
def server() -> Iterator[tuple[str, health.HealthServicer]]:
    made = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
    port = made.add_insecure_port("127.0.0.1:0")
    made.start()
    yield f"127.0.0.1:{port}", servicer
    made.stop(0).wait()


def test_serving_is_healthy_and_draining_is_not(
    server: tuple[str, health.HealthServicer],
) -> None:
    address, servicer = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert is_serving(address)
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert not is_serving(address)


def test_a_proxy_of_the_container_is_not_asked(
    server: tuple[str, health.HealthServicer], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, servicer = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert is_serving(address)


def test_nobody_is_not_healthy() -> None:
    assert not is_serving("127.0.0.1:1", timeout_s=2.0)


def test_the_command_says_why_a_worker_is_not_healthy(
    server: tuple[str, health.HealthServicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = server
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    assert main([address]) == 0
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert main([address]) == 1
    assert main(["127.0.0.1:1"]) == 1
    drains, nobody = capsys.readouterr().err.splitlines()
    assert drains == f"{address}: the worker answers that it does not serve: it drains"
    assert nobody.startswith("127.0.0.1:1: no answer within 5 s (")
    assert "correct HOST:PORT" in nobody

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "the following arguments are required: HOST:PORT" in capsys.readouterr().err


@pytest.mark.system  # openssl
def test_a_worker_with_certificates_is_asked_with_the_fleets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Authority(tmp_path / "ca").fleet("worker")
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    made = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
    port = fleet.listen(made, "127.0.0.1:0")  # type: ignore[arg-type]  # not of asyncio
    made.start()

    address = f"127.0.0.1:{port}"
    assert main([address, *options(fleet)]) == 0
    assert main([address]) == 1
    assert "--fleet-cert" in capsys.readouterr().err
    made.stop(0).wait()
