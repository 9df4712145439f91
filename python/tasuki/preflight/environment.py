"""What surrounds a worker: variables that slow it down, transports that are installed."""

from __future__ import annotations

from collections.abc import Mapping

from tasuki.kv.backends import BACKENDS, Backend, missing
from tasuki.preflight.result import Check, ok, warn

_SLOW_VALUES = {
    "UCX_LOG_LEVEL": ("debug", "trace", "trace_req", "trace_data", "trace_async", "trace_func"),
    "NIXL_LOG_LEVEL": ("debug", "trace"),
    "NCCL_DEBUG": ("trace",),
    "UCX_STATS_TRIGGER": ("timer",),
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "TORCH_DISTRIBUTED_DEBUG": ("detail",),
}


def log_levels(own: Mapping[str, str]) -> Check:
    """Whether a library is told to write so much, or to wait so often, that it gets slow."""
    slow = [
        f"{name}={own[name]}"
        for name, values in _SLOW_VALUES.items()
        if own.get(name, "").lower() in values
    ]
    if not slow:
        return ok("log levels", "none slows a transfer")
    names = " ".join(each.partition("=")[0] for each in slow)
    return warn("log levels", ", ".join(slow), "none of them", f"unset {names}")


def transports() -> Check:
    """Which values of `--transport` this machine has what they need for; loads none of them."""
    lacks = {name: missing(backend) for name, backend in BACKENDS.items()}
    there = [_named(backend) for name, backend in BACKENDS.items() if not lacks[name]]
    absent = [f"not {_named(BACKENDS[name])}: {why}" for name, why in lacks.items() if why]
    return ok("transports", "; ".join([", ".join(there) or "none", *absent]))


def _named(backend: Backend) -> str:
    return backend.name if backend.tried else f"{backend.name} (untried)"
