"""The source's side of transfers through host memory: stages parts of our pool for readers.

`host_staged.py` has the messages. Runs on a thread of its own, `kv-staging`, with an agent of its
own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tasuki.kv.nixl_agent import Agent, describe
from tasuki.kv.pool_copies import PoolCopies
from tasuki.kv.staging import LANES, MAX_PEERS, SLOT_BYTES, Slots

log = logging.getLogger(__name__)

_POLL_S = 50e-6  # between looks while parts are under way
_IDLE_POLL_S = 1e-3
IDLE_S = 60.0
"""A reader that has asked for nothing for so long makes room for another one. Many leases: what
it may still read is not accepted there."""


@dataclass(slots=True)
class _Set:
    """A reader's slots."""

    number: int
    used_s: float


class StagingServer:
    """Copies parts of our pool to the slots of readers.

    Args:
        agent: Messages come and go by it.
        pool: What readers read.
        slots: Whose first sets are the readers'.
        clock: Seconds.
    """

    def __init__(
        self,
        agent: Agent,
        pool: torch.Tensor,
        slots: Slots,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._copies, self._slots = PoolCopies(pool), slots
        self._device = pool.device
        self._clock = clock
        self._sets: dict[str, _Set] = {}  # by the agent of the reader
        self._under_way: deque[tuple[str, str, Callable[[], bool]]] = deque()

    def run(self, stopping: threading.Event) -> None:
        """Serve until told to stop."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        busy_s = 0.0
        while not stopping.is_set():
            heard = False
            for agent, message in self._agent.messages():
                heard = True
                self._on_message(agent, message)
            if self._report() or heard:
                busy_s = time.monotonic()
            idle = not self._under_way and time.monotonic() - busy_s > 0.05
            stopping.wait(_IDLE_POLL_S if idle else _POLL_S)

    def _on_message(self, agent: str, message: dict[str, Any]) -> None:
        if message["ask"] == "bye":
            self._forget(agent)
        elif message["ask"] == "hello":
            try:
                if agent in self._sets:  # it connects anew: the old connection may be broken
                    self._agent.forget(agent)
                self._agent.load(bytes.fromhex(message["metadata"]))
                self._reply(agent, message["id"], self._welcome(agent))
            except Exception as error:
                log.warning("reader %s cannot be answered: %s", agent, describe(error))
        else:
            self._stage(agent, message)

    def _welcome(self, agent: str) -> str:
        if agent not in self._sets:
            if len(self._sets) == MAX_PEERS:
                longest = min(self._sets, key=lambda reader: self._sets[reader].used_s)
                if self._clock() - self._sets[longest].used_s < IDLE_S:
                    return (
                        f"{MAX_PEERS} ranks have read this one through host memory within"
                        f" {IDLE_S:g} s: no more"
                    )
                self._forget(longest)
            taken = {known.number for known in self._sets.values()}
            self._sets[agent] = _Set(min(set(range(MAX_PEERS)) - taken), self._clock())
        return str(self._sets[agent].number)

    def _forget(self, agent: str) -> None:
        if self._sets.pop(agent, None) is not None:
            self._agent.forget(agent)

    def _stage(self, agent: str, message: dict[str, Any]) -> None:
        known, lane, stretches = self._sets.get(agent), message["lane"], message["bytes"]
        if known is not None:
            known.used_s = self._clock()
        if known is None or not 0 <= lane < LANES:
            self._reply(agent, message["id"], f"lane {lane} is not yours: connect anew")
        elif sum(size for _, size in stretches) > SLOT_BYTES or not all(
            self._copies.holds(*stretch) for stretch in stretches
        ):
            self._reply(agent, message["id"], "bytes outside of the pool, or more than a slot")
        else:
            slot = self._slots.slot(known.number, lane)
            ended = self._copies.start(slot, stretches, to_pool=False)
            self._under_way.append((agent, message["id"], ended))

    def _report(self) -> bool:
        """Tell readers of the parts that are staged, in order; whether there were any."""
        told = False
        while self._under_way and self._under_way[0][2]():
            agent, asked, _ = self._under_way.popleft()
            self._reply(agent, asked, "")
            told = True
        return told

    def _reply(self, agent: str, asked: str, reply: str) -> None:
        try:
            self._agent.send(agent, {"id": asked, "reply": reply})
        except Exception as error:  # the reader is gone
            log.debug("answering %s: %s", agent, describe(error))
