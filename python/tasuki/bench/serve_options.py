"""Options of `tasuki serve` that are written NAME=VALUE: known by name, flags as such. Pure.

On a command line a flag has no value, so `strict-roles=true` must become `--strict-roles`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
from collections.abc import Mapping
from typing import Any

import typer

from tasuki.bench.arguments import words
from tasuki.bench.errors import BenchError
from tasuki.errors import TasukiError
from tasuki.launch.command import serve
from tasuki.launch.config import Topology

_VALUES = {"true": True, "false": False}
# Of Click, or of Typer's own copy of it.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]


@functools.cache
def _command() -> Any:
    app = typer.Typer()
    app.command()(serve)
    return typer.main.get_command(app)


@functools.cache
def _is_flag() -> dict[str, bool]:
    """Options of `tasuki serve`, without dashes in front: whether they have no value."""
    return {
        name.removeprefix("--"): bool(getattr(each, "is_flag", False))
        for each in _command().params
        for name in each.opts
    }


@functools.cache
def _repeatable() -> frozenset[str]:
    """Options of `tasuki serve` that may be given several times."""
    several = (each for each in _command().params if getattr(each, "multiple", False))
    return frozenset(name.removeprefix("--") for each in several for name in each.opts)


def serve_words(topology: Topology, options: Mapping[str, Any]) -> list[str]:
    """The command line after `tasuki serve`, for any free port.

    Args:
        topology: The workers.
        options: Others, by name.
    """
    roles = {role: getattr(topology, role) for role in ("prefill", "decode", "mixed")}
    return [*words(roles), "--port", "0", *words(options)]


def check_values(topology: Topology, options: Mapping[str, Any], where: str) -> None:
    """Dry-run `tasuki serve`: it starts nothing.

    Args:
        topology: The workers.
        options: Others, by name.
        where: What the options belong to, for an error.

    Raises:
        BenchError: It refuses them.
    """
    said = ["--dry-run", *serve_words(topology, options)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _command().main(said, "tasuki serve", standalone_mode=False)
    except _UsageError as error:
        raise BenchError(f"{where}: {error.format_message()}") from error
    except TasukiError as error:
        raise BenchError(f"{where}: {error}") from error


def with_flags(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options, each known, with true or false as the value of every flag.

    Args:
        options: Of `tasuki serve`, by name.
        where: What the options belong to, for an error.

    Raises:
        BenchError: There is no such option, a flag has another value, or an option has several
            values of which it takes one.
    """
    said = dict(options)
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if dashed not in _is_flag():
            like = difflib.get_close_matches(dashed, _is_flag(), 1)
            remedy = f"did you mean {like[0]}?" if like else "`tasuki serve --help` lists them"
            raise BenchError(f"{where}: {name} is no option of `tasuki serve`: {remedy}")
        if isinstance(value, list) and len(value) > 1 and dashed not in _repeatable():
            raise BenchError(
                f"{where}: {name} has {len(value)} values and takes one: give each to an entry of"
                " topologies, as its serve"
            )
        if isinstance(value, bool) and not _is_flag()[dashed]:
            raise BenchError(
                f"{where}: {name} is {str(value).lower()}, and it is no flag: give its value, or"
                " take it out"
            )
        if value is None or isinstance(value, bool) or not _is_flag()[dashed]:
            continue
        if str(value).lower() not in _VALUES:
            raise BenchError(f"{where}: {name} is {value!r}: it is a flag, use true or false")
        said[name] = _VALUES[str(value).lower()]
    return said
