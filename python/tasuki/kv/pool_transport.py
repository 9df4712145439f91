"""What transports of this package have in common: one registered pool, and peers by name."""

from __future__ import annotations

import ipaddress
from typing import Generic, TypeVar

import torch

from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import address_of
from tasuki.kv.transport import TransportError
from tasuki.v1 import kv_pb2

Peer = TypeVar("Peer")


class PoolTransport(Generic[Peer]):
    """The base of a `Transport`, which adds what moves the bytes.

    Args:
        name: As in the registry.

    Attributes:
        name: As in the registry.
        pool: The registered pool; set by `register`, as are the next two.
        layout: What a peer must know of it.
        metadata: What a peer's `connect` takes.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.pool = torch.empty(0)
        self.layout = kv_pb2.Layout()
        self.metadata = b""
        self._peers: dict[str, Peer] = {}  # connected ones; transfer thread only

    def allocate(self, layout: CacheLayout, device: torch.device | str = "cpu") -> torch.Tensor:
        """A pool as `CacheLayout.allocate` makes it."""
        return layout.allocate(device)

    def close(self) -> None:
        """Nothing to do: registered memory and what reads it end with the process."""

    def _connected(self, peer: str) -> Peer:
        """A peer that was connected.

        Raises:
            TransportError: It is not.
        """
        try:
            return self._peers[peer]
        except KeyError:
            raise TransportError(f"{peer} is not connected") from None

    def _require_host_memory(self, device: torch.device) -> None:
        """Refuse a pool that this transport cannot move.

        Raises:
            TransportError: It is not in host memory.
        """
        if device.type != "cpu":
            raise TransportError(
                f"--transport {self.name} moves host memory, the KV pool is on {device}: use"
                " --transport nixl-ucx"
            )


def address_for_peers(transport: str, host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The address at which peers of a transport reach the worker that has `host`.

    Raises:
        TransportError: It is none, or all.
    """
    address = address_of(host)
    if address is None or address.is_unspecified:
        raise TransportError(
            f"with --transport {transport} others connect to one address, the worker has {host}:"
            " add --advertise ADDRESS"
        )
    return address
