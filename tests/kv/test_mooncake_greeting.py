"""How often a peer of Mooncake that does not answer is asked, with an engine that is none."""

from __future__ import annotations

import ctypes
import json
import threading
from typing import Any

import pytest

from tasuki.kv import mooncake
from tasuki.kv.mooncake import MooncakeTransport
from tasuki.kv.transport import TransportError

DEADLINE_S = 60.0
TOKEN = bytes(range(16))
METADATA = json.dumps({"session": "10.0.0.1:1", "at": 64, "token": TOKEN.hex()}).encode()


class SilentEngine:
    """Whose peers answer once `answers` is set."""

    answers: threading.Event
    asked: int = 0

    def __init__(self, network: Any) -> None:
        del network

    def register(self, address: int, size_bytes: int, owner: object) -> None:
        del address, size_bytes, owner

    def reach(self, session: str) -> None:
        assert session == "10.0.0.1:1"
        SilentEngine.asked += 1
        assert SilentEngine.answers.wait(DEADLINE_S)

    def read(self, session: str, here: int, there: int, size_bytes: int) -> int:
        assert (session, there, size_bytes) == ("10.0.0.1:1", 64, len(TOKEN))
        ctypes.memmove(here, TOKEN, size_bytes)
        return 1

    def ended(self, batch: int) -> bool:
        return batch == 1


def test_one_thread_asks_a_peer_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "Engine", SilentEngine)
    monkeypatch.setattr(mooncake, "_GREETING_S", 0.05)
    SilentEngine.answers = threading.Event()
    transport = MooncakeTransport()
    for _ in range(3):
        with pytest.raises(TransportError, match=r"does not answer within 0\.05 s"):
            transport._reach("peer", METADATA)
    assert SilentEngine.asked == 1
    SilentEngine.answers.set()
    monkeypatch.setattr(mooncake, "_GREETING_S", DEADLINE_S)
    assert transport._reach("peer", METADATA).session == "10.0.0.1:1"
    asked = SilentEngine.asked
    assert transport._reach("peer", METADATA).session == "10.0.0.1:1"
    assert SilentEngine.asked == asked + 1, "a later connection asks anew"
