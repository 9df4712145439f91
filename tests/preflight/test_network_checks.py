"""Addresses, names, ports and RDMA devices, as a worker would use them."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from support.sysfs import eight_rails, gpu_address, write

from tasuki.preflight import network
from tasuki.preflight.gpus import Gpu, Gpus, gpu_checks
from tasuki.preflight.local import Subject, local_checks
from tasuki.preflight.result import Check, PreflightError
from tasuki.preflight.transfers import device_of


def _gpu(index: int, free: int = 80) -> Gpu:
    return Gpu(index, "H100", gpu_address(index), 80 << 30, free << 30)


def _by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_an_address_of_no_interface() -> None:
    [check] = network.own_address("192.0.2.77", {})
    assert check.status == "fail" and "127.0.0.1" in check.remedy
    [check] = network.own_address("no.such.host.invalid", {})
    assert check.status == "fail"
    assert [check.status for check in network.own_address("127.0.0.1", {})] == ["ok"]


def test_an_interface_that_ucx_is_told_and_does_not_exist() -> None:
    own = {"UCX_NET_DEVICES": "lo,eth77:1"}
    checks = _by_name(network.own_address("127.0.0.1", own))
    assert checks["UCX_NET_DEVICES"].status == "fail"
    assert checks["UCX_NET_DEVICES"].found.startswith("eth77:1 is no device")


def test_a_name() -> None:
    assert network.resolves("localhost").status == "ok"
    assert network.resolves("[::1]").status == "ok"
    assert network.resolves("no.such.host.invalid").status == "fail"


def test_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = network.port_free("127.0.0.1", port)
        assert check.status == "fail" and "ss -ltnp" in check.remedy
    assert network.port_free("127.0.0.1", port).status == "ok"


def test_eight_rails(tmp_path: Path) -> None:
    checks = _by_name(network.rdma_checks([_gpu(i) for i in range(8)], sysfs=eight_rails(tmp_path)))
    for rail in range(8):
        assert checks[f"GPU {rail} to RDMA"].found == f"mlx5_{rail}:1: same switch"
        assert checks[f"RDMA mlx5_{rail}:1"].status == "ok"
        assert "MTU 9000, RoCE v2 GID index 3" in checks[f"RDMA mlx5_{rail}:1"].found
    assert checks["RDMA mlx5_9:1"].found.startswith("down") or "DOWN" in str(checks)
    assert checks["RDMA mlx5_9:1"].status == "warn"
    assert "nvidia_peermem" in checks["GPUDirect RDMA"].found


def test_rails_that_are_set_up_badly(tmp_path: Path) -> None:
    rails = eight_rails(tmp_path)
    write(rails / "class/infiniband/mlx5_0/device/net/rail0/mtu", "1500")
    for index in (2, 3):
        write(rails / f"class/infiniband/mlx5_1/ports/1/gids/{index}", "fe80::1")
    (rails / "class/infiniband/mlx5_2").unlink()
    write(rails / "module/nvidia_peermem/refcnt", "0")
    checks = _by_name(network.rdma_checks([_gpu(2)], sysfs=rails))
    assert "MTU of at least" in checks["RDMA mlx5_0:1"].expected
    assert "IPv4" in checks["RDMA mlx5_1:1"].remedy
    assert checks["GPU 2 to RDMA"].found.endswith("same NUMA node")
    assert "GPUDirect RDMA" not in checks


def test_rdma_that_is_required_and_not_there(tmp_path: Path) -> None:
    [check] = network.rdma_checks([], required=True, sysfs=tmp_path)
    assert check.status == "fail"
    [check] = network.rdma_checks([], sysfs=tmp_path)
    assert check.status == "ok"


@pytest.mark.parametrize(
    ("there", "required", "status"),
    [
        (Gpus(), False, "ok"),
        (Gpus(), True, "fail"),
        (Gpus("580.1", []), True, "fail"),
        (Gpus("580.1", [_gpu(0)]), True, "ok"),
        (Gpus("580.1", [_gpu(0, free=40)]), True, "warn"),
        (Gpus(problem="the driver is too old"), True, "fail"),
        (Gpus(problem="the driver is too old"), False, "warn"),
    ],
)
def test_gpus(there: Gpus, required: bool, status: str) -> None:
    assert [check.status for check in gpu_checks(there, required)] == [status]


def test_a_worker_is_told_of_its_own_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Gpus("580.1", [_gpu(0), _gpu(1, free=40)])
    monkeypatch.setattr("tasuki.preflight.gpus.look", lambda: there)

    def seen(*own: str) -> list[tuple[str, str]]:
        checks = local_checks(Subject(own_gpus=own), slow=False)
        return [(each.name, each.status) for each in checks if re.fullmatch(r"GPU \d", each.name)]

    assert seen(gpu_address(0)) == [("GPU 0", "ok")]
    assert seen(gpu_address(1)) == [("GPU 1", "warn")]
    assert seen() == seen("0000:ff:00.0") == [("GPU 0", "ok"), ("GPU 1", "warn")]


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert (str(device_of("cuda:1")), str(device_of("auto"))) == ("cuda:1", "cuda:0")
    for wrong, said in (("cuda:2", "sees 2 GPUs"), ("tpu", "use auto, cpu or cuda:N")):
        with pytest.raises(PreflightError, match=said):
            device_of(wrong)
