"""What can go wrong while measuring."""

from __future__ import annotations

from typing import Any

from tasuki.errors import TasukiError


class BenchError(TasukiError):
    """A measurement was asked for that cannot be made."""


class RunFailedError(BenchError):
    """One measurement failed; others may still succeed."""


class NothingAnsweredError(RunFailedError):
    """A run whose requests all failed; `result` says how."""

    def __init__(self, message: str, result: dict[str, Any]) -> None:
        super().__init__(message)
        self.result = result
