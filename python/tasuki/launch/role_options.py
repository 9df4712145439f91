"""Worker options that differ by role: `--prefill-option max-batched-tokens=8192`."""

from __future__ import annotations

from collections.abc import Iterable

from tasuki.launch.errors import LaunchError
from tasuki.options import options_of, types_of
from tasuki.worker.config import WorkerConfig

Value = int | float | str


def parse_role_options(role: str, texts: Iterable[str]) -> dict[str, Value]:
    """Fields of `WorkerConfig`, by name, for the workers of one role.

    Args:
        role: prefill, decode or mixed.
        texts: Each NAME=VALUE, the name as `tasuki worker` has it, without dashes in front.

    Raises:
        LaunchError: One is no such pair, or given twice, or its value is of another type.
    """
    types = types_of(WorkerConfig)
    kinds = {
        known.name: types[name] for name, known in options_of(WorkerConfig).items() if known.by_role
    }
    options: dict[str, Value] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        kind = kinds.get(name)
        flag = f"--{role}-option {text}"
        if not equals or kind is None:
            raise LaunchError(f"{flag}: write NAME=VALUE with one of {', '.join(kinds)}")
        field = name.replace("-", "_")
        if field in options:
            raise LaunchError(f"{flag}: {name} is given twice; keep one")
        try:
            options[field] = kind(value)
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise LaunchError(f"{flag}: {value!r} is not {noun}") from None
    return options
