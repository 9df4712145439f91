"""NIXL behind the transport interface; the only file that imports NIXL.

Owns one agent, named anew at every start, and one registration: the pool,
which is never unmapped while the process lives (a peer that reads unmapped
memory kills its owner). Runs on the main thread until `register`, on the
transfer thread from then on.

What a peer and we exchange of each block is one strided descriptor list on
either side, so index i of a prepared list is block i, on our side and on the
peer's; NIXL merges adjacent indices into one descriptor where the slice is the
whole block on both sides.

Source of the numbers here: measurements of NIXL 1.5.1, UCX over TCP and CMA.
"""

from __future__ import annotations

import importlib
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasuki.kv.cuda_ipc import TICKET_BYTES, Mapping, ticket
from tasuki.kv.layout import CacheLayout
from tasuki.kv.net_devices import net_devices
from tasuki.kv.transfer_plan import Region, Run, TransferPlan
from tasuki.kv.transport import TransportError
from tasuki.v1 import kv_pb2

log = logging.getLogger(__name__)

_MODULES = ("nixl_cu13", "nixl_cu12")
_NETWORK_BACKENDS = ("UCX", "LIBFABRIC", "MOONCAKE", "UCCL")

# More than this under way over TCP, and the death of the reader can take the source with it.
_MAX_INFLIGHT_DRAM_BYTES = 16 << 20
# Over CUDA IPC the reader's own copy engines do the work: enough that NVLink (390 GB/s) is
# busy for milliseconds, far longer than it takes to see that a piece has ended.
_MAX_INFLIGHT_VRAM_BYTES = 1 << 30

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

# Pools and agents live to the end of the process, whoever lets go of a transport.
KEPT: list[object] = []


class NixlTransport:
    """One-sided reads by NIXL.

    Args:
        host: Address that this worker binds; its network device is used, no other.
        backend: NIXL plugin that moves the bytes.

    Raises:
        TransportError: NIXL or the backend is not there; says what is.
    """

    def __init__(self, host: str = "127.0.0.1", backend: str = "UCX") -> None:
        self._backend = backend
        self._agent = open_agent(host, backend)
        self._peers: dict[str, _Peer] = {}
        self._layout = kv_pb2.Layout()
        self._local: dict[tuple[Region, int], Any] = {}  # prepared slices of our blocks
        self._memory = "DRAM"
        self._device = torch.device("cpu")
        self._metadata = b""

    @property
    def name(self) -> str:
        """As in the registry."""
        return "nixl"

    @property
    def max_inflight_bytes(self) -> int:
        """Bytes that may be under way from one peer at a time."""
        return _MAX_INFLIGHT_DRAM_BYTES if self._memory == "DRAM" else _MAX_INFLIGHT_VRAM_BYTES

    @property
    def layout(self) -> kv_pb2.Layout:
        """What a peer must know of the registered pool."""
        return self._layout

    @property
    def metadata(self) -> bytes:
        """What maps the pool on this machine, then the agent's: name, connection, memory."""
        return self._metadata

    def register(self, pool: torch.Tensor, layout: CacheLayout) -> None:
        """Register `pool`, once; it stays mapped for the life of the process.

        Raises:
            TransportError: NIXL refuses the memory.
        """
        wire = layout.to_wire(pool, transport=f"nixl/{self._backend}")
        group = wire.groups[0]
        KEPT.append((self._agent, pool))
        try:
            region = (group.base_address, layout.pool_bytes, group.device, "")
            self._agent.register_memory([region], group.memory, backends=[self._backend])
            self._metadata = ticket(pool) + self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportError(
                f"NIXL cannot register {layout.pool_bytes} bytes of {group.memory}:"
                f" {describe(error)}"
            ) from error
        self._layout = wire
        self._memory = group.memory
        self._device = pool.device

    def connect(self, peer: str, metadata: bytes, plan: TransferPlan) -> None:
        """Load a peer's metadata (its digest is checked by now) and prepare its blocks.

        Raises:
            TransportError: NIXL refuses it, or the peer cannot be reached.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # this thread's, for UCX's copies
        agent_name: bytes | str | None = None
        mapping = Mapping(metadata[:TICKET_BYTES])
        try:
            agent_name = self._agent.add_remote_agent(metadata[TICKET_BYTES:])
            self._agent.make_connection(agent_name, backends=[self._backend])
            remote = self._prepare(agent_name, plan.remote, plan.slice_bytes)
            self._peers[peer] = _Peer(agent_name, self._prepared(plan), remote, mapping)
        except Exception as error:
            mapping.close()
            if agent_name is not None:
                self._remove(agent_name)
            raise TransportError(f"NIXL cannot connect to {peer}: {describe(error)}") from error

    def disconnect(self, peer: str) -> None:
        """Forget a peer's metadata; nothing is under way from it."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known.remote.release()
            self._remove(known.agent_name)
            known.mapping.close()

    def post(self, peer: str, runs: Sequence[Run]) -> NixlTransfer:
        """Begin to read; over CMA the bytes are here when this returns.

        Raises:
            TransportError: the peer is not there.
        """
        known = self._peers.get(peer)
        if known is None:
            raise TransportError(f"{peer} is not connected")
        try:
            handle = self._agent.make_prepped_xfer(
                "READ",
                known.local,
                _indices([(run.local, run.count) for run in runs]),
                known.remote,
                _indices([(run.remote, run.count) for run in runs]),
                backends=[self._backend],
            )
            state = self._agent.transfer(handle)
        except Exception as error:
            raise TransportError(f"NIXL read from {peer}: {describe(error)}") from error
        return NixlTransfer(self._agent, handle, state)

    def close(self) -> None:
        """Nothing to do: registration and agent end with the process (see `KEPT`)."""

    def _prepared(self, plan: TransferPlan) -> Any:
        """Our side's slices, kept for the next peer that needs the same."""
        key = (plan.local, plan.slice_bytes)
        if key not in self._local:
            self._local[key] = self._prepare("NIXL_INIT_AGENT", *key)
        return self._local[key]

    def _prepare(self, owner: bytes | str, region: Region, slice_bytes: int) -> Any:
        """A descriptor list in which index i is the slice of block i."""
        row = (
            region.address,
            slice_bytes,
            region.device,
            region.stride_bytes,
            region.num_blocks,
        )
        rows = np.array([row], dtype=np.uint64)
        return self._agent.prep_xfer_dlist(owner, rows, region.memory, backends=[self._backend])

    def _remove(self, agent_name: bytes | str) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:  # it may be gone already
            log.debug("removing %r: %s", agent_name, describe(error))


@dataclass(frozen=True, slots=True)
class _Peer:
    """A loaded remote agent, both sides' prepared slices, its pool if it is on a GPU here."""

    agent_name: bytes | str
    local: Any
    remote: Any
    mapping: Mapping


class NixlTransfer:
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


# Handles of reads under way: never dropped, so that none is released by its finalizer.
_UNFINISHED: dict[int, Any] = {}


def open_agent(host: str, backend: str) -> Any:
    """A new agent with one backend.

    Args:
        host: Address that this worker binds; its network device is used, no other.
        backend: NIXL plugin that moves the bytes.

    Raises:
        TransportError: NIXL or the backend is not there; says what is.
    """
    _set_environment(host)
    agent = _make_agent(_import_nixl(), f"tasuki-{uuid.uuid4().hex}")
    _create_backend(agent, backend)
    return agent


def _set_environment(host: str) -> None:
    """Tell UCX what it may use, as far as the operator has not; its parts read it once."""
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    own = os.environ.get("UCX_NET_DEVICES")
    if own is None:
        os.environ["UCX_NET_DEVICES"], why = net_devices(host)
    else:
        why = f"{own}: as UCX_NET_DEVICES says"
    log.info("KV transfers between machines use %s", why)


def _indices(spans: Sequence[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in spans])


def describe(error: Exception) -> str:
    """Kind and message of an error of NIXL's."""
    return f"{type(error).__name__}: {error}"


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

    class Unhurried(plain):  # type: ignore[misc, valid-type]
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
    bindings.nixlAgentConfig = Unhurried
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
        raise TransportError(
            f"NIXL's backend {backend} does not start here ({describe(error)}):"
            f" try another: {others}"
        ) from error
