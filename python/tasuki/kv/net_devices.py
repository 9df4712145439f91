"""Which network devices the transport may use: those of the address a worker is reached at.

What a worker binds is what it is told to bind: on a loopback address nothing
of it can be reached from another machine, nor can its transfers. Devices
inside a machine (shared memory, CUDA IPC) are not among these and always there.

Of the RDMA devices a rank uses those nearest to its GPU: traffic of eight GPUs on one device, or
across the link between two processors, is several times slower.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasuki.errors import TasukiError
from tasuki.kv.rdma_devices import SYSFS, nearest, pci_place, rdma_devices

LOOPBACK = "lo"
ANY = "all"
NEAREST = "nearest"


class NetworkError(TasukiError):
    """A network device that was asked for is not there."""


@dataclass(frozen=True, slots=True)
class Network:
    """What a rank's transfers may use.

    Attributes:
        host: Address that the worker binds; its network interface is used, no other.
        gpu: PCI address of the rank's GPU; empty: it has none.
        rdma: RDMA devices: `nearest` to the GPU, `all`, or names with commas (`mlx5_0:1`).
        require: See `tasuki.kv.ways.REQUIREMENTS`; empty: nothing is required.
    """

    host: str = "127.0.0.1"
    gpu: str = ""
    rdma: str = NEAREST
    require: str = ""


LOCAL = Network()


def net_devices(network: Network, sysfs: Path = SYSFS) -> tuple[str, str]:
    """UCX's list of devices, and why.

    The interface that has the address, and RDMA devices: those have no addresses of their own
    to compare. All, where no interface has the address.

    Args:
        network: Address, GPU and choice of RDMA devices.
        sysfs: Where the kernel describes devices.

    Raises:
        NetworkError: An RDMA device that was asked for is not there.
    """
    host = network.host
    address = address_of(host)
    if address is not None and address.is_loopback:
        return LOOPBACK, f"{LOOPBACK}: {host} is a loopback address"
    interface = None
    if address is not None and not address.is_unspecified:
        interface = interface_of(str(address))
    chosen, which = _rdma(network, sysfs)
    if interface is not None:
        return ",".join([interface, *chosen]), f"{interface}, which has {host}{which}"
    why = f"{host} is no single interface's address"
    if len(chosen) == len(rdma_devices(sysfs)):
        return ANY, f"all network devices: {why}"
    others = [name for name in psutil.net_if_addrs() if name != LOOPBACK]
    return ",".join([*others, *chosen]), f"all interfaces: {why}{which}"


def interface_of(address: str) -> str | None:
    """The interface of this machine that has `address`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return str(name)
    return None


def _rdma(network: Network, sysfs: Path) -> tuple[list[str], str]:
    """Names of the RDMA devices to use, and which they are.

    Raises:
        NetworkError: One that was asked for is not there.
    """
    there = rdma_devices(sysfs)
    if network.rdma not in (NEAREST, ANY):
        names = [name if ":" in name else f"{name}:1" for name in network.rdma.split(",")]
        known = {device.name for device in there}
        for name in names:
            if name not in known:
                raise NetworkError(
                    f"--rdma-devices names {name}, this machine has"
                    f" {', '.join(sorted(known)) or 'none'}: use these, nearest or all"
                )
        return names, f"; with {', '.join(names)} (--rdma-devices)"
    place = pci_place(network.gpu, sysfs) if network.gpu else None
    if network.rdma == NEAREST and place is not None:
        near = nearest(place, there)
        if near and near[0].place is not None:
            names = [device.name for device in near]
            distance = place.distance(near[0].place)
            return names, f"; with {', '.join(names)} of {len(there)}: {distance} as the GPU"
    names = [device.name for device in there if device.is_active]
    return names, f"; with {len(names)} RDMA devices" if names else ""


def interface_of_host(host: str) -> str | None:
    """The interface of this machine that has the address of `host`; None: none has."""
    address = address_of(host)
    return None if address is None else interface_of(str(address))


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a name resolves to; None: it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError, IndexError):
        return None
