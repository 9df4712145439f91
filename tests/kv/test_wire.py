"""First tokens come out of the wire as they went in."""

import pytest

from tasuki.engine.api import FirstToken, Prefilled, TokenLogprob
from tasuki.kv.wire import first_tokens_from_wire, prefilled_to_wire
from tasuki.v1 import kv_pb2

LOGPROB = TokenLogprob(token=7, logprob=-0.5, rank=2, top=((8, -0.25), (7, -0.5)))


@pytest.mark.parametrize("logprob", [None, LOGPROB])
def test_first_tokens_survive_the_wire(logprob: TokenLogprob | None) -> None:
    first_tokens = (FirstToken(0, 7, False, logprob), FirstToken(3, 9, True))
    sent = prefilled_to_wire(Prefilled("r.0", 5, first_tokens)).SerializeToString()
    received = kv_pb2.Prefilled.FromString(sent)
    assert (received.request_id, received.total_blocks) == ("r.0", 5)
    assert tuple(first_tokens_from_wire(received)) == first_tokens
