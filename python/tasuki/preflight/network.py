"""Interfaces, RDMA devices and their distance to the GPUs, names of peers, ports."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tasuki.kv.net_devices import interface_of
from tasuki.kv.rdma_devices import SYSFS, PciPlace, RdmaDevice, nearest, pci_place, rdma_devices
from tasuki.preflight.gpus import Gpu
from tasuki.preflight.result import Check, fail, ok, warn

_SLOW_MBIT = 10_000
_ROCE_MTU = 4200  # bytes: room for RDMA's largest packet, 4,096 and headers
_NAME = "host"


def interfaces() -> list[Check]:
    """Every interface that is up, but loopback: speed and MTU, as far as it tells."""
    checks = []
    for name, state in sorted(psutil.net_if_stats().items()):
        if state.isup and name != "lo":
            speed = f"{state.speed / 1e3:g} Gb/s" if state.speed > 0 else "unknown rate"
            checks.append(ok(f"interface {name}", f"{speed}, MTU {state.mtu}", mtu_bytes=state.mtu))
    return checks


def own_address(host: str, own: Mapping[str, str]) -> list[Check]:
    """Whether an interface here has the address that the worker binds, and a good rate.

    Args:
        host: Address or name.
        own: The environment: UCX_NET_DEVICES may name interfaces.
    """
    there = psutil.net_if_addrs()
    known = sorted({a.address.partition("%")[0] for each in there.values() for a in each} - {""})
    checks = []
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(str(found).partition("%")[0])
    except (OSError, ValueError, IndexError) as error:
        return [fail(_NAME, f"{host}: {error}", "a name or an address", "give --host an address")]
    if address.is_unspecified:
        checks.append(ok(_NAME, f"{host}: every interface"))
    elif address.is_loopback:
        checks.append(ok(_NAME, f"{host}: this machine alone"))
    elif (interface := interface_of(str(address))) is None:
        usable = ", ".join(a for a in known if _is_address(a)) or "none"
        remedy = f"give --host one of {usable}"
        checks.append(
            fail(_NAME, f"{host} is no address of this machine", "one of its own", remedy)
        )
    else:
        checks.append(_rate(host, interface))
    for name in filter(None, own.get("UCX_NET_DEVICES", "").split(",")):
        device = name.partition(":")[0]
        if (
            name != "all"
            and device not in there
            and not (SYSFS / "class/infiniband" / device).exists()
        ):
            checks.append(
                fail(
                    "UCX_NET_DEVICES",
                    f"{name} is no device of this machine",
                    f"one of {', '.join(sorted(there))}",
                    "unset UCX_NET_DEVICES, or correct it",
                )
            )
    return checks


def _rate(host: str, interface: str) -> Check:
    state = psutil.net_if_stats().get(interface)
    if state is None or state.speed <= 0:
        return ok(_NAME, f"{host} at {interface}, whose rate is unknown")
    found = f"{host} at {interface}, {state.speed / 1e3:g} Gb/s"
    if state.speed >= _SLOW_MBIT:
        return ok(_NAME, found, bits_per_s=state.speed * 1e6)
    return warn(
        _NAME,
        found,
        f"at least {_SLOW_MBIT / 1e3:g} Gb/s between machines",
        "give --host the address of a faster interface",
        bits_per_s=state.speed * 1e6,
    )


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_link_local
    except ValueError:
        return False


def rdma_checks(gpus: Sequence[Gpu], required: bool = False, sysfs: Path = SYSFS) -> list[Check]:
    """Every RDMA device, and for each GPU the nearest ones.

    Args:
        gpus: Of this machine.
        required: Whether transfers must use RDMA.
        sysfs: Where the kernel describes devices.
    """
    devices = rdma_devices(sysfs)
    checks = [_device(device) for device in devices]
    if not any(device.is_active for device in devices):
        if required:
            checks.append(
                fail(
                    "RDMA",
                    "no active RDMA device",
                    "one at least (--require-transport rdma)",
                    "load the driver, give the container /dev/infiniband, cable the port",
                )
            )
        elif not devices:
            checks.append(ok("RDMA", "no device"))
    for gpu in gpus:
        place = pci_place(gpu.address, sysfs)
        if place is not None and devices:
            checks.append(_distance(gpu, place, devices))
    if gpus and devices and not _reads_gpus(sysfs):
        checks.append(
            warn(
                "GPUDirect RDMA",
                "the module nvidia_peermem is not loaded",
                "RDMA devices that read GPU memory themselves",
                "modprobe nvidia_peermem, unless UCX uses DMA-BUF here (open driver, Linux 5.12)",
            )
        )
    return checks


def _device(device: RdmaDevice) -> Check:
    name = f"RDMA {device.name}"
    found = ", ".join(filter(None, [device.state.lower(), device.rate, device.link_layer]))
    if device.link_layer == "Ethernet":
        gid = "none" if device.gid_index < 0 else str(device.gid_index)
        found += f", {device.interface or 'no interface'} MTU {device.mtu}, RoCE v2 GID index {gid}"
    if not device.is_active:
        return warn(name, found, "an active link", "look at the cable and at `ibstat`")
    if device.link_layer != "Ethernet":
        return ok(name, found)
    if device.gid_index < 0:
        remedy = f"give {device.interface or 'its interface'} an IPv4 address"
        return warn(name, found, "a GID of RoCE v2 with an IPv4 address", remedy)
    if device.mtu < _ROCE_MTU:
        remedy = f"ip link set {device.interface} mtu 9000, on the switch too"
        return warn(name, found, f"an MTU of at least {_ROCE_MTU}", remedy)
    return ok(name, found)


def _distance(gpu: Gpu, place: PciPlace, devices: list[RdmaDevice]) -> Check:
    name = f"GPU {gpu.index} to RDMA"
    near = nearest(place, devices)
    if not near or near[0].place is None:
        return warn(name, "no active device", "one near the GPU", "look at the RDMA devices above")
    distance = place.distance(near[0].place)
    found = f"{', '.join(device.name for device in near)}: {distance}"
    if str(distance) != "another NUMA node":
        return ok(name, found)
    expected = "a device on the GPU's NUMA node"
    return warn(name, found, expected, "put the worker on a GPU nearer to the device")


def _reads_gpus(sysfs: Path) -> bool:
    return (sysfs / "module/nvidia_peermem").exists()


def resolves(host: str) -> Check:
    """Whether the name of a peer is known here."""
    host = host.strip("[]")
    name = f"name {host}"
    try:
        found = sorted({str(each[4][0]) for each in socket.getaddrinfo(host, None)})
    except OSError as error:
        remedy = "correct the name, or look at /etc/resolv.conf and /etc/hosts"
        return fail(name, str(error), "an address", remedy)
    return ok(name, ", ".join(found))


def port_free(host: str, port: int) -> Check:
    """Whether the worker can bind its port."""
    name = f"port {port}"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "end what listens there (ss -ltnp), or choose another --port"
            if not taken:
                remedy = "choose another --host or --port"
            return fail(name, str(error), "a free port", remedy)
    return ok(name, "free")
