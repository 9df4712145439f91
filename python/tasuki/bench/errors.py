"""What can go wrong while measuring."""

from __future__ import annotations

from tasuki.errors import TasukiError


class BenchError(TasukiError):
    """A measurement was asked for that cannot be made."""


class RunFailedError(BenchError):
    """One measurement failed; others may still succeed."""
