"""A worker whose address cannot be bound ends before its model is loaded, and names the option."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasuki.worker import main
from tasuki.worker.address import BindError, check_address
from tasuki.worker.config import WorkerConfig


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of the loopback address at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_port_ends_the_start_before_the_model_is_loaded(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        pytest.fail("the model is loaded")

    monkeypatch.setattr(main, "build", load)
    monkeypatch.setattr(main, "keep_compiled", lambda: None)
    config = WorkerConfig(model=tmp_path, port=taken, preflight="off", device="cpu")
    with pytest.raises(BindError) as refused:
        main.run(config)
    assert str(refused.value) == (
        f"cannot listen on 127.0.0.1:{taken} (address already in use): choose another --port"
        " (`tasuki serve`: --worker-base-port)"
    )


@pytest.mark.parametrize(
    ("host", "where"),
    [("192.0.2.1", "192.0.2.1:0"), ("2001:db8::1", "[2001:db8::1]:0"), ("a..b", "a..b:0")],
)
def test_an_address_of_elsewhere_is_refused_with_the_host(host: str, where: str) -> None:
    with pytest.raises(BindError) as refused:
        check_address(host, 0)
    assert str(refused.value) == (
        f"cannot listen on {where}, which is no address of this machine: correct --host"
        " (`tasuki serve`: --worker-host)"
    )


def test_an_address_that_is_free_is_free_afterwards() -> None:
    for host in ("127.0.0.1", "0.0.0.0", "localhost", "::", "[::]"):
        check_address(host, 0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for _ in range(2):
        check_address("127.0.0.1", port)
