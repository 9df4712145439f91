"""Transfers use the network that the worker is bound to, and no other."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from support.sysfs import eight_rails, gpu_address

from tasuki.kv.net_devices import Network, NetworkError, net_devices

Address = namedtuple("Address", "address")


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two networks and no RDMA device."""
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
def test_the_device_is_that_of_the_address(host: str, devices: str, sysfs: Path) -> None:
    chosen, why = net_devices(Network(host), sysfs)
    assert chosen == devices
    assert host in why
    assert devices != "eth0" or why == f"eth0, which has {host}"


def test_rdma_devices_go_with_every_network_but_loopback(sysfs: Path) -> None:
    eight_rails(sysfs)
    chosen, _ = net_devices(Network("10.1.2.3"), sysfs)
    assert chosen == ",".join(["eth0", *(f"mlx5_{rail}:1" for rail in range(9))])
    assert net_devices(Network("127.0.0.1"), sysfs)[0] == "lo"


def test_a_rank_uses_the_rdma_device_of_its_gpu(sysfs: Path) -> None:
    eight_rails(sysfs)
    for rail in range(8):
        chosen, why = net_devices(Network("10.1.2.3", gpu=gpu_address(rail)), sysfs)
        assert chosen == f"eth0,mlx5_{rail}:1"
        assert "of 10: same switch as the GPU" in why
    everywhere, _ = net_devices(Network("0.0.0.0", gpu=gpu_address(2)), sysfs)
    assert everywhere == "eth0,eth1,mlx5_2:1"


def test_the_operator_chooses_others(sysfs: Path) -> None:
    eight_rails(sysfs)
    gpu = gpu_address(0)
    chosen, why = net_devices(Network("10.1.2.3", gpu, rdma="mlx5_1,mlx5_2:1"), sysfs)
    assert (chosen, "--rdma-devices" in why) == ("eth0,mlx5_1:1,mlx5_2:1", True)
    assert net_devices(Network("10.1.2.3", gpu, rdma="all"), sysfs)[0].count("mlx5") == 9
    with pytest.raises(NetworkError, match="names mlx5_77:1, this machine has mlx5_0:1, "):
        net_devices(Network("10.1.2.3", gpu, rdma="mlx5_77"), sysfs)
