"""What a prefill worker says and cannot be so: each function answers why, empty if it may be.

The pure part of reading `kv.proto`: a message that is readable may still name blocks, tokens
or times that lead nowhere. Checked before anything is done with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tasuki.kv.config import LEASE_RANGE_S
from tasuki.v1 import kv_pb2


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
