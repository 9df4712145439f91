"""Smaller steps after one that ran out of memory. State only. No torch."""

from __future__ import annotations

_STEPS = 100  # that are smaller; then a full one is tried again


class Relief:
    """Bounds of the next hundred steps."""

    def __init__(self) -> None:
        self._until = 0
        self._tokens: int | None = None
        self._rows: int | None = None

    def begin(self, step: int, *, tokens: int | None = None, rows: int | None = None) -> None:
        """From step number `step` on, at most so many prompt tokens, or generating sequences."""
        self._until = step + _STEPS
        self._tokens, self._rows = tokens, rows

    def prompt_tokens(self, step: int, wanted: int) -> int:
        """Prompt tokens that step number `step` may have, at most `wanted`."""
        return wanted if step >= self._until or self._tokens is None else min(wanted, self._tokens)

    def rows(self, step: int, wanted: int) -> int:
        """Sequences that may generate in step number `step`, at most `wanted`."""
        return wanted if step >= self._until or self._rows is None else min(wanted, self._rows)
