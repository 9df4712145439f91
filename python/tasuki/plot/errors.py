"""What can go wrong between a result file and its picture."""

from __future__ import annotations

from pathlib import Path

from tasuki.errors import TasukiError


class PlotError(TasukiError):
    """A picture cannot be made; says what is missing."""


class ResultFileError(PlotError):
    """A result file cannot be used; names the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason
