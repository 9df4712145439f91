"""`name=value` on a command line. Pure."""

from __future__ import annotations

from tasuki.bench.errors import BenchError


def split_pair(pair: str, flag: str) -> tuple[str, str]:
    """`name=value` in two.

    Raises:
        BenchError: It is none.
    """
    name, found, value = pair.partition("=")
    if not found or not name:
        raise BenchError(f"{flag} is {pair!r}: write NAME=VALUE")
    return name, value
