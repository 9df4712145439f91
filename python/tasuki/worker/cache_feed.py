"""What one router is told of the prefix cache: changes, and after a reset all that is held.

    changes of the engine ─▶ CacheFeed of each stream ─▶ KvEvents of its next report

A change overtakes what was held before it. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from tasuki.v1 import worker_pb2 as pb

MOST_HELD = 1 << 16
"""Chunks that a router is told of after a reset."""
MOST_PENDING = 1 << 16
"""Changes that wait for a router: with more, a reset is shorter."""
MOST_A_REPORT = 1_024
"""Chunks in one report: 8 bytes each."""


class CacheFeed:
    """The chunks that one router has not been told of."""

    def __init__(self) -> None:
        self._changes: dict[int, bool] = {}
        self._held: dict[int, None] = {}
        self._number = 0
        self._resets = False

    @property
    def is_behind(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._changes or self._held or self._resets)

    @property
    def overflows(self) -> bool:
        """Whether so much has changed that it must be reset."""
        return len(self._changes) > MOST_PENDING

    def reset(self, held: Iterable[int]) -> None:
        """Begin again: these are the chunks that are held, the last used first."""
        self._changes.clear()
        self._held = dict.fromkeys(held)
        self._resets = True

    def change(self, changes: Mapping[int, bool]) -> None:
        """Chunks were stored (True) or dropped; the last state of each counts."""
        self._changes.update(changes)
        if self._held:
            for name in changes:
                self._held.pop(name, None)

    def take(self) -> pb.KvEvents | None:
        """What the next report tells; None: nothing."""
        if not self.is_behind:
            return None
        self._number += 1
        names = list(islice(self._changes, MOST_A_REPORT))
        changes = {name: self._changes.pop(name) for name in names}
        held = list(islice(self._held, MOST_A_REPORT - len(names)))
        for name in held:
            del self._held[name]
        events = pb.KvEvents(
            number=self._number,
            reset=self._resets,
            stored=[name for name in names if changes[name]],
            dropped=[name for name in names if not changes[name]],
            held=held,
        )
        self._resets = False
        return events
