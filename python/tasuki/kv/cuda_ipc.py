"""Whose GPU memory this process has mapped, and for how long: from connect to disconnect.

UCX maps a peer's pool to read it, and by itself never lets go of it: memory of a
worker that died then stays taken as long as one of its readers lives, and the
worker that is started in its place finds none. So UCX is told to keep no
mappings beyond a transfer (UCX_CUDA_IPC_CACHE=n), and what makes the next
transfer cheap is a mapping of our own: opening an open handle only counts.

    connect ── open ─┬─ transfer: UCX opens (counts), copies, closes (counts) ─┬─ disconnect: close
                     └─ again ─────────────────────────────────────────────────┘

Runs on the transfer thread. Source: CUDA driver API, cuIpcOpenMemHandle and
cuIpcCloseMemHandle, on their reference count; openucx/ucx issue 11753.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch

from tasuki.kv.clock import MACHINE_BYTES
from tasuki.kv.clock import machine as machine_id

log = logging.getLogger(__name__)

_HANDLE_BYTES = 64
TICKET_BYTES = _HANDLE_BYTES + MACHINE_BYTES


def ticket(pool: torch.Tensor) -> bytes:
    """What a peer needs to map `pool`: `TICKET_BYTES`, all zero if it is not on a GPU."""
    if not pool.is_cuda:
        return bytes(TICKET_BYTES)
    driver = _driver()
    status, handle = driver.cuIpcGetMemHandle(pool.data_ptr())
    if int(status):
        log.warning("the pool cannot be mapped by other processes: %s", status)
        return bytes(TICKET_BYTES)
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES) + machine_id()


class Mapping:
    """A peer's pool, mapped here until `close`; nothing where that cannot be.

    Args:
        ticket: the peer's.
    """

    def __init__(self, ticket: bytes) -> None:
        self._address: Any = None
        handle_bytes, machine = ticket[:_HANDLE_BYTES], ticket[_HANDLE_BYTES:]
        if not any(handle_bytes) or machine != machine_id():
            return
        driver = _driver()
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), handle_bytes, _HANDLE_BYTES)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        status, address = driver.cuIpcOpenMemHandle(handle, int(flags))
        if int(status):
            log.warning("a peer's GPU memory cannot be mapped, transfers will be slow: %s", status)
            return
        self._address = address

    @property
    def is_open(self) -> bool:
        """Whether there is one."""
        return self._address is not None

    def close(self) -> None:
        """Let go; nothing is under way from the peer."""
        address, self._address = self._address, None
        if address is not None:
            (status,) = _driver().cuIpcCloseMemHandle(address)
            if int(status):
                log.warning("letting go of a peer's GPU memory: %s", status)


def _driver() -> Any:
    """CUDA's driver API; torch brings it wherever it has CUDA."""
    from cuda.bindings import driver

    return driver
