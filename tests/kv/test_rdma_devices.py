"""Each GPU of an 8-rail node gets the NIC below its own switch."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.sysfs import eight_rails, gpu_address

from tasuki.kv.rdma_devices import nearest, pci_place, rdma_devices


@pytest.fixture(scope="module")
def rails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eight_rails(tmp_path_factory.mktemp("sysfs"))


def test_a_port_is_described(rails: Path) -> None:
    device = rdma_devices(rails)[3]
    assert (device.name, device.state, device.rate) == ("mlx5_3:1", "ACTIVE", "400 Gb/sec (4X NDR)")
    assert (device.interface, device.mtu, device.gid_index) == ("rail3", 9000, 3)
    assert device.place is not None and device.place.numa_node == 0


@pytest.mark.parametrize("rail", range(8))
def test_a_gpu_gets_the_nic_of_its_switch(rails: Path, rail: int) -> None:
    gpu = pci_place(gpu_address(rail), rails)
    assert gpu is not None
    devices = rdma_devices(rails)
    assert [device.name for device in nearest(gpu, devices)] == [f"mlx5_{rail}:1"]
    places = {device.name: str(gpu.distance(device.place)) for device in devices if device.place}
    assert places[f"mlx5_{rail}:1"] == "same switch"
    assert places[f"mlx5_{(rail + 1) % 4 + rail // 4 * 4}:1"] == "same NUMA node"
    assert places[f"mlx5_{(rail + 4) % 8}:1"] == "another NUMA node"


def test_without_a_nic_at_its_switch_a_gpu_shares_those_of_its_node(tmp_path: Path) -> None:
    rails = eight_rails(tmp_path)
    (rails / "class/infiniband/mlx5_5").unlink()
    gpu = pci_place(gpu_address(5), rails)
    assert gpu is not None
    near = [device.name for device in nearest(gpu, rdma_devices(rails))]
    assert near == ["mlx5_4:1", "mlx5_6:1", "mlx5_7:1"]  # not mlx5_9, whose link is down


def test_what_is_not_there_has_no_place(rails: Path, tmp_path: Path) -> None:
    assert pci_place("0000:ff:00.0", rails) is None
    assert rdma_devices(tmp_path) == []
    eight_rails(tmp_path)
    shutil.rmtree(tmp_path / "class")
    gpu = pci_place(gpu_address(0), tmp_path)
    assert gpu is not None and nearest(gpu, rdma_devices(tmp_path)) == []
