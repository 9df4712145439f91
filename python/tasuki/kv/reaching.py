"""Connections to peers that are made beside the transfer thread, one thread for each.

A peer that does not answer is waited for by its own orders alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Connection = TypeVar("Connection")


class Reaching(Generic[Connection]):
    """What is being reached. All but `make` runs on the transfer thread.

    Args:
        make: Connects to a peer by its name and metadata; on a thread of its own.
        end: Ends a connection that nobody took.
    """

    def __init__(
        self, make: Callable[[str, bytes], Connection], end: Callable[[Connection], None]
    ) -> None:
        self._make, self._end = make, end
        self._begun: dict[str, tuple[bytes, Future[Connection]]] = {}

    def done(self, peer: str, metadata: bytes) -> bool:
        """Whether `take` would not wait; begins to connect if nothing was begun."""
        if peer in self._begun and self._begun[peer][0] != metadata:
            self.forget(peer)  # another process by now
        if peer not in self._begun:
            future: Future[Connection] = Future()
            self._begun[peer] = metadata, future
            arguments = (future, peer, metadata)
            threading.Thread(
                target=self._run, args=arguments, name="kv-connect", daemon=True
            ).start()
        return self._begun[peer][1].done()

    def take(self, peer: str, metadata: bytes) -> Connection:
        """The connection, once it is made.

        Raises:
            TransportError: The peer cannot be reached.
        """
        self.done(peer, metadata)
        return self._begun.pop(peer)[1].result()

    def forget(self, peer: str) -> None:
        """Nobody will take the connection to `peer`."""
        if peer in self._begun:
            self._begun.pop(peer)[1].add_done_callback(self._drop)

    def _run(self, future: Future[Connection], peer: str, metadata: bytes) -> None:
        try:
            future.set_result(self._make(peer, metadata))
        except Exception as error:  # raised where it is taken
            future.set_exception(error)

    def _drop(self, future: Future[Connection]) -> None:
        if future.exception() is None:
            self._end(future.result())
