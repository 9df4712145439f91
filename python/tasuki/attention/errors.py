"""Errors of the attention backends."""

from __future__ import annotations

from tasuki.errors import TasukiError


class AttentionError(TasukiError):
    """A backend cannot do what the model, the pool or the step asks of it."""
