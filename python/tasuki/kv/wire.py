"""Between the engine's plain data and the messages of kv.proto, and what in these cannot be so.

A message that is readable may still name blocks, tokens or times that lead nowhere. Each `.._flaw`
answers why, empty if it may be; it is asked before anything is done with what a prefill worker
says. Nothing else is decided here. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tasuki.engine.api import Announced, FirstToken, Prefilled, TokenLogprob
from tasuki.kv.config import LEASE_RANGE_S
from tasuki.v1 import kv_pb2, worker_pb2

_Message = TypeVar("_Message", kv_pb2.FromDecode, kv_pb2.FromPrefill)


def prefilled_to_wire(
    prefilled: Prefilled, computed_s: float = 0.0, machine: bytes = b""
) -> kv_pb2.Prefilled:
    """The end of a prefill as the decode worker reads it.

    Args:
        prefilled: The end.
        computed_s: When the last chunk was collected, by `kv.clock`.
        machine: Whose clock that is; empty: it must not be compared.
    """
    return kv_pb2.Prefilled(
        request_id=prefilled.request_id,
        tokens=prefilled.tokens,
        first_tokens=[
            kv_pb2.FirstToken(
                choice=first.choice,
                token=first.token,
                finished=first.finished,
                logprob=None if first.logprob is None else logprob_to_wire(first.logprob),
            )
            for first in prefilled.first_tokens
        ],
        computed_s=computed_s,
        machine=machine,
    )


def announce_to_wire(request_id: str, items: Sequence[Announced], heard: int) -> kv_pb2.Announce:
    """Announcements that follow one another, at least one, as one message."""
    parts: dict[int, kv_pb2.GroupBlocks] = {}
    for item in items:
        for part in item.parts:
            whole = parts.setdefault(
                part.group, kv_pb2.GroupBlocks(group=part.group, first_token=part.first_token)
            )
            whole.blocks.extend(part.blocks)
    return kv_pb2.Announce(
        request_id=request_id,
        first_token=items[0].first_token,
        end_token=items[-1].end_token,
        groups=parts.values(),
        heard=heard,
    )


def first_tokens_from_wire(prefilled: kv_pb2.Prefilled) -> list[FirstToken]:
    """The first tokens as the engine takes them."""
    return [
        FirstToken(
            choice=first.choice,
            token=first.token,
            finished=first.finished,
            logprob=_logprob_from_wire(first.logprob) if first.HasField("logprob") else None,
        )
        for first in prefilled.first_tokens
    ]


def batch_from_prefill(messages: Sequence[kv_pb2.FromPrefill]) -> kv_pb2.FromPrefill:
    """Messages, at least one, as one."""
    if len(messages) == 1:
        return messages[0]
    return kv_pb2.FromPrefill(batch=kv_pb2.FromPrefillBatch(messages=messages))


def batch_from_decode(messages: Sequence[kv_pb2.FromDecode]) -> kv_pb2.FromDecode:
    """Messages, at least one, as one."""
    if len(messages) == 1:
        return messages[0]
    return kv_pb2.FromDecode(batch=kv_pb2.FromDecodeBatch(messages=messages))


def parts_of(message: _Message) -> Sequence[_Message]:
    """What a message brings, in order."""
    return message.batch.messages if message.HasField("batch") else [message]


def logprob_to_wire(entry: TokenLogprob) -> worker_pb2.TokenLogprob:
    """A token's log-probability and the most likely alternatives."""
    return worker_pb2.TokenLogprob(
        token=entry.token,
        logprob=entry.logprob,
        rank=entry.rank,
        top=[worker_pb2.TopLogprob(token=token, logprob=logprob) for token, logprob in entry.top],
    )


def _logprob_from_wire(entry: worker_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(
        token=entry.token,
        logprob=entry.logprob,
        rank=entry.rank,
        top=tuple((top.token, top.logprob) for top in entry.top),
    )


def reply_flaw(reply: kv_pb2.HelloReply) -> str:
    """Of the answer to a handshake that is no refusal."""
    low, high = LEASE_RANGE_S
    if not low <= reply.lease_s <= high:
        return f"its lease is {reply.lease_s} s, leases are from {low} to {high} s (--lease-s)"
    return ""


def announce_flaw(
    announce: kv_pb2.Announce, tokens: int, block_size: int, known: Mapping[int, tuple[int, int]]
) -> str:
    """Of an announcement of a request's blocks.

    Args:
        announce: What was announced.
        tokens: Of the request's context.
        block_size: Tokens in a block of the prefill worker's.
        known: For each group, the tokens whose blocks it may name first: those that begin or
            follow the blocks that are known of it, both included.
    """
    first, end = announce.first_token, announce.end_token
    if not first <= end <= tokens:
        return f"tokens {first} to {end} of a request of {tokens}"
    seen: set[int] = set()
    for part in announce.groups:
        group, begin, count = part.group, part.first_token, len(part.blocks)
        if group not in known or group in seen:
            return f"blocks of cache group {group}, there are {len(known)} groups, each once"
        seen.add(group)
        low, high = known[group]
        if begin % block_size or not low <= begin <= high:
            return (
                f"blocks of group {group} from token {begin} on: it must be a multiple of"
                f" {block_size} from {low} to {high}"
            )
        if begin + (count - 1) * block_size >= max(end, begin + 1):
            return f"{count} blocks of {block_size} tokens from token {begin} on, for {end} tokens"
    return ""


def prefilled_flaw(prefilled: kv_pb2.Prefilled) -> str:
    """Of the end of a prefill."""
    if not prefilled.first_tokens:
        return "ended prefill without a first token"
    if not math.isfinite(prefilled.computed_s):
        return f"ended prefill at {prefilled.computed_s} s of its clock"
    return ""
