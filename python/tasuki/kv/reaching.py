"""Connections to peers that are being made while the transfer thread serves other peers.

A peer that does not answer is waited for by its own orders alone. `Reaching` has a thread for each
connection, for calls that wait. `Joining` makes connections step by step on the transfer thread,
for libraries whose calls do not wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Generic, TypeVar

from tasuki.kv.transfer_plan import TransferPlan
from tasuki.kv.transport import TransportError

Connection = TypeVar("Connection")
Steps = Generator[None, None, Connection]  # yields while it waits

_POLL_S = 1e-4


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
            thread = threading.Thread(
                target=self._run, args=(future, peer, metadata), name="kv-connect", daemon=True
            )
            try:
                start(thread, peer)
            except TransportError as error:
                future.set_exception(error)
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


def start(thread: threading.Thread, peer: str) -> None:
    """Start a thread for a connection to a peer.

    Raises:
        TransportError: The system gives none.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"no thread is left for the connection to {peer} ({error}): raise the limit"
            " (ulimit -u, or pids.max of the container)"
        ) from error


class Joining(Generic[Connection]):
    """What is being connected step by step. All of it runs on the transfer thread.

    Args:
        make: Connects to a peer by its name, metadata and plan; yields while it waits. It is closed
            if nobody will take the connection.
        end: Ends a connection that nobody took.
    """

    def __init__(
        self,
        make: Callable[[str, bytes, TransferPlan], Steps[Connection]],
        end: Callable[[Connection], None],
    ) -> None:
        self._make, self._end = make, end
        self._metadata: dict[str, bytes] = {}
        self._steps: dict[str, Steps[Connection]] = {}
        self._made: dict[str, Connection] = {}

    def done(self, peer: str, metadata: bytes, plan: TransferPlan) -> bool:
        """Take the next step; whether `take` would not wait.

        Raises:
            TransportError: The peer cannot be reached.
        """
        if self._metadata.get(peer) != metadata:
            self.forget(peer)  # another process by now
            self._metadata[peer] = metadata
            self._steps[peer] = self._make(peer, metadata, plan)
        if peer not in self._made:
            try:
                next(self._steps[peer])
            except StopIteration as ended:
                self._made[peer] = ended.value
            except BaseException:
                self.forget(peer)
                raise
        return peer in self._made

    def take(self, peer: str, metadata: bytes, plan: TransferPlan) -> Connection:
        """The connection, once it is made.

        Raises:
            TransportError: The peer cannot be reached.
        """
        while not self.done(peer, metadata, plan):
            time.sleep(_POLL_S)
        made = self._made.pop(peer)
        self.forget(peer)
        return made

    def forget(self, peer: str) -> None:
        """Nobody will take the connection to `peer`."""
        self._metadata.pop(peer, None)
        if peer in self._steps:
            self._steps.pop(peer).close()
        if peer in self._made:
            self._end(self._made.pop(peer))
