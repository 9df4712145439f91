"""What the fetchers share: their error, and how they show progress."""

from __future__ import annotations

import sys

from tasuki.errors import TasukiError


class FetchError(TasukiError):
    """A model could not be had; the message says why and what helps."""


def say(message: str) -> None:
    """One line of progress on stderr (stdout carries results only)."""
    print(f"model: {message}", file=sys.stderr, flush=True)
