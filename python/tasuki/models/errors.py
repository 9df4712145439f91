"""What can be wrong with a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tasuki.errors import TasukiError


class ModelError(TasukiError):
    """A model that cannot be loaded; the message says why and what helps."""


class UnsupportedModelError(ModelError):
    """A model, or a feature of one, that Tasuki does not run; named."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of somebody else's says; its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def failures_of(architecture: str) -> Iterator[None]:
    """What a class that is not made for this throws when it is tried, by one name.

    Raises:
        UnsupportedModelError: Names the architecture, and what was thrown.
    """
    try:
        yield
    except (RuntimeError, TypeError, AttributeError, ValueError, IndexError, KeyError) as error:
        raise UnsupportedModelError(
            f"{architecture} is not supported: the trial run failed with"
            f" {type(error).__name__}: {first_line(error)}"
        ) from error
