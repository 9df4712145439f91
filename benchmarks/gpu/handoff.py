"""KV from one GPU to another through the product's transport, and how near the link it comes.

    python benchmarks/gpu/handoff.py                     2 GPUs, under 2 minutes
    python benchmarks/gpu/handoff.py --device cpu        the same code on any machine, tiny

A source and a reader, a process each as in production, each seeing one GPU
only. In each one allocation of --pool-gb is looked at as a pool of blocks of
each size in turn, in the shape of Qwen3-4B (36 layers, 8 KV heads of 128,
bfloat16: 147,456 bytes a token). Both pools are worn before: --ages random
allocations and frees by the product's own block pool ("aged"), or blocks drawn
at random from the whole pool ("scattered"). The reader pulls prompts through
the transfer thread; after every pull all bytes are compared with what the
source wrote. The limit is one torch copy between the same two GPUs.

Median of --repeats pulls, each of other blocks: `wire` is from the first post
to the last byte seen to be there, `total` from the order to its report, `post`
what the transfer thread spent handing descriptors to NIXL. 904 tokens is the
last chunk of a prompt of 5,000 in chunks of 2,048: what prefill cannot hide.
With --digests each prompt is pulled again with digests of all that came (`--kv-digest all`):
`checked` is the time from the order to its report then, `digests` what computing them alone
takes, from the call to the values on the host; a source takes as long, beside the transfer.
The product tells UCX to keep no mappings (kv/cuda_ipc.py); a second run lets it,
and shows what that gains and what a dead source then keeps of its GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from worn_pools import TOKEN_BYTES, UNIT_TOKENS, Wear, layout_of, units_of

from tasuki.bench.header import header, write_result
from tasuki.kv.digester import Digester
from tasuki.kv.effects import Pull, PullDone, PullProgress
from tasuki.kv.puller import Connect, Forget, PeerFailed, Puller, PullerReport
from tasuki.kv.transfer_plan import Run, make_plans
from tasuki.kv.transport import Transfer, Transport, create_transport, metadata_digest
from tasuki.v1 import kv_pb2

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "handoff_nvlink.json"
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
        self._settings = settings
        self._units = units_of(memory)
        self._memory = memory
        self._orders = 0

    @contextmanager
    def connected(
        self, block_size: int, wire: bytes, metadata: bytes
    ) -> Iterator[tuple[Puller, Timed, queue.Queue[PullDone | PeerFailed]]]:
        """A transfer thread that knows the source."""
        transport = Timed(open_pool(self._memory, self._settings, block_size))
        reports: queue.Queue[PullDone | PeerFailed] = queue.Queue()

        def report(event: PullerReport) -> None:
            if not isinstance(event, PullProgress):
                reports.put(event)

        puller = Puller(transport, report)  # type: ignore[arg-type]
        [pair] = make_plans([transport.layout], [kv_pb2.Layout.FromString(wire)])
        puller.start()
        puller.put(Connect("source", metadata, metadata_digest(metadata), pair.plan))
        try:
            yield puller, transport, reports
        finally:
            puller.put(Forget("source"))
            puller.put(Pull(0, "source", []))  # is answered when that is done
            reports.get(timeout=DEADLINE_S)
            puller.stop()

    def measure(self, block_size: int, wire: bytes, metadata: bytes) -> list[dict[str, Any]]:
        """All prompts on blocks of one size."""
        layout = layout_of(self._settings.pool_bytes, block_size)
        longest = -(-max(self._settings.prompts) // block_size)
        source, own = (
            Wear(layout.num_blocks, self._settings.ages, longest, seed) for seed in (1, 2)
        )
        rows = []
        with self.connected(block_size, wire, metadata) as (puller, transport, reports):

            def pull(pairs: list[tuple[int, int]], check: bool = False) -> dict[str, float]:
                self._orders += 1
                transport.post_s = 0.0
                units = [local for _, local in pairs] if check else []
                begin_s = time.perf_counter()
                puller.put(Pull(self._orders, "source", pairs, units))
                done = reports.get(timeout=DEADLINE_S)
                total_s = time.perf_counter() - begin_s
                if isinstance(done, PeerFailed) or done.error:
                    raise SystemExit(f"the pull failed: {done}")
                if sum(len(part.units) for part in done.digests) != len(units):
                    raise SystemExit("not every unit has a digest")
                self._check(pairs, block_size)
                if check:
                    return {"checked_ms": 1e3 * total_s}
                return {
                    "bytes": done.moved_bytes,
                    "descriptors": done.descriptors,
                    "post_ms": 1e3 * transport.post_s,
                    "wire_ms": 1e3 * (done.finished_s - done.posted_s),
                    "total_ms": 1e3 * total_s,
                }

            first = pull([(0, 0)])  # the source's memory is mapped by the first read
            digester = Digester(transport.pool)

            def digest(units: list[int]) -> dict[str, float]:
                begin_s = time.perf_counter()
                job = digester.start(units, block_size)
                while job() is None:
                    pass
                return {"digests_ms": 1e3 * (time.perf_counter() - begin_s)}

            def measured(pairs: list[tuple[int, int]]) -> dict[str, float]:
                if not self._settings.digests:
                    return pull(pairs)
                units = [local for _, local in pairs]
                return pull(pairs) | pull(pairs, check=True) | digest(units)

            if self._settings.digests:
                pull([(0, 0)], check=True)  # the kernel is compiled
                digest([0])
            for state in ("aged", "scattered"):
                for tokens in self._settings.prompts:
                    count = -(-tokens // block_size)
                    runs = [
                        measured(
                            list(
                                zip(
                                    getattr(source, state)(count),
                                    getattr(own, state)(count),
                                    strict=True,
                                )
                            )
                        )
                        for _ in range(self._settings.repeats)
                    ]
                    rows.append(
                        {
                            "block_size": block_size,
                            "state": state,
                            "tokens": tokens,
                            **{key: statistics.median(r[key] for r in runs) for key in runs[0]},
                            "gb_per_s": statistics.median(
                                r["bytes"] / r["wire_ms"] / 1e6 for r in runs
                            ),
                            "first_read_ms": first["total_ms"],
                        }
                    )
        return rows

    def _check(self, pairs: list[tuple[int, int]], block_size: int) -> None:
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


@contextmanager
def process(target: Any, settings: Settings, visible: str | None) -> Iterator[Pipe]:
    """`target` in a process of its own that sees only the GPUs `visible`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    child = context.Process(target=target, args=(theirs, settings), daemon=True)
    child.start()
    theirs.close()
    if before is None:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        yield ours
    finally:
        child.terminate()
        child.join(10)


def receive(pipe: Pipe) -> Any:
    """The next message.

    Raises:
        SystemExit: None came in time, or the process is gone; its own words are above.
    """
    try:
        if pipe.poll(DEADLINE_S):
            return pipe.recv()
    except EOFError:
        raise SystemExit("a process of the measurement ended") from None
    raise SystemExit(f"a process of the measurement was silent for {DEADLINE_S:g} s")


def used_gb(settings: Settings) -> float | None:
    """GB taken on the source's GPU, by whomever."""
    if settings.device == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run([*query, "-i", str(SOURCE)], capture_output=True, text=True, check=True)
    return float(done.stdout) * 2**20 / 1e9


def run(settings: Settings, cache: str, limit: dict[str, float]) -> dict[str, Any]:
    """All measurements with UCX keeping its mappings (`y`) or not (`n`)."""
    apart = settings.device == "cuda" and not settings.all_visible
    os.environ["UCX_CUDA_IPC_CACHE"] = cache
    print(f"UCX_CUDA_IPC_CACHE={cache}", flush=True)
    rows = []
    before = used_gb(settings)
    with process(read, settings, str(READER) if apart else None) as reader:
        with process(serve, settings, str(SOURCE) if apart else None) as source:
            receive(reader)
            for block_size in settings.block_sizes:
                reader.send((block_size, *receive(source)))
                for row in receive(reader):
                    rows.append(row)
                    show(row, limit)
        # The source is dead, its reader lives on and has forgotten it.
        time.sleep(1.0)
        after = used_gb(settings)
        reader.send(None)
    found = {"ucx_cuda_ipc_cache": cache, "rows": rows}
    if before is not None and after is not None:
        found["dead_source_keeps_gb"] = after - before
        print(f"the dead source keeps {after - before:.1f} GB of its GPU", flush=True)
    return found


def show(row: dict[str, Any], limit: dict[str, float]) -> None:
    """One line of the table."""
    share = row["gb_per_s"] / limit[str(row["tokens"])] if limit else float("nan")
    print(
        f"{row['block_size']:>6} {row['state']:<10}{row['tokens']:>7}{row['bytes'] / 1e6:>9.1f} MB"
        f"{row['descriptors']:>7.0f} desc{row['post_ms']:>8.2f} post{row['wire_ms']:>8.2f} wire"
        f"{row['total_ms']:>8.2f} total ms{row['gb_per_s']:>8.1f} GB/s, {share:.0%} of a copy"
        + (
            f"{row['checked_ms']:>8.2f} checked{row['digests_ms']:>8.2f} digests ms"
            if "checked_ms" in row
            else ""
        ),
        flush=True,
    )


def main() -> int:
    """Measure, print, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--all-visible", action="store_true", help="see both GPUs in each process")
    parser.add_argument("--product-only", action="store_true", help="no UCX_CUDA_IPC_CACHE=y")
    parser.add_argument("--pool-gb", type=float, help="of each pool [110; cpu: 1]")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--digests", action="store_true", help="measure --kv-digest all, too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 904, 5000])
    parser.add_argument("--ages", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if wrong := [size for size in arguments.block_sizes if size % UNIT_TOKENS]:
        parser.error(f"--block-sizes {wrong}: must be multiples of {UNIT_TOKENS}")
    pool_gb = arguments.pool_gb or (110.0 if arguments.device == "cuda" else 1.0)
    settings = Settings(
        device=arguments.device,
        all_visible=arguments.all_visible,
        pool_bytes=int(pool_gb * 1e9),
        block_sizes=tuple(arguments.block_sizes),
        prompts=tuple(arguments.tokens),
        ages=arguments.ages,
        repeats=arguments.repeats,
        digests=arguments.digests,
    )
    begin_s = time.monotonic()
    with process(copy_limit, settings, None) as pipe:
        limit = receive(pipe)
    runs: list[dict[str, Any]] = []
    for cache in ("n",) if arguments.product_only else ("n", "y"):
        try:
            runs.append(run(settings, cache, limit))
        except SystemExit as error:  # the other way may work
            print(f"failed: {error}", flush=True)
            runs.append({"ucx_cuda_ipc_cache": cache, "failed": str(error)})
            continue
        settings = replace(settings, block_sizes=(32,))  # enough to compare
    for tokens, gb_per_s in limit.items():
        print(f"torch copy of {int(tokens) * TOKEN_BYTES / 1e6:.0f} MB: {gb_per_s:.1f} GB/s")
    print(f"pools of {pool_gb:g} GB, {time.monotonic() - begin_s:.0f} s in all")
    result = header("handoff", label="handoff", topology=None, model="qwen3-4b-shape")
    result |= {"pool_bytes": settings.pool_bytes, "ages": settings.ages}
    result |= {"torch_copy_gb_per_s": limit, "runs": runs}
    write_result(arguments.out, result)
    print(f"written: {arguments.out}")
    return int(any("failed" in each for each in runs))


if __name__ == "__main__":
    sys.exit(main())
