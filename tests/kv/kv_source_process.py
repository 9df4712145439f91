"""A process that owns a pool and lets others read it: the far side of the tests of transports."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import torch
from support.transports import TRANSPORTS

from tasuki.kv.backends import BACKENDS
from tasuki.kv.layout import CacheLayout
from tasuki.kv.transport import create_transport, rank_pool
from tasuki.v1 import kv_pb2

DEADLINE_S = 120.0  # a process that imports torch, on a busy machine

# Sources are forked from a process that has imported torch, and nothing of NIXL.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", *{BACKENDS[name].target.partition(":")[0] for name in TRANSPORTS}]
)


def layout(num_blocks: int, block_kib: int) -> CacheLayout:
    """A layout whose blocks have `block_kib` KiB."""
    return CacheLayout(
        num_blocks=num_blocks,
        kv_heads=1,
        layers=2,
        block_size=16,
        head_dim=block_kib * 1024 // (2 * 2 * 16 * 4),
        dtype=torch.float32,
    )


def block_value(block: int, seed: int) -> float:
    """What every element of a block holds."""
    return float(seed * 1000 + block)


def fill(pool: torch.Tensor, seed: int) -> None:
    for block in range(pool.shape[0]):
        pool[block] = block_value(block, seed)


@dataclass(slots=True)
class Source:
    """The far side, seen from the test."""

    process: BaseProcess
    pipe: multiprocessing.connection.Connection
    pool: kv_pb2.RankPool

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def stop(self) -> int | None:
        if self.process.is_alive():
            self.pipe.send("stop")
            self.process.join(DEADLINE_S)
        if self.process.is_alive():
            self.kill()
        return self.process.exitcode


def start_source(
    num_blocks: int, block_kib: int, seed: int, tls: str = "", transport: str = "nixl"
) -> Source:
    """Start a source; `tls` restricts UCX's transports there."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=_serve, args=(theirs, num_blocks, block_kib, seed, tls, transport), daemon=True
    )
    process.start()
    assert ours.poll(DEADLINE_S), "the source did not start"
    return Source(process, ours, kv_pb2.RankPool.FromString(ours.recv_bytes()))


@contextlib.contextmanager
def sources(
    num_blocks: int, block_kib: int, seed: int, transport: str
) -> Iterator[Callable[[], Source]]:
    """Starts sources when it is called; they are stopped at the end."""
    started: list[Source] = []

    def begin() -> Source:
        started.append(start_source(num_blocks, block_kib, seed, transport=transport))
        return started[-1]

    yield begin
    for source in started:
        source.stop()


def _serve(
    pipe: multiprocessing.connection.Connection,
    num_blocks: int,
    block_kib: int,
    seed: int,
    tls: str,
    transport_name: str,
) -> None:
    torch.set_num_threads(1)
    if tls:
        os.environ["UCX_TLS"] = tls
    shape = layout(num_blocks, block_kib)
    transport = create_transport(transport_name)
    pool = transport.allocate(shape)
    fill(pool, seed)
    transport.register(pool, shape)
    pipe.send_bytes(rank_pool(transport).SerializeToString())
    assert pipe.recv() == "stop"
