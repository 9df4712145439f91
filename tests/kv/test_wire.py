"""What is sent comes out of the wire as it went in."""

import pytest

from tasuki.engine.api import FirstToken, Prefilled, TokenLogprob
from tasuki.kv.wire import (
    batch_from_decode,
    batch_from_prefill,
    first_tokens_from_wire,
    parts_from_decode,
    parts_from_prefill,
    prefilled_to_wire,
)
from tasuki.v1 import kv_pb2

LOGPROB = TokenLogprob(token=7, logprob=-0.5, rank=2, top=((8, -0.25), (7, -0.5)))


@pytest.mark.parametrize("logprob", [None, LOGPROB])
def test_first_tokens_survive_the_wire(logprob: TokenLogprob | None) -> None:
    first_tokens = (FirstToken(0, 7, False, logprob), FirstToken(3, 9, True))
    sent = prefilled_to_wire(Prefilled("r.0", 5, first_tokens)).SerializeToString()
    received = kv_pb2.Prefilled.FromString(sent)
    assert (received.request_id, received.tokens) == ("r.0", 5)
    assert tuple(first_tokens_from_wire(received)) == first_tokens


def test_a_batch_brings_its_messages_in_order() -> None:
    replies = [
        kv_pb2.FromPrefill(scheduled=kv_pb2.Scheduled(request_id="r.0")),
        kv_pb2.FromPrefill(announce=kv_pb2.Announce(request_id="r.0", end_token=32)),
    ]
    wants = [kv_pb2.FromDecode(want=kv_pb2.Want(request_id=f"r.{n}", seq=n)) for n in range(3)]
    for count in (1, 2):
        sent = batch_from_prefill(replies[:count]).SerializeToString()
        assert list(parts_from_prefill(kv_pb2.FromPrefill.FromString(sent))) == replies[:count]
    for count in (1, 3):
        asked = batch_from_decode(wants[:count]).SerializeToString()
        assert list(parts_from_decode(kv_pb2.FromDecode.FromString(asked))) == wants[:count]
