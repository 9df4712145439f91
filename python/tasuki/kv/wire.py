"""Between the engine's plain data and the messages of kv.proto. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence

from tasuki.engine.api import Announced, FirstToken, Prefilled, TokenLogprob
from tasuki.v1 import kv_pb2, worker_pb2


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


def parts_from_prefill(message: kv_pb2.FromPrefill) -> Sequence[kv_pb2.FromPrefill]:
    """What a message brings, in order."""
    return message.batch.messages if message.HasField("batch") else [message]


def parts_from_decode(message: kv_pb2.FromDecode) -> Sequence[kv_pb2.FromDecode]:
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
