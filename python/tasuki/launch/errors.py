"""What can go wrong while launching."""

from __future__ import annotations

from tasuki.errors import TasukiError


class LaunchError(TasukiError):
    """The deployment cannot start, or cannot go on."""


class TopologyError(TasukiError):
    """The wanted numbers of workers make no deployment."""
