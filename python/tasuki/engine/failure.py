"""What is at fault when a leg or a worker fails. No torch.

The kind is on the wire with every leg that ends by a failure (worker.proto has the
meanings). The router decides by it whether a retry can help.
"""

from __future__ import annotations

import enum

from tasuki.engine.errors import DeviceMemoryError, GrammarError, NotFiniteError


class FailureKind(enum.Enum):
    """What is at fault."""

    CLIENT = "client"
    MODEL = "model"
    MEMORY = "memory"
    DEVICE = "device"
    TRANSPORT = "transport"
    OVERLOAD = "overload"


def kind_of(error: BaseException) -> FailureKind:
    """What is at fault when a step raises `error`, or a worker ends by it."""
    if isinstance(error, DeviceMemoryError | MemoryError):
        return FailureKind.MEMORY
    if isinstance(error, NotFiniteError):
        return FailureKind.MODEL
    if isinstance(error, GrammarError):
        return FailureKind.CLIENT
    return FailureKind.DEVICE
