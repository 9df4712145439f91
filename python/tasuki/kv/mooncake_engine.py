"""An engine of Mooncake over TCP; the only file that imports Mooncake.

An engine listens on two ports, for descriptions of its memory and for reads. Mooncake binds them
to all addresses and asks nobody who they are, so they are kept to the worker's address here. Of a
READ Mooncake tells when all of its bytes are there, or when no more of them will come: the
connection is closed then. Threads: Mooncake has a thread of its own for all connections;
what is here is called by the transport's thread.

Source of the numbers here: measurements of Mooncake 0.3.13, TCP on loopback.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import os
from typing import Any

from tasuki.kv.backends import INSTALL_MOONCAKE
from tasuki.kv.listeners import only_to
from tasuki.kv.net_devices import Network, interface_of
from tasuki.kv.transport import TransportError, address_for_peers

log = logging.getLogger(__name__)

# Read by Mooncake as its first engine starts. Without the first it would use RDMA where there is
# any, without the second open a connection for each read.
_NEEDED = {"MC_FORCE_TCP": "1", "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
_UNLESS_SET = {"MC_LOG_LEVEL": "ERROR"}

_ENDED, _UNDER_WAY = 1, 0  # of transfer_check_status; negative: it failed

# Registered memory and its engines live to the end of the process.
_KEPT: list[object] = []


class Engine:
    """An engine that reads, and that others read.

    Args:
        network: What transfers may use; its host is the address that others connect to.

    Raises:
        TransportError: Mooncake is not there, or cannot start on this address.
    """

    def __init__(self, network: Network) -> None:
        module = _import_mooncake()
        address = _own_address(network.host)
        self._engine: Any = module.TransferEngine()
        _KEPT.append(self._engine)
        if not (address.is_loopback or interface_of(str(address))):
            self._start(address)  # the address is translated on the way: packets come to another
        else:
            try:
                with only_to(address):
                    self._start(address)
            except OSError as error:
                raise TransportError(
                    f"Mooncake listens on all addresses, and the kernel cannot keep it to"
                    f" {address} ({error}): use --transport nixl-ucx"
                ) from error
        self.session = f"{address}:{self._engine.get_rpc_port()}"

    def _start(self, address: ipaddress.IPv4Address) -> None:
        if self._engine.initialize(str(address), "P2PHANDSHAKE", "tcp", "") != 0:
            raise TransportError(
                f"Mooncake does not start on {address}: it needs two free ports from"
                " MC_MIN_RPC_PORT to MC_MAX_RPC_PORT (15000 to 17000); its messages are in the log"
            )

    def register(self, address: int, size_bytes: int, owner: object) -> None:
        """Open host memory to peers' reads, for the life of the process.

        Args:
            address: Where it begins.
            size_bytes: Of it.
            owner: What the memory belongs to; kept.

        Raises:
            TransportError: Mooncake refuses it.
        """
        _KEPT.append(owner)
        if self._engine.register_memory(address, size_bytes) != 0:
            raise TransportError(f"Mooncake cannot register {size_bytes} bytes of host memory")

    def reach(self, session: str) -> None:
        """Ask `session` for a sign of life; a process that is stopped blocks this for a minute.

        Raises:
            TransportError: Nobody is there.
        """
        if self._engine.send_probe(session) != 0:
            raise TransportError(f"Mooncake cannot reach {session}")

    def read(self, session: str, here: int, there: int, size_bytes: int) -> int:
        """Begin to read from `session`; blocks while a connection is made for the first time.

        Args:
            session: Of the peer's engine.
            here: Address in our memory.
            there: Address in the peer's.
            size_bytes: At least one.

        Returns:
            What `ended` takes.

        Raises:
            TransportError: The peer is not there; nothing was begun.
        """
        batch: int = self._engine.batch_transfer_async_read(session, [here], [there], [size_bytes])
        if batch == 0:
            raise TransportError(f"Mooncake cannot reach {session}")
        return batch

    def ended(self, batch: int) -> bool:
        """Whether a read has ended; it must not be asked for again then.

        Raises:
            TransportError: It failed, and writes no more.
        """
        status = self._engine.transfer_check_status(batch)
        if status < _UNDER_WAY:
            raise TransportError("Mooncake's read failed: the peer is gone, or refuses it")
        return bool(status == _ENDED)


def _own_address(host: str) -> ipaddress.IPv4Address:
    """The address that others connect to.

    Raises:
        TransportError: There is none that Mooncake can use.
    """
    address = address_for_peers("mooncake", host)
    if not isinstance(address, ipaddress.IPv4Address):
        raise TransportError(
            f"--transport mooncake works by IPv4, the worker has {address}: use an IPv4 address, or"
            " --transport nixl-ucx"
        )
    return address


def _import_mooncake() -> Any:
    os.environ.update(_NEEDED)
    for name, value in _UNLESS_SET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise TransportError(
            f"--transport mooncake needs Mooncake ({error}): {INSTALL_MOONCAKE}"
        ) from error
    except ImportError as error:  # a library of the system
        raise TransportError(
            f"Mooncake does not load ({error}): install that library, for libibverbs.so.1 with"
            " apt-get install --no-install-recommends libibverbs1"
        ) from error
