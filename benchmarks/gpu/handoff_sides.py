"""The processes of `handoff.py`: a source whose KV is known, a reader that pulls it, and a copy.

Each has its pools in one allocation, which is viewed as blocks of each size in turn.
"""

from __future__ import annotations

import multiprocessing.connection
import queue
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from worn_pools import TOKEN_BYTES, UNIT_TOKENS, Wear, layout_of, units_of

from tasuki.kv.digester import Digester
from tasuki.kv.effects import Pull, PullDone, PullProgress
from tasuki.kv.puller import Connect, Forget, PeerFailed, Puller, PullerReport
from tasuki.kv.transfer_plan import Run, make_plans
from tasuki.kv.transport import Transfer, Transport, create_transport, metadata_digest
from tasuki.v1 import kv_pb2

DEADLINE_S = 120.0
SOURCE, READER = 0, 1

Pipe = multiprocessing.connection.Connection


@dataclass(frozen=True, slots=True)
class Settings:
    """What both processes are told.

    Attributes:
        device: `cpu` or `cuda`.
        all_visible: Each process sees both GPUs, not its own alone.
    """

    device: str
    all_visible: bool
    pool_bytes: int
    block_sizes: tuple[int, ...]
    prompts: tuple[int, ...]
    ages: int
    repeats: int
    digests: bool = False


class Timed:
    """A transport that adds up what its posts take."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.post_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def post(self, peer: str, runs: Sequence[Run]) -> Transfer:
        begin_s = time.perf_counter()
        try:
            return self._inner.post(peer, runs)
        finally:
            self.post_s += time.perf_counter() - begin_s


def allocate(settings: Settings, gpu: int) -> torch.Tensor:
    """The memory of all pools, [bytes] uint8, on this process's GPU."""
    if settings.device == "cuda":
        torch.cuda.set_device(gpu if settings.all_visible else 0)
    return torch.empty(settings.pool_bytes, dtype=torch.uint8, device=settings.device)


def open_pool(memory: torch.Tensor, settings: Settings, block_size: int) -> Transport:
    """A transport over `memory` as a pool of blocks of `block_size`."""
    layout = layout_of(settings.pool_bytes, block_size)
    pool = memory[: layout.pool_bytes].view(torch.bfloat16).view(layout.shape)
    transport = create_transport("nixl")
    transport.register(pool, layout)
    return transport


def serve(pipe: Pipe, settings: Settings) -> None:
    """The source: every unit holds its number; then it only waits."""
    memory = allocate(settings, SOURCE)
    units = units_of(memory)
    units[:] = torch.arange(len(units), dtype=torch.int32, device=memory.device)[:, None]
    if memory.is_cuda:
        torch.cuda.synchronize()
    for block_size in settings.block_sizes:
        transport = open_pool(memory, settings, block_size)
        pipe.send((transport.layout.SerializeToString(), transport.metadata))
    pipe.recv()


class Reader:
    """Pulls prompts and checks what came."""

    def __init__(self, settings: Settings, memory: torch.Tensor) -> None:
        self.settings = settings
        self._units = units_of(memory)
        self._memory = memory

    @contextmanager
    def connected(self, block_size: int, wire: bytes, metadata: bytes) -> Iterator[Pulls]:
        """A transfer thread that knows the source."""
        transport = Timed(open_pool(self._memory, self.settings, block_size))
        reports: queue.Queue[PullDone | PeerFailed] = queue.Queue()

        def report(event: PullerReport) -> None:
            if not isinstance(event, PullProgress):
                reports.put(event)

        puller = Puller(transport, report)  # type: ignore[arg-type]
        [pair] = make_plans([transport.layout], [kv_pb2.Layout.FromString(wire)])
        puller.start()
        puller.put(Connect("source", metadata, metadata_digest(metadata), pair.plan))
        try:
            yield Pulls(puller, transport, reports, self, block_size)
        finally:
            puller.put(Forget("source"))
            puller.put(Pull(0, "source", []))  # is answered when that is done
            reports.get(timeout=DEADLINE_S)
            puller.stop()

    def measure(self, block_size: int, wire: bytes, metadata: bytes) -> list[dict[str, Any]]:
        """All prompts on blocks of one size: a row for each state of the pools and each length."""
        layout = layout_of(self.settings.pool_bytes, block_size)
        longest = -(-max(self.settings.prompts) // block_size)
        source, own = (
            Wear(layout.num_blocks, self.settings.ages, longest, seed) for seed in (1, 2)
        )
        rows = []
        with self.connected(block_size, wire, metadata) as pulls:
            # The source's memory is mapped by the first read.
            first_ms = pulls.pull([(0, 0)])["total_ms"]
            if self.settings.digests:
                pulls.with_digests([(0, 0)])  # the kernel is compiled
            for state in ("aged", "scattered"):
                for tokens in self.settings.prompts:
                    count = -(-tokens // block_size)
                    drawn = [
                        list(
                            zip(
                                getattr(source, state)(count),
                                getattr(own, state)(count),
                                strict=True,
                            )
                        )
                        for _ in range(self.settings.repeats)
                    ]
                    row = {"block_size": block_size, "state": state, "tokens": tokens}
                    rows.append(row | pulls.medians(drawn) | {"first_read_ms": first_ms})
        return rows

    def check(self, pairs: list[tuple[int, int]], block_size: int) -> None:
        """Every byte is what the source wrote there; what was pulled is wiped again."""
        per = block_size // UNIT_TOKENS
        remote, local = (
            torch.tensor(side, device=self._units.device).repeat_interleave(per) * per
            + torch.arange(per, device=self._units.device).repeat(len(pairs))
            for side in zip(*pairs, strict=True)
        )
        got = self._units[local]
        if not bool((got == remote.to(torch.int32)[:, None]).all()):
            raise SystemExit(f"pulled bytes differ from the source's, block size {block_size}")
        self._units[local] = -1
        if self._units.is_cuda:
            torch.cuda.synchronize()


class Pulls:
    """Pulls by one transfer thread, on blocks of one size, timed and checked."""

    def __init__(
        self,
        puller: Puller,
        transport: Timed,
        reports: queue.Queue[PullDone | PeerFailed],
        reader: Reader,
        block_size: int,
    ) -> None:
        self._puller = puller
        self._transport = transport
        self._reports = reports
        self._reader = reader
        self._block_size = block_size
        self._digester = Digester(transport.pool)
        self._orders = 0

    def pull(self, pairs: list[tuple[int, int]]) -> dict[str, float]:
        """Pull `pairs`, (source's block, own block); bytes, descriptors and milliseconds."""
        self._transport.post_s = 0.0
        done, total_s = self._order(pairs, [])
        return {
            "bytes": done.moved_bytes,
            "descriptors": done.descriptors,
            "post_ms": 1e3 * self._transport.post_s,
            "wire_ms": 1e3 * (done.finished_s - done.posted_s),
            "total_ms": 1e3 * total_s,
        }

    def with_digests(self, pairs: list[tuple[int, int]]) -> dict[str, float]:
        """Milliseconds of the same with digests of all blocks, and of computing these alone."""
        units = [local for _, local in pairs]
        _, total_s = self._order(pairs, units)
        begin_s = time.perf_counter()
        job = self._digester.start(units, self._block_size)
        while job() is None:
            pass
        return {
            "checked_ms": 1e3 * total_s,
            "digests_ms": 1e3 * (time.perf_counter() - begin_s),
        }

    def medians(self, drawn: list[list[tuple[int, int]]]) -> dict[str, float]:
        """Medians over one pull of each of `drawn`, and of their rates."""
        runs = []
        for pairs in drawn:
            found = self.pull(pairs)
            if self._reader.settings.digests:
                found |= self.with_digests(pairs)
            runs.append(found)
        rates = [run["bytes"] / run["wire_ms"] / 1e6 for run in runs]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        return middle | {"gb_per_s": statistics.median(rates)}

    def _order(self, pairs: list[tuple[int, int]], units: list[int]) -> tuple[PullDone, float]:
        """The report and the seconds until it came, with digests of `units`.

        Raises:
            SystemExit: The pull failed, digests are missing, or bytes differ.
        """
        self._orders += 1
        begin_s = time.perf_counter()
        self._puller.put(Pull(self._orders, "source", pairs, units))
        done = self._reports.get(timeout=DEADLINE_S)
        total_s = time.perf_counter() - begin_s
        if isinstance(done, PeerFailed) or done.error:
            raise SystemExit(f"the pull failed: {done}")
        if sum(len(part.units) for part in done.digests) != len(units):
            raise SystemExit("not every unit has a digest")
        self._reader.check(pairs, self._block_size)
        return done, total_s


def read(pipe: Pipe, settings: Settings) -> None:
    """The reader: measures what it is told, block size by block size."""
    reader = Reader(settings, allocate(settings, READER))
    pipe.send(None)
    while (work := pipe.recv()) is not None:
        pipe.send(reader.measure(*work))


def copy_limit(pipe: Pipe, settings: Settings) -> None:
    """One torch copy from GPU to GPU, GB/s, for the bytes of each prompt and for 1 GB."""
    found = {}
    if settings.device == "cpu":
        pipe.send(found)
        return
    for tokens in (*settings.prompts, 10**9 // TOKEN_BYTES):
        source, target = (
            torch.ones(tokens * TOKEN_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
            for index in (SOURCE, READER)
        )
        times = []
        for _ in range(12):
            torch.cuda.synchronize(SOURCE)
            torch.cuda.synchronize(READER)
            begin_s = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(SOURCE)
            torch.cuda.synchronize(READER)
            times.append(time.perf_counter() - begin_s)
        found[str(tokens)] = tokens * TOKEN_BYTES / statistics.median(times[2:]) / 1e9
    pipe.send(found)
