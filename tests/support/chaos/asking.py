"""One request over a socket of its own, with the manners of good and bad clients."""

from __future__ import annotations

import asyncio
import enum
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from support.relay import reset

_SLOW_READ_BYTES = 2048
_SLOW_BUFFER_BYTES = 4096


class Manner(enum.Enum):
    """How a client takes its answer."""

    WHOLE = "whole"
    STREAM = "stream"
    SLOW = "slow"
    """Streamed, and read slowly through small buffers."""
    LEAVE = "leave"
    """Closes the connection before the end."""
    RESET = "reset"
    """Resets the connection before the end."""

    @property
    def gives_up(self) -> bool:
        return self in (Manner.LEAVE, Manner.RESET)


class LostError(Exception):
    """The router did not give the whole answer; the message has what came instead."""


@dataclass
class Choice:
    """One choice of an answer, whether it came whole or in chunks."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float | None] = field(default_factory=list)


@dataclass
class Document:
    """An answer: its choices by index, and its usage."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None

    def take(self, chunk: dict[str, Any]) -> None:
        """Adds a chunk of a stream, or all of an answer that is not streamed."""
        self.usage = chunk.get("usage") or self.usage
        for each in chunk["choices"]:
            choice = self.choices.setdefault(each["index"], Choice())
            message = each.get("message") or each.get("delta") or {}
            choice.text += each.get("text") or message.get("content") or ""
            choice.tokens += each.get("token_ids") or []
            choice.finish_reason = each.get("finish_reason") or choice.finish_reason
            logprobs = each.get("logprobs") or {}
            choice.logprobs += logprobs.get("token_logprobs") or []
            choice.logprobs += [token["logprob"] for token in logprobs.get("content") or []]


@dataclass(frozen=True)
class Asking:
    """How a request is asked.

    Attributes:
        manner: of its client.
        pause_s: a slow client's, between two reads.
        after: tokens, after which a client gives up its stream.
        stream: a client that gives up streams its answer; else it waits `pause_s`.
    """

    manner: Manner
    pause_s: float = 0.0
    after: int = 0
    stream: bool = False

    @property
    def streams(self) -> bool:
        return self.stream or self.manner in (Manner.STREAM, Manner.SLOW)


async def ask(port: int, path: str, body: dict[str, Any], asking: Asking) -> Document | None:
    """The answer; None where the client gave up before its end.

    Raises:
        LostError: an error status, an error event, or an end before the end.
    """
    if asking.streams:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    reader, writer = await _connect(port, slow=asking.manner is Manner.SLOW)
    try:
        writer.write(head.encode() + data)
        answer = _take(_Incoming(reader, asking), asking)
        if not asking.manner.gives_up or asking.streams:
            return await answer
        try:
            return await asyncio.wait_for(answer, asking.pause_s)
        except TimeoutError:
            return None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise LostError(f"the connection broke: {error!r}") from error
    finally:
        if asking.manner is Manner.RESET:
            reset(writer)
        else:
            writer.close()


async def _connect(port: int, *, slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    connection.setblocking(False)
    if slow:  # before it connects: the window is agreed upon then
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    limit = _SLOW_BUFFER_BYTES if slow else 1 << 16
    return await asyncio.open_connection(sock=connection, limit=limit)


class _Incoming:
    """The bytes of an answer's body."""

    def __init__(self, reader: asyncio.StreamReader, asking: Asking) -> None:
        self._reader = reader
        self._slow_s = asking.pause_s if asking.manner is Manner.SLOW else 0.0

    async def head(self) -> tuple[int, dict[str, str]]:
        status = await self._reader.readline()
        if not status:
            raise LostError("the connection ended before an answer")
        headers = {}
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(status.split()[1]), headers

    async def body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if "chunked" not in headers.get("transfer-encoding", ""):
            yield await self._reader.readexactly(int(headers["content-length"]))
            return
        while size := int((await self._reader.readline()) or b"-1", 16):
            if size < 0:
                raise LostError("the connection ended within the answer")
            async for part in self._parts(size):
                yield part
            await self._reader.readexactly(2)

    async def _parts(self, size: int) -> AsyncIterator[bytes]:
        while size > 0:
            if self._slow_s:
                await asyncio.sleep(self._slow_s)
            part = await self._reader.readexactly(
                min(size, _SLOW_READ_BYTES if self._slow_s else size)
            )
            size -= len(part)
            yield part


async def _take(incoming: _Incoming, asking: Asking) -> Document | None:
    status, headers = await incoming.head()
    document = Document()
    if status != 200 or not asking.streams:
        whole = b"".join([part async for part in incoming.body(headers)])
        if status != 200:
            raise LostError(f"{status}: {whole.decode(errors='replace')}")
        document.take(json.loads(whole))
        return document
    async for event in _events(incoming.body(headers)):
        if event == "[DONE]":
            return document
        chunk = json.loads(event)
        if "error" in chunk:
            raise LostError(f"an error in the stream: {chunk}")
        document.take(chunk)
        tokens = sum(len(choice.tokens) for choice in document.choices.values())
        if asking.manner.gives_up and tokens >= asking.after:
            return None
    raise LostError("the stream ended without [DONE]")


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode()
