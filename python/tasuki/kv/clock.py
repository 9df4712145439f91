"""The one clock of the handoff: seconds that go on while the machine is suspended.

A lease must not outlive a nap: CLOCK_MONOTONIC stands still while a machine
sleeps, CLOCK_BOOTTIME does not. Values of two machines are never compared.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(_CLOCK)
