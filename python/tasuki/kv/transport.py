"""The border between the handoff and whatever moves bytes; what there is: `backends.py`.

A transport reads blocks of a peer's pool into ours, one-sided. It is made and
registered at start by the main thread and used by the transfer thread alone
(`puller.py`) from then on; `metadata` and `layout` never change after
`register` and may be read from anywhere.
"""

from __future__ import annotations

import hashlib
import importlib
import ipaddress
import logging
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from tasuki.errors import TasukiError
from tasuki.kv.backends import ALIASES, BACKENDS, names
from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import LOCAL, Network, address_of
from tasuki.kv.transfer_plan import Run, TransferPlan
from tasuki.kv.ways import REMEDIES, REQUIREMENTS, Way
from tasuki.v1 import kv_pb2

log = logging.getLogger(__name__)
Peer = TypeVar("Peer")


class UnknownTransportError(TasukiError):
    """No transport by that name."""


class TransportError(TasukiError):
    """The transport cannot start, or a peer cannot be reached by it."""


class MetadataError(TransportError):
    """A peer's metadata did not arrive as it was sent."""


class Transfer(Protocol):
    """Reads under way; made by `Transport.post`."""

    def done(self) -> bool:
        """Whether all bytes arrived.

        Raises:
            TransportError: it failed, and writes to our blocks no more.
        """


class Transport(Protocol):
    """One-sided reads between pools. Constructed with a `Network`; NIXL's with a plugin too."""

    @property
    def name(self) -> str:
        """As in the registry; both sides of a pair use the same."""

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""

    def allocate(self, layout: CacheLayout, device: torch.device | str = "cpu") -> torch.Tensor:
        """Make a pool that can be registered, zeroed.

        Returns:
            Contiguous tensor of the layout's shape and dtype on `device`.

        Raises:
            TransportError: There is no such memory, or the transport does not move it.
        """

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Open `pool` to local writes and peers' reads, for the life of the process.

        Args:
            pool: Made by `allocate`.
            layout: Of it.

        Raises:
            TransportError: the memory cannot be registered.
        """

    @property
    def pool(self) -> torch.Tensor:
        """The registered pool."""

    @property
    def layout(self) -> kv_pb2.Layout:
        """What a peer must know of the registered pool."""

    @property
    def metadata(self) -> bytes:
        """What a peer's `connect` takes."""

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Whether `connect` need not wait for `peer`; to be asked again until it is so.

        Raises:
            TransportError: it cannot be reached.
        """

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> Way | None:
        """Make `peer` readable; may block for a while.

        Returns:
            How its blocks will travel; None: not known.

        Raises:
            TransportError: it cannot be reached.
        """

    def disconnect(self, peer: str) -> None:
        """Forget `peer`; nothing is under way from it. Unknown peers are ignored."""

    def post(self, peer: str, runs: Sequence[Run]) -> Transfer:
        """Begin to read `runs` of `peer`; may block while it does.

        Raises:
            TransportError: nothing was begun.
        """

    def close(self) -> None:
        """Stop; transfers under way are left to the end of the process."""


def metadata_digest(metadata: bytes) -> bytes:
    """BLAKE2b-128 of a metadata blob: a corrupt one must never reach the transport."""
    return hashlib.blake2b(metadata, digest_size=16).digest()


def rank_pool(transport: Transport) -> kv_pb2.RankPool:
    """What a peer must know of a registered transport's pool."""
    metadata = transport.metadata
    return kv_pb2.RankPool(
        layout=transport.layout,
        transport_metadata=metadata,
        transport_metadata_digest=metadata_digest(metadata),
    )


def check_metadata(metadata: bytes, digest: bytes) -> None:
    """Refuse metadata that does not match its digest.

    Raises:
        MetadataError: they do not match.
    """
    actual = metadata_digest(metadata)
    if actual != digest:
        raise MetadataError(
            f"transport metadata of {len(metadata)} bytes has digest {actual.hex()},"
            f" the peer said {digest.hex()}: it was corrupted on the way"
        )


def check_required(way: Way, wanted: str, peer: str) -> None:
    """Refuse a way that `--require-transport` does not allow.

    Args:
        way: How the blocks of `peer` travel.
        wanted: The option's value; empty: anything is allowed.
        peer: For the message.

    Raises:
        TransportError: It is not allowed.
    """
    if wanted and way.kind not in REQUIREMENTS[wanted]:
        raise TransportError(
            f"KV from {peer} travels by {way}, --require-transport is {wanted}: {REMEDIES[wanted]}"
        )


def create_transport(name: str, network: Network = LOCAL) -> Transport:
    """Make the transport called `name`.

    Args:
        name: As in `backends.BACKENDS`, or an alias.
        network: What transfers may use.

    Raises:
        UnknownTransportError: there is none by that name; says which there are.
        TransportError: it cannot run here (library or plugin missing); says what to install.
    """
    backend = BACKENDS.get(ALIASES.get(name, name))
    if backend is None:
        raise UnknownTransportError(
            f"no KV transport is called {name!r}: there is {', '.join(sorted(names()))}"
        )
    if not backend.tried:
        log.warning("--transport %s is known, but no test of Tasuki has moved KV with it", name)
    module, attribute = backend.target.split(":")
    factory = getattr(importlib.import_module(module), attribute)
    options = {"backend": backend.plugin} if backend.plugin else {}
    transport: Transport = factory(network=network, **options)
    return transport


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

    def reached(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """It is: no `connect` waits for a peer."""
        return True

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
