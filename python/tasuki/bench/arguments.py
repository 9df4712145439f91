"""Options written as a mapping, made words of a command line. Pure."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_KEY, _KEY_VARIABLE = "--api-key", "OPENAI_API_KEY"  # as in crates/bench/src/options.rs
_HEADER, _HEADERS_VARIABLE = "--header", "TASUKI_BENCH_HEADERS"  # as there
_SECRET = frozenset((_KEY, _HEADER))  # as in crates/bench/src/run.rs
_HIDDEN = "***"
_LOAD = "--load"  # its value has options of `tasuki bench serve`
_EACH = "--each"  # NAME=VALUES of such an option


def flag(name: str) -> str:
    """`--max-model-len` of `max_model_len` or `max-model-len`."""
    return "--" + name.replace("_", "-")


def words(options: Mapping[str, Any]) -> list[str]:
    """Command-line words: true is a bare flag, false and null nothing, a list repeats."""
    said: list[str] = []
    for option, value in _pairs(options):
        if value is None:
            said.append(option)
        elif value.startswith("-"):  # else it would be taken for an option
            said.append(f"{option}={value}")
        else:
            said += [option, value]
    return said


def _pairs(options: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Flags with their values; None: a flag that stands alone."""
    for name, value in options.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                yield flag(name), None
            elif each is not None and each is not False:
                yield flag(name), text(each)


def text(value: Any) -> str:
    """How a value stands on a command line; 2.0 is `2`."""
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def is_secret(name: str) -> bool:
    """Whether an option's value is not fit for a file."""
    return flag(name) in _SECRET


def without_key(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without the API key."""
    return {name: value for name, value in options.items() if flag(name) != _KEY}


def secrets_apart(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Options without API key and headers, and the variables that have them.

    All users of a machine see a command line.
    """
    rest, variables = {}, {}
    for name, value in options.items():
        said = [each for _, each in _pairs({name: value}) if each is not None]
        if not is_secret(name):
            rest[name] = value
        elif flag(name) == _KEY and said:
            variables[_KEY_VARIABLE] = said[-1]
        elif said:
            variables[_HEADERS_VARIABLE] = "\n".join(said)
    return rest, variables


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options fit for a file: keys and headers are hidden."""
    return {name: _HIDDEN if is_secret(name) else value for name, value in options.items()}


def words_without_secrets(said: Iterable[str]) -> list[str]:
    """Command-line words fit for a file: keys and headers are hidden, in loads too."""
    return [_shown(before, word) for before, word in itertools.pairwise(["", *said])]


def _shown(before: str, word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and option in _SECRET | {_LOAD, _EACH}:
        return f"{option}={_shown(option, value)}"
    if before in _SECRET:
        return _HIDDEN
    if before == _EACH and equals and is_secret(option):
        return f"{option}={_HIDDEN}"
    if before != _LOAD:
        return word
    try:
        load = shlex.split(word)
    except ValueError:
        return _HIDDEN
    shown = words_without_secrets(each.replace("--api_key", "--api-key") for each in load)
    return word if shown == load else shlex.join(shown)
