"""What the prefill worker answers to decode engines that it no longer, or does not yet, serve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tasuki.kv import prefill_handoff
from tasuki.kv.config import HandoffConfig, HandoffCounters
from tasuki.kv.effects import ToDecode
from tasuki.kv.prefill_handoff import EndedRequests
from tasuki.kv.prefill_side import PrefillSide
from tasuki.v1 import kv_pb2 as pb


def told(side: PrefillSide, engine: str) -> list[str]:
    """Kinds of messages to an engine since the last call."""
    effects = [e for e in side.drain() if isinstance(e, ToDecode) and e.peer == engine]
    return [str(effect.message.WhichOneof("message")) for effect in effects]


def test_an_earlier_target_is_told_at_once_that_it_gets_nothing() -> None:
    host = SimpleNamespace(admit=lambda request_id: None)
    side = PrefillSide(host, HandoffConfig(lease_s=10.0), HandoffCounters())  # type: ignore[arg-type]
    side.submit("r", "first", 0.0)
    side.retarget("r", "second", 1.0)
    want = pb.FromDecode(want=pb.Want(request_id="r", seq=1))
    side.on_message("first", want, 2.0)
    assert told(side, "first") == ["gone"]
    side.on_message("third", want, 2.0)  # its retarget may be on the way
    assert told(side, "third") == []
    side.retarget("r", "first", 3.0)
    side.on_message("first", want, 4.0)
    assert told(side, "first") == []


def test_few_names_of_ended_requests_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_handoff, "_MAX_ENDED", 3)
    ended = EndedRequests(keep_s=10.0)
    for index in range(5):
        ended.add(f"r{index}", float(index))
    ended.expire(4.0)
    assert [f"r{index}" in ended for index in range(5)] == [False, False, True, True, True]
    ended.expire(13.0)
    assert [f"r{index}" in ended for index in range(5)] == [False, False, False, False, True]
