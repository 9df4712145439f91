"""Options written as a mapping, made words of a command line. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flag(name: str) -> str:
    """`--max-model-len` of `max_model_len` or `max-model-len`."""
    return "--" + name.replace("_", "-")


def words(options: Mapping[str, Any]) -> list[str]:
    """Command-line words: true is a bare flag, false and null nothing, a list repeats."""
    said: list[str] = []
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                said.append(flag(name))
            elif each is not None and each is not False:
                said += [flag(name), text(each)]
    return said


def text(value: Any) -> str:
    """How a value stands on a command line; 2.0 is `2`."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)
