"""Transfers use the network that the worker is bound to, and no other."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from tasuki.kv.net_devices import net_devices

Address = namedtuple("Address", "address")


@pytest.fixture
def infiniband(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two networks; the folder of its RDMA devices, of which it has none."""
    interfaces = {
        "lo": [Address("127.0.0.1"), Address("::1")],
        "eth0": [Address("10.1.2.3"), Address("fe80::1%eth0")],
        "eth1": [Address("192.168.7.7")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    return tmp_path


@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("127.0.0.1", "lo"),
        ("127.1.2.3", "lo"),
        ("localhost", "lo"),
        ("::1", "lo"),
        ("10.1.2.3", "eth0"),
        ("192.168.7.7", "eth1"),
        ("fe80::1", "eth0"),
        ("0.0.0.0", "all"),
        ("::", "all"),
        ("10.9.9.9", "all"),
    ],
)
def test_the_device_is_that_of_the_address(host: str, devices: str, infiniband: Path) -> None:
    chosen, why = net_devices(host, infiniband)
    assert chosen == devices
    assert host in why


def test_rdma_devices_go_with_every_network_but_loopback(infiniband: Path) -> None:
    for name in ("mlx5_1", "mlx5_0"):
        (infiniband / name).mkdir()
    assert net_devices("10.1.2.3", infiniband)[0] == "eth0,mlx5_0:1,mlx5_1:1"
    assert net_devices("127.0.0.1", infiniband)[0] == "lo"
