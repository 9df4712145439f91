"""Attacks a router over HTTP in many ways at once, and counts what came of it.

    python tests/support/attack.py http://127.0.0.1:8000 MODEL --seconds 60

For routers on this machine only. Each way has a fixed number of connections or a fixed
rate, so that the load is the same on every run. SIGTERM ends it early; the counts are
printed as one line of JSON at the end.

Runs in a process of its own: the clients whose answers are watched must not share a
Python interpreter with it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

HOLD_S = 600.0  # longer than any limit of the router under test
TRICKLE_S = 0.5  # between two bytes of a slow sender
KILOBYTE = 1000


class Attack:
    """Counts by way and outcome: `slow_body.408`, `idle.closed`, `flood.503`."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname in ("127.0.0.1", "::1", "localhost"), "for this machine only"
        self.host, self.port, self.model = parts.hostname, parts.port, model
        self.counts: Counter[str] = Counter()
        self.over = False

    async def run(self, seconds: float, connections: int) -> None:
        """Attacks for so long.

        Args:
            connections: of each of the three ways that hold connections.
        """
        ways = [self.slow_header, self.slow_body, self.idle]
        work: list[Awaitable[None]] = [self.again(w) for w in ways for _ in range(connections)]
        work += [self.again(self.amplify, pause_s=0.05) for _ in range(4)]
        work += [self.again(self.echo, pause_s=0.05) for _ in range(2)]
        work += [self.again(self.flood, pause_s=0.05) for _ in range(4)]
        work += [self.again(self.oversize, pause_s=0.2) for _ in range(2)]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.wait(tasks, timeout=seconds)
        finally:
            self.over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def again(self, way: Callable[[], Awaitable[str]], *, pause_s: float = 0.2) -> None:
        while not self.over:
            try:
                outcome = await way()
            except OSError:
                outcome = "reset"
            self.counts[f"{way.__name__}.{outcome}"] += 1
            await asyncio.sleep(pause_s)

    # -- what holds connections --

    async def idle(self) -> str:
        """Says nothing."""
        return await self.exchange(b"")

    async def slow_header(self) -> str:
        return await self.exchange(b"POST /v1/completions HTTP/1.1\r\nx: ", trickle=b"x")

    async def slow_body(self) -> str:
        return await self.exchange(self.head("/v1/completions", 100 * KILOBYTE), trickle=b" ")

    # -- small bodies that ask for much --

    async def amplify(self) -> str:
        """16 KB of stop strings for 64 choices."""
        stops = [chr(ord("a") + i) * KILOBYTE for i in range(16)]
        return await self.post("/v1/completions", prompt="x", n=64, max_tokens=1, stop=stops)

    async def echo(self) -> str:
        """128 copies of a prompt with 20 logprobs a token."""
        return await self.post(
            "/v1/completions", prompt="some words " * 300, n=128, logprobs=20, echo=True
        )

    # -- what takes processor time --

    async def flood(self) -> str:
        return await self.post("/tokenize", prompt="some more words " * 1000)

    async def oversize(self) -> str:
        """Twice the largest body, in full."""
        size = 16 * 2**20
        return await self.exchange(self.head("/v1/completions", size), rest=b" " * size)

    # -- the wire --

    def head(self, path: str, length: int) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", "", ""]
        return "\r\n".join(lines).encode()

    async def post(self, path: str, **body: object) -> str:
        data = json.dumps({"model": self.model, **body}).encode()
        return await self.exchange(self.head(path, len(data)) + data)

    async def exchange(self, data: bytes, *, trickle: bytes = b"", rest: bytes = b"") -> str:
        """The status of the answer, or `closed` when the router ended the connection."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(data)
            status = asyncio.ensure_future(reader.readline())
            while trickle and not status.done():
                await asyncio.wait([status], timeout=TRICKLE_S)
                writer.write(trickle)
            if rest:
                with contextlib.suppress(OSError):
                    await self.send(writer, rest)
            async with asyncio.timeout(HOLD_S):
                line = await status
            return line.split()[1].decode() if line else "closed"
        finally:
            writer.transport.abort()

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        for at in range(0, len(data), 2**16):
            writer.write(data[at : at + 2**16])
            await writer.drain()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=400)
    arguments = parser.parse_args()
    attack = Attack(arguments.url, arguments.model)
    work = asyncio.ensure_future(attack.run(arguments.seconds, arguments.connections))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work
    print(json.dumps(dict(sorted(attack.counts.items()))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
