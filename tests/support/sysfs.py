"""A made-up sysfs of an 8-rail node: 8 GPUs, each with a NIC below the same PCIe switch.

node 0: GPUs 0-3, mlx5_0-3, and mlx5_8 (storage) at a root port of its own
node 1: GPUs 4-7, mlx5_4-7, and mlx5_9, whose link is down, below GPU 7's switch
"""

from __future__ import annotations

from pathlib import Path

CPUS_OF_NODE = ("0-55,112-167", "56-111,168-223")


def gpu_address(index: int) -> str:
    return f"0000:{16 * (index + 1) + 2:02x}:00.0"


def eight_rails(root: Path) -> Path:
    """Write it below `root`, and return `root`."""
    for rail in range(8):
        switch = _switch(rail)
        node = rail // 4
        _pci(root, f"{switch}/{_bridge(rail, 2)}", gpu_address(rail), node)
        _nic(root, f"{switch}/{_bridge(rail, 3)}", f"mlx5_{rail}", _address(rail, 3), node)
    _nic(root, "pci0000:f0/0000:f0:01.0", "mlx5_8", "0000:f1:00.0", 0)
    _nic(root, f"{_switch(7)}/{_bridge(7, 4)}", "mlx5_9", _address(7, 4), 1, state="1: DOWN")
    for node, cpus in enumerate(CPUS_OF_NODE):
        write(root / f"devices/system/node/node{node}/cpulist", cpus)
    write(root / "devices/system/cpu/online", "0-223")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def _address(rail: int, function: int) -> str:
    return f"0000:{16 * (rail + 1) + function:02x}:00.0"


def _switch(rail: int) -> str:
    bus = 16 * (rail + 1)
    return f"pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.0/0000:{bus:02x}:00.0"


def _bridge(rail: int, port: int) -> str:
    return f"0000:{16 * (rail + 1) + 1:02x}:{port:02x}.0"


def _pci(root: Path, above: str, address: str, node: int) -> Path:
    device = root / "devices" / above / address
    write(device / "numa_node", str(node))
    link = root / "bus/pci/devices" / address
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)
    return device


def _nic(
    root: Path, above: str, name: str, address: str, node: int, state: str = "4: ACTIVE"
) -> None:
    device = _pci(root, above, address, node)
    rdma = device / "infiniband" / name
    (rdma / "ports").mkdir(parents=True)
    (rdma / "device").symlink_to(device)
    number = name.removeprefix("mlx5_")
    write(device / f"net/rail{number}/mtu", "9000")
    port = rdma / "ports/1"
    write(port / "state", state)
    write(port / "rate", "400 Gb/sec (4X NDR)")
    write(port / "link_layer", "Ethernet")
    write(port / "gids/0", "fe80:0000:0000:0000:0e42:a1ff:fe00:0001")
    write(port / "gid_attrs/types/0", "IB/RoCE v1")
    for index, kind in ((2, "IB/RoCE v1"), (3, "RoCE v2")):
        write(port / f"gids/{index}", f"0000:0000:0000:0000:0000:ffff:0a00:{int(number):02x}01")
        write(port / f"gid_attrs/types/{index}", kind)
    link = root / "class/infiniband" / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(rdma)
