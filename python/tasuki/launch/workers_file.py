"""The file that tells the router where the workers are: one address a line, replaced whole."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasuki.launch.errors import LaunchError


class WorkersFile:
    """Owns the file. Main thread only. Each call may raise `LaunchError`: it cannot be written.

    It is empty until `publish`: a router that knows some of the first workers would place
    requests on them alone.

    Args:
        path: Of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._addresses: dict[str, str] = {}
        self._is_public = False
        self._write()

    def publish(self) -> None:
        """From now on the file has all addresses."""
        self._is_public = True
        self._write()

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
        public = sorted(self._addresses.items()) if self._is_public else ()
        lines = (f"{address}  # {name}\n" for name, address in public)
        scratch = self.path.with_name(f"{self.path.name}.new")
        try:
            scratch.write_text("".join(lines))
            scratch.replace(self.path)  # the router never sees half of it
        except OSError as error:
            raise LaunchError(
                f"the router cannot be told of workers: {error}; make room there, or choose another"
                " folder: --log-dir DIR"
            ) from error
