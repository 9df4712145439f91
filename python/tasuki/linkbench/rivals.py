"""What a link is compared with in the same run: memcpy, a plain socket, a GPU's own copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from tasuki.linkbench.source import SourceClient

MEMCPY, SOCKET, PEER_COPY = "memcpy", "socket", "peer copy"


def _median_s(act: Callable[[], None], repeats: int) -> float:
    """Seconds of the median call, after one that warms up."""
    act()
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def rates(
    payload_bytes: int, client: SourceClient, devices: tuple[str, str], repeats: int
) -> dict[str, float]:
    """Bytes per second of each rival for one payload, in one piece.

    Args:
        payload_bytes: To move.
        client: To the source: its socket.
        devices: Of the source's and the reader's memory.
        repeats: Of each.
    """
    found = {MEMCPY: payload_bytes / _median_s(_memcpy(payload_bytes), repeats)}
    buffer = bytearray(payload_bytes)
    found[SOCKET] = payload_bytes / _median_s(lambda: client.stream(buffer), repeats)
    theirs, ours = (torch.device(device) for device in devices)
    if theirs.type == ours.type == "cuda" and theirs != ours:
        found[PEER_COPY] = payload_bytes / _median_s(
            _peer_copy(payload_bytes, theirs, ours), repeats
        )
    return found


def _memcpy(payload_bytes: int) -> Callable[[], None]:
    source = memoryview(bytearray(payload_bytes))
    target = memoryview(bytearray(payload_bytes))

    def copy() -> None:
        target[:] = source

    return copy


def _peer_copy(payload_bytes: int, theirs: torch.device, ours: torch.device) -> Callable[[], None]:
    source, target = (
        torch.ones(payload_bytes, dtype=torch.uint8, device=device) for device in (theirs, ours)
    )

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(theirs)
        torch.cuda.synchronize(ours)

    return copy
