"""The transports that the tests of all of them run with: what `backends.py` has and is tried."""

from __future__ import annotations

import pytest

from tasuki.kv.backends import ALIASES, BACKENDS, DEFAULT
from tasuki.kv.transport import TransportError, create_transport

TRANSPORTS = tuple(name for name, backend in BACKENDS.items() if backend.tried)
# Those that read without NIXL, which is always installed.
WITHOUT_NIXL = tuple(
    name for name in TRANSPORTS if BACKENDS[name].modules != BACKENDS[DEFAULT].modules
)


def skip_unless_there(transport: str) -> None:
    """Skip the test where a transport's optional package does not work; says what installs it."""
    name = ALIASES.get(transport, transport)
    if name in WITHOUT_NIXL and BACKENDS[name].modules:
        try:
            create_transport(name)
        except TransportError as error:
            pytest.skip(str(error))
