"""The file that tells the router where the workers are: one address a line, replaced whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tasuki.launch.errors import LaunchError
from tasuki.launch.supervisor import say


class WorkersFile:
    """Owns the file. Main thread only.

    It is empty until `publish`: a router that knows some of the first workers would place
    requests on them alone. Until then each call may raise `LaunchError`: it cannot be written.
    After that such an error is said, and the file stays as it is until it can be written.

    Args:
        path: Of the file.
        on_stale: Called when the file could not be written; `retry` must be called later, once.
    """

    def __init__(self, path: Path, on_stale: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._on_stale = on_stale
        self._addresses: dict[str, str] = {}
        self._is_public = False
        self._is_stale = False
        self._is_awaited = False  # `retry`
        self._write(public=False)

    def publish(self) -> None:
        """From now on the file has all addresses.

        Raises:
            LaunchError: It cannot be written.
        """
        self._write(public=True)
        self._is_public = True

    def put(self, name: str, address: str) -> None:
        """A worker is at this address now."""
        if self._addresses.get(name) != address:
            self._addresses[name] = address
            self._update()

    def remove(self, names: Iterable[str]) -> None:
        """These workers get no new requests; the router lets their requests end."""
        for name in names:
            self._addresses.pop(name, None)
        self._update()

    def retry(self) -> None:
        """Write the addresses that could not be written."""
        self._is_awaited = False
        if self._is_stale:
            self._update()

    def _update(self) -> None:
        try:
            self._write(self._is_public)
        except LaunchError as error:
            if not self._is_public:
                raise
            if not self._is_stale:
                say(f"error: {error}")
            self._is_stale = True
            if not self._is_awaited:
                self._is_awaited = True
                self._on_stale()
            return
        if self._is_stale:
            say(f"{self.path} has all workers again")
        self._is_stale = False

    def _write(self, public: bool) -> None:
        addresses = sorted(self._addresses.items()) if public else ()
        lines = (f"{address}  # {name}\n" for name, address in addresses)
        scratch = self.path.with_name(f"{self.path.name}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # a cleaner may have removed it
            scratch.write_text("".join(lines))
            scratch.replace(self.path)  # the router never sees half of it
        except OSError as error:
            raise LaunchError(
                f"the router cannot be told of workers: {error}; make room there, or choose another"
                " folder: --log-dir DIR"
            ) from error
