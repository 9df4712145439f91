"""What is sent comes out of the wire as it went in, and what cannot be so is noticed."""

from __future__ import annotations

import math

import pytest

from tasuki.engine.api import FirstToken, Prefilled, TokenLogprob
from tasuki.kv.wire import (
    announce_flaw,
    batch_from_decode,
    batch_from_prefill,
    first_tokens_from_wire,
    parts_of,
    prefilled_flaw,
    prefilled_to_wire,
    reply_flaw,
)
from tasuki.v1 import kv_pb2

LOGPROB = TokenLogprob(token=7, logprob=-0.5, rank=2, top=((8, -0.25), (7, -0.5)))
SIZE, TOKENS = 4, 18
KNOWN = {0: (0, 8), 1: (4, 8)}  # group 1 keeps a window: its first block begins with token 4


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
        assert list(parts_of(kv_pb2.FromPrefill.FromString(sent))) == replies[:count]
    for count in (1, 3):
        asked = batch_from_decode(wants[:count]).SerializeToString()
        assert list(parts_of(kv_pb2.FromDecode.FromString(asked))) == wants[:count]


def announce(first: int, end: int, *parts: tuple[int, int, int]) -> kv_pb2.Announce:
    """Parts are (group, first token, blocks)."""
    groups = [
        kv_pb2.GroupBlocks(group=group, first_token=begin, blocks=range(count))
        for group, begin, count in parts
    ]
    return kv_pb2.Announce(first_token=first, end_token=end, groups=groups)


@pytest.mark.parametrize(
    "message",
    [
        announce(0, 8, (0, 0, 2), (1, 4, 1)),
        announce(8, TOKENS, (0, 8, 3), (1, 8, 3)),
        announce(0, TOKENS, (0, 0, 5)),
        announce(0, 0, (0, 0, 0)),
        announce(8, 16),
    ],
)
def test_what_may_be_is_read(message: kv_pb2.Announce) -> None:
    assert announce_flaw(message, TOKENS, SIZE, KNOWN) == ""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (announce(8, 4), "tokens 8 to 4 of a request of 18"),
        (announce(0, 2**32 - 1), f"tokens 0 to {2**32 - 1} of a request of 18"),
        (announce(0, 8, (2, 0, 1)), "cache group 2, there are 2"),
        (announce(0, 8, (0, 0, 1), (0, 4, 1)), "group 0, there are 2 groups, each once"),
        (announce(0, 8, (0, 2, 1)), "from token 2 on: it must be a multiple of 4 from 0 to 8"),
        (announce(0, 16, (0, 12, 1)), "from token 12 on: it must be a multiple of 4 from 0 to 8"),
        (announce(0, 8, (1, 0, 2)), "from token 0 on: it must be a multiple of 4 from 4 to 8"),
        (announce(0, 8, (0, 0, 3)), "3 blocks of 4 tokens from token 0 on, for 8 tokens"),
    ],
)
def test_what_cannot_be_is_named(message: kv_pb2.Announce, said: str) -> None:
    assert said in announce_flaw(message, TOKENS, SIZE, KNOWN)


@pytest.mark.parametrize("lease_s", [0.0, -1.0, math.nan, math.inf, 1e-300, 1e9])
def test_a_lease_is_a_time(lease_s: float) -> None:
    assert f"lease is {lease_s} s" in reply_flaw(kv_pb2.HelloReply(lease_s=lease_s))
    assert reply_flaw(kv_pb2.HelloReply(lease_s=10.0)) == ""


def test_a_prefill_ends_with_a_token_at_a_time() -> None:
    first = kv_pb2.FirstToken(token=3)
    assert prefilled_flaw(kv_pb2.Prefilled(first_tokens=[first], computed_s=2.0)) == ""
    assert "without a first token" in prefilled_flaw(kv_pb2.Prefilled())
    late = kv_pb2.Prefilled(first_tokens=[first], computed_s=math.nan)
    assert "at nan s" in prefilled_flaw(late)
