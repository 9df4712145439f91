"""Which network devices the transport may use: those of the address a worker is reached at.

What a worker binds is what it is told to bind: on a loopback address nothing
of it can be reached from another machine, nor can its transfers. Devices
inside a machine (shared memory, CUDA IPC) are not among these and always there.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

import psutil

LOOPBACK = "lo"
ANY = "all"


def net_devices(host: str, infiniband: Path = Path("/sys/class/infiniband")) -> tuple[str, str]:
    """UCX's list of devices for a worker at `host`, and why.

    The interface that has the address, and with it every RDMA device: those
    have no addresses of their own to compare. All, where no interface has it.

    Args:
        host: Address or name that the worker binds.
        infiniband: Where the kernel lists RDMA devices.
    """
    address = _resolve(host)
    if address is None or address.is_unspecified:
        return ANY, f"all network devices: {host} is no single interface's address"
    if address.is_loopback:
        return LOOPBACK, f"{LOOPBACK}: {host} is a loopback address"
    interface = _interface_of(str(address))
    if interface is None:
        return ANY, f"all network devices: no interface here has {host}"
    rdma = sorted(f"{path.name}:1" for path in infiniband.glob("*"))
    return ",".join([interface, *rdma]), f"{interface} has {host}" + (
        f"; with {len(rdma)} RDMA devices" if rdma else ""
    )


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError, IndexError):
        return None


def _interface_of(address: str) -> str | None:
    """The interface of this machine that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return None
