"""An agent of NIXL, as both transports use it; the only file that imports NIXL.

An agent is named anew at every start. Memory that it registers is never unmapped while the
process lives: a peer that reads unmapped memory kills its owner. Messages between agents
are JSON. Threads as in the transports: NIXL's agent has a lock of its own.

Source of the numbers here: measurements of NIXL 1.5.1, UCX over TCP and CMA.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tasuki.kv import ucx_log
from tasuki.kv.net_devices import LOCAL, Network, net_devices
from tasuki.kv.reaching import Steps
from tasuki.kv.transfer_plan import Region
from tasuki.kv.transport import TransportError, check_required
from tasuki.kv.ways import Way

log = logging.getLogger(__name__)

_MODULES = ("nixl_cu13", "nixl_cu12")
_NETWORK_BACKENDS = ("UCX", "LIBFABRIC", "MOONCAKE", "UCCL")

# How long the progress thread sleeps between looks. 0, which the Python
# wrapper insists on, spins: 0.96 of a core per idle agent instead of 0.02.
_PROGRESS_DELAY_US = 1000

# Set before the library loads, unless the operator set them. UCX_TLS is not among them:
# by default UCX uses whatever is fastest between two workers (CUDA IPC, shared memory,
# RDMA, TCP), and UCX_NET_DEVICES holds those of them that reach beyond this machine.
_ENVIRONMENT = {
    "UCX_CUDA_IPC_CACHE": "n",  # mappings are kept by us: see cuda_ipc.py
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",  # we only read; off without NVLink: TCP instead
    "UCX_DEBUG_SIGNO": "0",  # UCX takes SIGHUP over otherwise
    "UCX_TCP_TX_SEG_SIZE": "64k",  # 1.1-2x faster for large totals
    "UCX_TCP_RX_SEG_SIZE": "64k",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
}

_PROBE_S = 2.0  # for the few bytes that show a way

# Registered memory and its agents live to the end of the process, also without their transport.
_KEPT: list[object] = []

# Handles of reads under way: never dropped, so that none is released by its finalizer.
_UNFINISHED: dict[int, Any] = {}

OWN = "NIXL_INIT_AGENT"  # the owner of our side's descriptors, as NIXL names it

RemoteAgent = Any  # a loaded peer's name, as NIXL gives it


@dataclass(frozen=True, slots=True)
class Piece:
    """Registered memory that one descriptor reads or writes."""

    address: int
    size_bytes: int
    device: int = 0
    memory: str = "DRAM"


class Agent:
    """An agent with one network backend.

    Args:
        network: What transfers may use.
        backend: NIXL plugin that moves the bytes.

    Raises:
        TransportError: NIXL or the backend is not there; says what is.
        NetworkError: A device that was asked for is not there.
    """

    def __init__(self, network: Network = LOCAL, backend: str = "UCX") -> None:
        variables, why = environment_for(network, os.environ)
        os.environ.update(variables)
        log.info("KV transfers between machines use %s", why)
        self.backend = backend
        self._network = network
        self._backends = [backend]
        self._name = f"tasuki-{uuid.uuid4().hex}"
        self._agent = _make_agent(_import_nixl(), self._name)
        _create_backend(self._agent, backend)

    @property
    def metadata(self) -> bytes:
        """Name, connection and registered memory, for peers' `connecting`."""
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata

    def register(self, region: tuple[int, int, int], memory: str, owner: object) -> None:
        """Open memory to peers' reads and our writes, for the life of the process.

        Args:
            region: Address, bytes, device.
            memory: "DRAM" or "VRAM".
            owner: What the memory belongs to; kept.

        Raises:
            TransportError: NIXL refuses it.
        """
        _KEPT.append((self._agent, owner))
        try:
            self._agent.register_memory([(*region, "")], memory, backends=self._backends)
        except Exception as error:
            raise TransportError(
                f"NIXL cannot register {region[1]} bytes of {memory}: {describe(error)}"
            ) from error

    @contextlib.contextmanager
    def connecting(self, peer: str, metadata: bytes) -> Iterator[RemoteAgent]:
        """Load the agent of `peer` and connect to it; forgotten again if the block does not end.

        Raises:
            TransportError: NIXL refuses the metadata, or the peer cannot be reached.
        """
        remote: RemoteAgent = None
        try:
            remote = self.load(metadata)
            self._agent.make_connection(remote, backends=self._backends)
            yield remote
        except BaseException as error:
            if remote is not None:
                self.forget(remote)
            if isinstance(error, TransportError) or not isinstance(error, Exception):
                raise
            raise TransportError(f"NIXL cannot connect to {peer}: {describe(error)}") from error

    def load(self, metadata: bytes) -> RemoteAgent:
        """Make a remote agent known, without a connection to it."""
        return self._agent.add_remote_agent(metadata)

    def forget(self, remote: RemoteAgent) -> None:
        """Drop a loaded agent; nothing is under way from it."""
        try:
            self._agent.remove_remote_agent(remote)
        except Exception as error:  # it may be gone already
            log.debug("removing %r: %s", remote, describe(error))

    def check_way(
        self, peer: str, metadata: bytes, remote: RemoteAgent, here: Piece, there: Piece
    ) -> Steps[Way | None]:
        """Read a few bytes of a connected peer, and name the way that they took; step by step.

        Args:
            peer: For messages.
            metadata: The peer's, as `connecting` got it.
            remote: The peer's loaded agent.
            here: Memory of ours that is overwritten.
            there: The peer's, of the same size.

        Returns:
            None where UCX does not say: the operator directs its output, it is not UCX, or the
            peer does not answer.

        Raises:
            TransportError: The read fails, or the way is not what the operator requires.
        """
        ended = yield from _ends(self._read(remote, here, there))
        ways = ucx_log.ways(self._name) if ended else []
        # Connections with one configuration are described once: of several it is not known which
        # one this is. An agent of its own has one.
        way = ways[0] if len(ways) == 1 else None
        if len(ways) > 1:
            apart = Agent(self._network, self.backend)
            way = yield from apart._way_apart(peer, metadata, here, there)
        self._require(way, peer)
        return way

    def _require(self, way: Way | None, peer: str) -> None:
        wanted = self._network.require
        if way is not None:
            check_required(way, wanted, peer)
        elif wanted:
            raise TransportError(
                f"how KV from {peer} travels is not known, --require-transport is {wanted}: unset"
                " UCX_LOG_FILE, UCX_LOG_LEVEL and UCX_PROTO_INFO"
            )

    def _way_apart(
        self, peer: str, metadata: bytes, here: Piece, there: Piece
    ) -> Steps[Way | None]:
        memory = [(here.address, here.size_bytes, here.device, "")]
        registered = self._agent.register_memory(memory, here.memory, backends=self._backends)
        with self.connecting(peer, metadata) as remote:
            yield from _ends(self._read(remote, here, there))
        self.forget(remote)
        self._agent.deregister_memory(registered)
        return next(iter(ucx_log.ways(self._name)), None)

    def prepare(self, owner: RemoteAgent, region: Region, slice_bytes: int) -> Any:
        """A descriptor list in which index i is the slice of block i."""
        row = (
            region.address,
            slice_bytes,
            region.device,
            region.stride_bytes,
            region.num_blocks,
        )
        rows = np.array([row], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(owner, rows, region.memory, backends=self._backends)

    def read_prepared(self, here: tuple[Any, Any], there: tuple[Any, Any]) -> NixlRead:
        """Begin to read; over CMA the bytes are here when this returns.

        Args:
            here: A prepared list of ours, and its indices.
            there: The peer's, in the same order.
        """
        handle = self._agent.make_prepped_xfer(
            "READ", here[0], here[1], there[0], there[1], backends=self._backends
        )
        return NixlRead(self._agent, handle, self._agent.transfer(handle))

    def read(self, remote: RemoteAgent, here: int, there: int, size_bytes: int) -> NixlRead:
        """Begin to read host memory, from one address to another."""
        return self._read(remote, Piece(here, size_bytes), Piece(there, size_bytes))

    def _read(self, remote: RemoteAgent, here: Piece, there: Piece) -> NixlRead:
        lists = [
            self._agent.get_xfer_descs([(p.address, p.size_bytes, p.device)], p.memory)
            for p in (here, there)
        ]
        handle = self._agent.initialize_xfer("READ", *lists, remote, backends=self._backends)
        return NixlRead(self._agent, handle, self._agent.transfer(handle))

    def send(self, remote: RemoteAgent, message: dict[str, Any]) -> None:
        """Send a message to a loaded agent."""
        self._agent.send_notif(remote, json.dumps(message).encode())

    def messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Messages that have come since the last call, with their senders' names."""
        for sender, messages in self._agent.get_new_notifs().items():
            for message in messages:
                yield sender, json.loads(message)


class NixlRead:
    """A read under way. Its handle is released only after it ended.

    Cancelling is not cancelling: after a release in mid-flight most of the
    destination is still overwritten.
    """

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        _UNFINISHED[id(handle)] = handle

    def done(self) -> bool:
        """Whether all bytes arrived.

        Raises:
            TransportError: it failed.
        """
        if self._state == "PROC":
            try:
                self._state = self._agent.check_xfer_state(self._handle)
            except Exception as error:
                self._state = "ERR"
                self._release()
                raise TransportError(f"NIXL read: {describe(error)}") from error
        if self._state == "PROC":
            return False
        self._release()
        if self._state != "DONE":
            raise TransportError(f"NIXL read ended as {self._state}")
        return True

    def _release(self) -> None:
        if _UNFINISHED.pop(id(self._handle), None) is not None:
            try:
                self._handle.release()
            except Exception as error:
                log.warning("releasing an ended transfer: %s", describe(error))


def describe(error: Exception) -> str:
    """Kind and message of an error of NIXL's."""
    return f"{type(error).__name__}: {error}"


def environment_for(network: Network, own: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """What UCX is told, as far as the operator has not: it reads that once, as it loads.

    Args:
        network: What transfers may use.
        own: The environment as it is.

    Returns:
        Variables to set, and which network is used and why.

    Raises:
        NetworkError: A device that was asked for is not there.
    """
    devices = own.get("UCX_NET_DEVICES")
    if devices is None:
        devices, why = net_devices(network)
    else:
        why = f"{devices}: as UCX_NET_DEVICES says"
    wanted = {**_ENVIRONMENT, "UCX_NET_DEVICES": devices}
    variables = {name: value for name, value in wanted.items() if name not in own}
    captured = ucx_log.capture(own)
    variables |= {name: value for name, value in captured.items() if own.get(name) != value}
    return variables, why


def _ends(read: NixlRead) -> Steps[bool]:
    """Whether a small read ends soon; yields until that is known."""
    deadline_s = time.monotonic() + _PROBE_S
    while not read.done():
        if time.monotonic() > deadline_s:
            return False
        yield
    return True


def _import_nixl() -> Any:
    """Whichever build is installed."""
    failures = []
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            failures.append(f"{module}: {error}")
    raise TransportError(
        "transport nixl needs NIXL: install nixl-cu13 (or nixl-cu12); " + "; ".join(failures)
    )


def _make_agent(nixl: Any, name: str) -> Any:
    """An agent whose progress thread sleeps between looks."""
    bindings: Any = importlib.import_module(f"{nixl.__name__}._bindings")
    plain = bindings.nixlAgentConfig

    class ProgressThread(plain):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:  # noqa: N802
            delay: int = plain.pthrDelay.fget(self)
            return delay

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802
            plain.pthrDelay.fset(self, _PROGRESS_DELAY_US)

    config = nixl.nixl_agent_config(
        backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    )
    bindings.nixlAgentConfig = ProgressThread
    try:
        return nixl.nixl_agent(name, config)
    finally:
        bindings.nixlAgentConfig = plain


def _create_backend(agent: Any, backend: str) -> None:
    plugins = [p for p in agent.get_plugin_list() if p in _NETWORK_BACKENDS]
    there = ", ".join(sorted(plugins)) or "none"
    if backend not in plugins:
        raise TransportError(f"NIXL has no network backend {backend!r}: there is {there}")
    try:
        agent.create_backend(backend, agent.get_plugin_params(backend))
    except Exception as error:
        others = ", ".join(sorted(set(plugins) - {backend})) or "none"
        told = ucx_log.said() if backend == "UCX" else []
        why = "; ".join([describe(error), *told])
        raise TransportError(
            f"NIXL's backend {backend} does not start here ({why}): try another: {others}"
        ) from error
