"""New API keys for the router's `--api-keys-file`."""

from __future__ import annotations

import hashlib
import re
import secrets

from tasuki.errors import TasukiError

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_RANDOM_BYTES = 32


class KeyNameError(TasukiError):
    """A key's name cannot stand in the file."""


def make_key(name: str, max_requests: int | None = None) -> tuple[str, str]:
    """A random key, and its line for the file, which has its SHA-256 alone.

    Args:
        name: Letters, digits, `_`, `.` and `-`, at most 64.
        max_requests: Requests of the key at once; None: not limited.

    Raises:
        KeyNameError: Another name.
    """
    if not _NAME.fullmatch(name):
        raise KeyNameError(
            f"the name is {name!r}: use 1 to 64 letters, digits, underscores, points and hyphens"
        )
    key = f"tk-{secrets.token_urlsafe(_RANDOM_BYTES)}"
    limit = f" max-requests={max_requests}" if max_requests else ""
    return key, f"{name} {hashlib.sha256(key.encode()).hexdigest()}{limit}"
