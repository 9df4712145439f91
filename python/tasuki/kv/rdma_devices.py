"""The RDMA devices of this machine, and how far each lies from a GPU, as sysfs tells.

    devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0   a GPU
    devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0   a NIC: same switch
            |          |            |            |            |
            root       root port    switch up    switch down  the device

Two devices below one switch exchange data through it; otherwise data passes a root complex, or
the link between two processors. Pure, but for what it reads below `sysfs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path

SYSFS = Path("/sys")
_PLACES = ("same switch", "same root complex", "same NUMA node", "another NUMA node")


@total_ordering
@dataclass(frozen=True, slots=True)
class Distance:
    """Between two PCI devices; the nearer one is less.

    Attributes:
        place: Index into what `__str__` says, from the nearest.
        hops: Bridges between the two.
    """

    place: int
    hops: int

    def __lt__(self, other: Distance) -> bool:
        return (self.place, self.hops) < (other.place, other.hops)

    def __str__(self) -> str:
        return _PLACES[self.place]


@dataclass(frozen=True, slots=True)
class PciPlace:
    """Where a PCI device is.

    Attributes:
        path: Names of the folders from the root complex down to the device.
        numa_node: -1: the machine does not say, or has one node only.
    """

    path: tuple[str, ...]
    numa_node: int

    @classmethod
    def of(cls, device: Path) -> PciPlace | None:
        """Of a device's folder in sysfs, or a link to it; None: it is not there."""
        parts = device.resolve().parts
        roots = [i for i, part in enumerate(parts) if part.startswith("pci")]
        if not device.exists() or not roots:
            return None
        return cls(parts[roots[0] :], int(_text(device / "numa_node") or -1))

    def distance(self, other: PciPlace) -> Distance:
        """How far another device is."""
        shared = 0
        for one, two in zip(self.path, other.path, strict=False):
            if one != two:
                break
            shared += 1
        hops = len(self.path) + len(other.path) - 2 * shared
        if shared > 2:  # more than the root complex and its port
            return Distance(0, hops)
        if shared:
            return Distance(1, hops)
        return Distance(2 if self.numa_node == other.numa_node else 3, hops)


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """A port of an RDMA device.

    Attributes:
        name: As UCX names it, for example `mlx5_0:1`.
        state: For example `ACTIVE`.
        rate: For example `400 Gb/sec (4X NDR)`.
        link_layer: `InfiniBand` or `Ethernet`.
        interface: Its network interface, if it has one.
        mtu: Of that interface, in bytes; 0: it has none.
        gid_index: The GID that RoCE v2 uses with IPv4; -1: none (InfiniBand needs none).
        place: None: it is no PCI device.
    """

    name: str
    state: str
    rate: str
    link_layer: str
    interface: str
    mtu: int
    gid_index: int
    place: PciPlace | None

    @property
    def is_active(self) -> bool:
        """Whether its link is up."""
        return self.state == "ACTIVE"


def rdma_devices(sysfs: Path = SYSFS) -> list[RdmaDevice]:
    """Every port of every RDMA device, by name."""
    found = []
    for device in sorted((sysfs / "class" / "infiniband").glob("*")):
        interfaces = sorted(path.name for path in (device / "device" / "net").glob("*"))
        interface = interfaces[0] if interfaces else ""
        mtu = _text(device / "device" / "net" / interface / "mtu") if interface else ""
        for port in sorted((device / "ports").glob("*")):
            found.append(
                RdmaDevice(
                    name=f"{device.name}:{port.name}",
                    state=_text(port / "state").partition(":")[2].strip(),
                    rate=_text(port / "rate"),
                    link_layer=_text(port / "link_layer"),
                    interface=interface,
                    mtu=int(mtu or 0),
                    gid_index=_roce_gid(port),
                    place=PciPlace.of(device / "device"),
                )
            )
    return found


def pci_place(address: str, sysfs: Path = SYSFS) -> PciPlace | None:
    """Where the PCI device with an address such as `0000:18:00.0` is; None: not there."""
    return PciPlace.of(sysfs / "bus" / "pci" / "devices" / address.lower())


def nearest(gpu: PciPlace, devices: list[RdmaDevice]) -> list[RdmaDevice]:
    """The active devices that are nearest to a GPU: one or more at an equal distance.

    Distances in one place count as equal, except below a switch: there the fewest bridges win.
    """
    near = [(gpu.distance(d.place), d) for d in devices if d.is_active and d.place is not None]
    if not near:
        return []
    least = min(distance for distance, _ in near)
    if least.place == 0:
        return [device for distance, device in near if distance == least]
    return [device for distance, device in near if distance.place == least.place]


def _roce_gid(port: Path) -> int:
    """Index of the GID of type RoCE v2 that holds an IPv4 address; -1: there is none."""
    for gid in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        kind = _text(port / "gid_attrs" / "types" / gid.name)
        if kind == "RoCE v2" and _text(gid).startswith("0000:0000:0000:0000:0000:ffff:"):
            return int(gid.name)
    return -1


def _text(path: Path) -> str:
    """A file of sysfs without its newline; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
