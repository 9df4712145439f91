"""Engines of several ranks, a process each, whose pools are read and compared byte by byte.

A process stands for rank r of engines of every degree above r at once, a pool
and an agent for each. Rank 0 of a decode engine is the test's own process.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import queue
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from tasuki.kv.digester import Digester
from tasuki.kv.effects import Pull, PullDone, PullProgress
from tasuki.kv.layout import CacheLayout
from tasuki.kv.puller import PeerFailed, Puller
from tasuki.kv.rank_channel import KvRank, KvRankError, RemoteRanks
from tasuki.kv.ranked import RankedPuller
from tasuki.kv.transport import Transport, create_transport, rank_pool
from tasuki.v1 import kv_pb2

DEADLINE_S = 60.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "tasuki.kv.nixl", "tasuki.kv.ranked"])


@dataclass(frozen=True, slots=True)
class Shape:
    """What the pools of an engine look like, and where they lie.

    Attributes:
        heads: KV heads of the model; with more ranks than heads each rank holds one.
        head_kib: KiB of one head of a block of 16 tokens, at most 256.
        block_size: tokens of a block.
        transport: as in the registry.
        devices: rank r's pool lies on the r-th of them, counted round.
    """

    heads: int = 4
    head_kib: int = 4
    num_blocks: int = 24
    devices: tuple[str, ...] = ("cpu",)
    block_size: int = 16
    transport: str = "nixl"

    def layout(self, degree: int, rank: int) -> CacheLayout:
        return CacheLayout(
            num_blocks=self.num_blocks,
            kv_heads=max(1, self.heads // degree),
            layers=2,
            block_size=self.block_size,
            head_dim=self.head_kib * 1024 // (2 * 2 * 16 * 4),
            dtype=torch.float32,
            first_kv_head=rank * self.heads // degree,
        )

    def with_blocks_of(self, tokens: int) -> Shape:
        """For as many tokens, in blocks of `tokens`."""
        count = self.num_blocks * self.block_size // tokens
        return replace(self, block_size=tokens, num_blocks=count)

    def contents(self, layout: CacheLayout, seed: int) -> torch.Tensor:
        """[block, head, place] int32: no two elements of an engine are the same."""
        blocks = torch.arange(layout.num_blocks, dtype=torch.int32)[:, None, None]
        heads = torch.arange(layout.kv_heads, dtype=torch.int32)[None, :, None]
        places = torch.arange(self.head_kib * self.block_size * 16, dtype=torch.int32)
        heads = layout.first_kv_head + heads
        return (seed << 28) + (blocks << 20) + (heads << 16) + places[None, None, :]


class RankPool:
    """One rank's pool, registered."""

    def __init__(self, shape: Shape, degree: int, rank: int, seed: int) -> None:
        self._shape = shape
        self._rank = rank
        self.layout = shape.layout(degree, rank)
        device = torch.device(shape.devices[rank % len(shape.devices)])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.transport: Transport = create_transport(shape.transport)
        self.pool = self.transport.allocate(self.layout, device)
        self.fill(seed)
        self.transport.register(self.pool, self.layout)

    def _words(self) -> torch.Tensor:
        return self.pool.view(torch.int32).flatten(2)

    def fill(self, seed: int) -> None:
        self._words().copy_(self._shape.contents(self.layout, seed))
        self._settle()

    def differing(self, seed: int, blocks: dict[int, int], source_seed: int) -> list[int]:
        """Blocks that are not as filled, or, of those in `blocks`, not the source's."""
        self._settle()
        wanted = self._shape.contents(self.layout, seed)
        theirs = self._shape.contents(self.layout, source_seed)
        for local, remote in blocks.items():
            wanted[local] = theirs[remote]
        same = (self._words().cpu() == wanted).flatten(1).all(1)
        return [block for block, is_same in enumerate(same.tolist()) if not is_same]

    def differing_units(
        self, seed: int, units: dict[int, int], source: Shape, source_seed: int, degree: int
    ) -> list[int]:
        """As `differing`, where `units` are (local, remote) of a source of another block size."""
        self._settle()
        layout = self.layout
        wanted = self._shape.contents(layout, seed)
        other = source.layout(degree, self._rank)
        theirs = source.contents(other, source_seed)
        unit = math.gcd(layout.block_size, other.block_size)
        planes = (layout.kv_heads, 2 * layout.layers)
        wanted_slots, their_slots = (
            words.view(-1, *planes, size, layout.head_dim)
            for words, size in ((wanted, layout.block_size), (theirs, other.block_size))
        )
        for local, remote in units.items():
            block, at = divmod(local * unit, layout.block_size)
            their_block, their_at = divmod(remote * unit, other.block_size)
            wanted_slots[block, :, :, at : at + unit] = their_slots[
                their_block, :, :, their_at : their_at + unit
            ]
        same = (self._words().cpu() == wanted).flatten(1).all(1)
        return [block for block, is_same in enumerate(same.tolist()) if not is_same]

    def _settle(self) -> None:
        if self.pool.is_cuda:
            torch.cuda.synchronize(self.pool.device)


class RankProcess:
    """Rank `rank` of engines of all `degrees` above it, seen from the test.

    Args:
        decodes: whether these ranks read, by orders through the pipes `kv`.
        tls: restricts UCX's transports there.
    """

    def __init__(
        self,
        shape: Shape,
        degrees: Sequence[int],
        rank: int,
        seed: int,
        *,
        decodes: bool = False,
        tls: str = "",
    ) -> None:
        self.rank = rank
        self.kv: dict[int, Connection] = {}
        theirs = {}
        for degree in (d for d in degrees if d > rank):
            self.kv[degree], theirs[degree] = _CONTEXT.Pipe()
        self._pipe, control = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_serve, args=(control, shape, theirs, rank, seed, decodes, tls), daemon=True
        )
        self.process.start()
        control.close()
        for end in theirs.values():
            end.close()

    def ask(self, *question: Any) -> Any:
        """Call a method of the pool of a degree: (degree, method, arguments)."""
        self._pipe.send(question)
        assert self._pipe.poll(DEADLINE_S), f"rank {self.rank} is silent"
        return self._pipe.recv()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        self._pipe.close()
        self.process.join(DEADLINE_S if self.process.is_alive() else 0)


def _serve(
    control: Connection,
    shape: Shape,
    kv: dict[int, Connection],
    rank: int,
    seed: int,
    decodes: bool,
    tls: str,
) -> None:
    torch.set_num_threads(1)
    if tls:
        os.environ["UCX_TLS"] = tls
    pools = {degree: RankPool(shape, degree, rank, seed) for degree in kv}
    readers = []
    for degree, pool in pools.items():
        if decodes:
            readers.append(KvRank(pool.transport, kv[degree]))
        else:
            kv[degree].send_bytes(rank_pool(pool.transport).SerializeToString())
    with contextlib.suppress(EOFError):
        while True:
            degree, method, *arguments = control.recv()
            control.send(getattr(pools[degree], method)(*arguments))


class PrefillEngines:
    """The sources: engines of each of `degrees`."""

    def __init__(self, shape: Shape, degrees: Sequence[int], seed: int, tls: str = "") -> None:
        self.seed = seed
        self.ranks = [
            RankProcess(shape, degrees, rank, seed, tls=tls) for rank in range(max(degrees))
        ]
        self.pools: dict[int, list[kv_pb2.RankPool]] = {degree: [] for degree in degrees}
        for rank in self.ranks:
            for degree, pipe in rank.kv.items():
                assert pipe.poll(DEADLINE_S), "a rank did not start"
                self.pools[degree].append(kv_pb2.RankPool.FromString(pipe.recv_bytes()))

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()


class DecodeEngine:
    """The reader of one degree; its rank 0 is here."""

    def __init__(self, shape: Shape, degree: int, seed: int, others: list[RankProcess]) -> None:
        self.degree = degree
        self.shape = shape
        self._seed = seed
        self._others = others
        self._own = RankPool(shape, degree, 0, seed)
        self._reports: queue.Queue[PullDone | PeerFailed | PullProgress] = queue.Queue()
        self._puller = Puller(self._own.transport, self._reports.put)
        self._remote = RemoteRanks([rank.kv[degree] for rank in others], self._reports.put)
        layouts = [self._own.transport.layout, *(pool.layout for pool in self._remote.pools)]
        self.ranked = RankedPuller(layouts, [self._puller.put, *self._remote.put])
        self._puller.start()
        if others:
            self._remote.start()
        self._orders = itertools.count(1)

    @property
    def rank_bytes(self) -> int:
        """Of a block, over all ranks."""
        return sum(p.pool.block_bytes for p in self.ranked._layouts)

    def begin(self, engine: str, pairs: Sequence[tuple[int, int]]) -> int:
        """Give an order; its id."""
        order_id = next(self._orders)
        self.ranked.pull(Pull(order_id, engine, pairs, [local for _, local in pairs]))
        return order_id

    def part(self) -> PullDone | None:
        """Wait for the end of a part; the whole order's if it was the last."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(queue.Empty):
                report = self._reports.get(timeout=0.1)
                if not isinstance(report, PullProgress):  # which slow machines have
                    assert isinstance(report, PullDone), report
                    return self.ranked.ended(report)
            if self._others and not self._remote.is_alive():
                raise KvRankError("a reading rank is gone")
        raise TimeoutError(f"no report in {DEADLINE_S:g} s")

    def end(self) -> PullDone:
        """Wait for the end of an order."""
        while (whole := self.part()) is None:
            pass
        return whole

    def fill(self) -> None:
        self._own.fill(self._seed)
        for rank in self._others:
            rank.ask(self.degree, "fill", self._seed)

    def differing(self, blocks: dict[int, int], source_seed: int) -> list[list[int]]:
        """By rank: local blocks that do not hold what they should."""
        asked = ("differing", self._seed, blocks, source_seed)
        return [
            self._own.differing(*asked[1:]),
            *(rank.ask(self.degree, *asked) for rank in self._others),
        ]

    def differing_units(
        self, units: dict[int, int], source: Shape, source_seed: int
    ) -> list[list[int]]:
        """By rank: local blocks that do not hold what they should, of a source of other blocks."""
        asked = ("differing_units", self._seed, units, source, source_seed, self.degree)
        return [
            self._own.differing_units(*asked[1:]),
            *(rank.ask(self.degree, *asked) for rank in self._others),
        ]

    def close(self) -> None:
        self._puller.stop()


@contextlib.contextmanager
def decode_engines(shape: Shape, degrees: Sequence[int], seed: int) -> Iterator[list[DecodeEngine]]:
    """Readers of each of `degrees`."""
    ranks = [
        RankProcess(shape, degrees, rank, seed, decodes=True) for rank in range(1, max(degrees))
    ]
    engines = [DecodeEngine(shape, degree, seed, ranks[: degree - 1]) for degree in degrees]
    yield engines
    for engine in engines:
        engine.close()
    for rank in ranks:
        rank.stop()


def check_pull(
    reader: DecodeEngine, name: str, pairs: Sequence[tuple[int, int]], source_seed: int
) -> PullDone:
    """Pulls (remote, local) blocks from `name`: every rank has its heads, and no other byte."""
    reader.fill()
    reader.begin(name, pairs)
    done = reader.end()
    assert not done.error
    assert done.moved_bytes == len(pairs) * reader.rank_bytes
    blocks = {local: remote for remote, local in pairs}
    assert reader.differing(blocks, source_seed) == [[]] * reader.degree
    check_digests(reader, done, reader.shape, source_seed, blocks)
    return done


def check_digests(
    reader: DecodeEngine, done: PullDone, source: Shape, source_seed: int, units: dict[int, int]
) -> None:
    """Every rank has the source's digests of its heads of `units` (local, remote)."""
    layout = source.layout(1, 0)
    pool = layout.allocate()
    pool.view(torch.int32).flatten(2).copy_(source.contents(layout, source_seed))
    tokens = math.gcd(source.block_size, reader.shape.block_size)
    expected = Digester(pool).start(list(units.values()), tokens)()
    assert expected is not None
    of_unit = dict(zip(units, expected, strict=True))
    compared = 0
    for part in done.digests:
        end = part.first_head + part.values.shape[1]
        for unit, values in zip(part.units, part.values, strict=True):
            assert values.tolist() == of_unit[unit][part.first_head : end].tolist()
        compared += part.values.size
    assert compared == len(units) * sum(each.pool.kv_heads for each in reader.ranked._layouts)


def units_of(source: Shape, reader: Shape, seed: int = 1) -> list[tuple[int, int]]:
    """(remote, local) units, as a sequence in scattered blocks has them, of most of both pools.

    They begin inside a remote block and end inside a local one.
    """
    choose = random.Random(seed)
    unit = math.gcd(source.block_size, reader.block_size)
    sides = []
    for shape in (source, reader):
        blocks = choose.sample(range(shape.num_blocks), shape.num_blocks)
        per = shape.block_size // unit
        sides.append([block * per + at for block in blocks for at in range(per)])
    theirs, ours = sides
    skipped = 1 if source.block_size > unit else 0
    count = min(len(theirs) - skipped, len(ours)) - reader.block_size // unit // 2
    return list(zip(theirs[skipped : skipped + count], ours[:count], strict=True))


def check_units(
    reader: DecodeEngine, name: str, shapes: tuple[Shape, Shape], source_seed: int, seed: int = 1
) -> PullDone:
    """Pulls from blocks of another size: every rank has its heads of the tokens, no other byte.

    Args:
        shapes: of the source and of the reader.
    """
    source, own = shapes
    pairs = units_of(source, own, seed)
    reader.fill()
    reader.begin(name, pairs)
    done = reader.end()
    assert not done.error
    per_block = source.block_size // math.gcd(source.block_size, own.block_size)
    blocks = len({remote // per_block for remote, _ in pairs})
    assert done.moved_bytes >= blocks * reader.rank_bytes * source.block_size // own.block_size
    units = {ours: theirs for theirs, ours in pairs}
    assert reader.differing_units(units, source, source_seed) == [[]] * reader.degree
    check_digests(reader, done, source, source_seed, units)
    return done
