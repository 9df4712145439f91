"""A peer's GPU memory is mapped from connect to disconnect, and only on its own machine."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from tasuki.kv import cuda_ipc
from tasuki.kv.cuda_ipc import TICKET_BYTES, Mapping, ticket


class Handle:
    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.memory)


class Driver:
    """Counts as CUDA does: by handle."""

    CUipcMemHandle = Handle

    class CUipcMem_flags:  # noqa: N801
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.open: dict[bytes, int] = {}

    def cuIpcGetMemHandle(self, address: int) -> tuple[int, Handle]:  # noqa: N802
        handle = Handle()
        handle.memory.raw = address.to_bytes(8, "little") * 8
        return self.status, handle

    def cuIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[int, bytes]:  # noqa: N802
        assert flags == 1
        address = handle.memory.raw
        self.open[address] = self.open.get(address, 0) + (self.status == 0)
        return self.status, address

    def cuIpcCloseMemHandle(self, address: bytes) -> tuple[int]:  # noqa: N802
        self.open[address] -= 1
        return (0,)


class Pool:
    """Looks like a tensor on a GPU."""

    is_cuda = True

    def data_ptr(self) -> int:
        return 0x7F00_0000_0000


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    return driver


def a_ticket() -> bytes:
    pool: Any = Pool()
    return ticket(pool)


def test_a_mapping_lasts_until_it_is_closed(driver: Driver) -> None:
    given = a_ticket()
    assert len(given) == TICKET_BYTES
    mapping = Mapping(given)
    assert mapping.is_open
    assert driver.open == {given[:64]: 1}
    mapping.close()
    mapping.close()
    assert driver.open == {given[:64]: 0}


def test_a_pool_in_main_memory_is_not_mapped(driver: Driver) -> None:
    given = ticket(torch.zeros(4))
    assert given == bytes(TICKET_BYTES)
    assert not Mapping(given).is_open
    assert driver.open == {}


def test_a_pool_of_another_machine_is_not_mapped(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_ticket()
    monkeypatch.setattr(cuda_ipc, "machine_id", lambda: bytes(16))
    assert not Mapping(given).is_open
    assert driver.open == {}


def test_what_cannot_be_mapped_is_no_error(driver: Driver) -> None:
    given = a_ticket()
    driver.status = 1
    mapping = Mapping(given)
    assert not mapping.is_open
    mapping.close()
    assert ticket(Pool()) == bytes(TICKET_BYTES)  # type: ignore[arg-type]
