"""What can go wrong in the engine and a person can act on, and what is at fault. No torch.

The kind of a failure is on the wire with every leg that ends by one (worker.proto has the
meanings). The router decides by it whether a retry can help.
"""

from __future__ import annotations

import enum

from tasuki.errors import TasukiError


class EngineConfigError(TasukiError):
    """The engine's settings do not fit together."""


class UnknownRequestError(TasukiError):
    """No such leg here, or not in the phase that the call is for."""


class OutOfBlocksError(TasukiError):
    """More blocks were asked for than are free or evictable."""


class PoolImbalanceError(TasukiError):
    """Block accounting is wrong: a defect. Names the first blocks concerned."""


class DeviceMemoryError(TasukiError):
    """A step does not fit into the memory that is left."""


class NotFiniteError(TasukiError):
    """A worker has computed nothing but NaN or infinity for several requests."""


class GrammarError(TasukiError):
    """A request's grammar cannot be compiled, or its answer cannot go on within it."""


class GrammarBusyError(GrammarError):
    """No thread is left for a request's grammar here: another worker may have one."""


class ForbiddenTokenError(TasukiError):
    """A sampled token is not one that the request's grammar allows: a defect."""


class OutOfStepError(TasukiError):
    """Some ranks of a worker computed what others did not: they cannot go on together."""


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
    if isinstance(error, GrammarBusyError):
        return FailureKind.OVERLOAD
    if isinstance(error, GrammarError):
        return FailureKind.CLIENT
    return FailureKind.DEVICE
