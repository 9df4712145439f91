"""What can be wrong with a model folder."""

from __future__ import annotations

from tasuki.errors import TasukiError


class ModelError(TasukiError):
    """A model that cannot be loaded; the message says why and what helps."""


class UnsupportedModelError(ModelError):
    """A model, or a feature of one, that Tasuki does not run; named."""
