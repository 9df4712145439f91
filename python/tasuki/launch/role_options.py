"""Worker options that differ by role: `--prefill-option max-batched-tokens=8192`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tasuki.launch.errors import LaunchError

Value = int | float | str

# What workers of one deployment may do differently; all else must be the same for KV to move.
_TYPES: Mapping[str, type[int] | type[float] | type[str]] = {
    "block-size": int,
    "max-batched-tokens": int,
    "max-running-requests": int,
    "itl-target-ms": float,
    "step-timeout-s": float,
    "gpu-memory-utilization": float,
    "dispatch": str,
}


def parse_role_options(role: str, texts: Iterable[str]) -> dict[str, Value]:
    """Fields of `WorkerOptions`, by name, for the workers of one role.

    Args:
        role: prefill, decode or mixed.
        texts: Each NAME=VALUE, the name as `tasuki worker` has it, without dashes in front.

    Raises:
        LaunchError: One is no such pair, or given twice, or its value is of another type.
    """
    options: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        kind = _TYPES.get(name)
        flag = f"--{role}-option {text}"
        if not equals or kind is None:
            raise LaunchError(f"{flag}: write NAME=VALUE with one of {', '.join(_TYPES)}")
        field = name.replace("-", "_")
        if field in options:
            raise LaunchError(f"{flag}: {name} is given twice; keep one")
        try:
            options[field] = kind(value)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise LaunchError(f"{flag}: {value!r} is not {noun}") from None
    return options
