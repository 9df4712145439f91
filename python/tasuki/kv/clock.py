"""The one clock of the handoff: seconds that go on while the machine is suspended.

A lease must run out while a machine is suspended: CLOCK_MONOTONIC stands still then,
CLOCK_BOOTTIME does not. Values of two machines are never compared; processes of
one machine since one boot share it, and `machine` tells whether they do.
"""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import Path

MACHINE_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(_CLOCK)


@cache
def machine() -> bytes:
    """The same for all processes of this machine since it was started; `MACHINE_BYTES`."""
    try:
        name = _BOOT_ID.read_bytes()
    except OSError:
        name = b""
    return hashlib.blake2b(name, digest_size=MACHINE_BYTES).digest()
