"""What can be wrong with a model folder."""

from __future__ import annotations

from tasuki.errors import TasukiError


class ModelError(TasukiError):
    """A model that cannot be loaded; the message says why and what helps."""


class UnsupportedModelError(ModelError):
    """A model, or a feature of one, that Tasuki does not run; named."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of somebody else's says; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
