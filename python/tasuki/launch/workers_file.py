"""The file that tells the router where the workers are: one address a line, replaced whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class WorkersFile:
    """Owns the file. Main thread only.

    Args:
        path: Of the file; it is written at the first change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._addresses: dict[str, str] = {}

    def put(self, name: str, address: str) -> None:
        """A worker is at this address now."""
        if self._addresses.get(name) != address:
            self._addresses[name] = address
            self._write()

    def remove(self, names: Iterable[str]) -> None:
        """These workers get no new requests; the router lets their requests end."""
        for name in names:
            self._addresses.pop(name, None)
        self._write()

    def _write(self) -> None:
        lines = (f"{address}  # {name}\n" for name, address in sorted(self._addresses.items()))
        scratch = self.path.with_name(f"{self.path.name}.new")
        scratch.write_text("".join(lines))
        scratch.replace(self.path)  # the router never sees half of it
