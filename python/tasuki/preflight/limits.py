"""Limits of this process and of the machine: locked memory, open files, /dev/shm, clock."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from pathlib import Path

from tasuki.preflight.result import Check, fail, ok, warn

_IPC_LOCK = 14  # bit of CAP_IPC_LOCK. Source: capabilities(7), linux/capability.h
_FEWEST_FILES, _FILES = 512, 4096
_LEAST_SHM_BYTES, _SHM_BYTES = 64 << 20, 1 << 30
_SUSPENDED_S = 1.0
_TIME_ERROR = 5  # "the clock is not synchronized". Source: adjtimex(2)
_TIMEX_BYTES = 512  # more than struct timex has


def memlock(rdma: bool, limit_bytes: int | None = None, exempt: bool | None = None) -> Check:
    """Whether a KV pool can be registered with RDMA devices, which locks its memory.

    Args:
        rdma: Whether there are RDMA devices.
        limit_bytes: Of this process; None: ask the system. Less than 0: no limit.
        exempt: Whether it has CAP_IPC_LOCK; None: ask the system.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit_bytes is None else limit_bytes
    free = _has_ipc_lock() if exempt is None else exempt
    found = "unlimited" if limit < 0 else f"{limit:,} bytes"
    if limit < 0 or free or not rdma:
        why = "" if limit < 0 else " (CAP_IPC_LOCK)" if free else " (no RDMA device)"
        return ok("memlock", found + why)
    return fail(
        "memlock",
        found,
        "unlimited: RDMA locks the whole KV pool",
        "`ulimit -l unlimited` before the start, LimitMEMLOCK=infinity in the systemd unit, or"
        " the capability IPC_LOCK of the container",
    )


def open_files(limit: int | None = None) -> Check:
    """Whether there are enough files for streams and transfers with many peers."""
    found = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    text = "unlimited" if found < 0 else str(found)
    if found < 0 or found >= _FILES:
        return ok("open files", text)
    make = fail if found < _FEWEST_FILES else warn
    return make("open files", text, f"at least {_FILES}", f"`ulimit -n {_FILES}` before the start")


def shared_memory(ranks: int = 1, folder: Path = Path("/dev/shm")) -> Check:
    """Whether /dev/shm has room: for NCCL between ranks, and for workers of one machine.

    Args:
        ranks: Of the worker.
        folder: Where it is mounted.
    """
    remedy = "start the container with --shm-size 8g, or mount an emptyDir of medium Memory there"
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return fail("/dev/shm", str(error), "a tmpfs", remedy)
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    found = f"{free / 1e6:,.0f} of {size / 1e6:,.0f} MB free"
    if free >= _SHM_BYTES:
        return ok("/dev/shm", found, free_bytes=free)
    enough = _LEAST_SHM_BYTES * ranks
    make = fail if free < enough else warn
    least = f"at least {(enough if make is fail else _SHM_BYTES) / 1e6:,.0f} MB free"
    return make("/dev/shm", found, least, remedy, free_bytes=free)


def clock() -> Check:
    """Whether the machine was suspended, and whether its wall clock follows a source."""
    suspended_s = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    if suspended_s > _SUSPENDED_S:
        return warn(
            "clock",
            f"suspended for {suspended_s:.0f} s since boot",
            "a machine that is never suspended: leases run out meanwhile",
            "switch suspension off (systemctl mask sleep.target)",
            suspended_s=suspended_s,
        )
    if (state := _clock_state()) == _TIME_ERROR:
        return warn(
            "clock",
            "never suspended; the wall clock follows no source",
            "a synchronised clock: certificates and the times in logs need it",
            "run chrony or systemd-timesyncd",
        )
    return ok("clock", "never suspended" + ("" if state is None else ", synchronised"))


def _has_ipc_lock() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = next(line for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> _IPC_LOCK & 1)


def _clock_state() -> int | None:
    """What adjtimex(2) says; None: it may not be asked."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes 0: only read
    try:
        state = int(ctypes.CDLL(None).adjtimex(buffer))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state
