"""Flags of `tasuki serve` among options that are written NAME=VALUE. Pure.

On a command line a flag has no value, so `strict-roles=true` must become `--strict-roles`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import typer

from tasuki.bench.errors import BenchError
from tasuki.launch.command import serve

_VALUES = {"true": True, "false": False}


@functools.cache
def serve_flags() -> frozenset[str]:
    """Names of the options of `tasuki serve` that have no value, without dashes in front."""
    app = typer.Typer()
    app.command()(serve)
    flags = [each for each in typer.main.get_command(app).params if getattr(each, "is_flag", False)]
    return frozenset(name.removeprefix("--") for each in flags for name in each.opts)


def with_flags(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options, with true or false as the value of every flag.

    Args:
        options: Of `tasuki serve`, by name.
        where: What the options belong to, for an error.

    Raises:
        BenchError: A flag has another value.
    """
    said = dict(options)
    for name in said:
        value = said[name]
        if value is None or isinstance(value, bool) or name.replace("_", "-") not in serve_flags():
            continue
        if str(value).lower() not in _VALUES:
            raise BenchError(f"{where}: {name} is {value!r}: it is a flag, use true or false")
        said[name] = _VALUES[str(value).lower()]
    return said
