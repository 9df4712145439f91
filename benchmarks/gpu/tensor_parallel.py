"""A decode step on several GPUs: its time, and the ways to add up over ranks.

    python benchmarks/gpu/tensor_parallel.py --ranks 1 2            2 GPUs, a minute or two
    python benchmarks/gpu/tensor_parallel.py --ranks 2 --device cpu --tiny   the same code anywhere

Random weights in the shape of Qwen3-4B in bfloat16. Each rank is a process, as in
a worker; the first one's times are told. A step is what the engine's executor
launches: upload, attention's plan, a CUDA graph of the forward with its sums and
the greedy choice over all ranks; `gathered`: then the gather of logits, as for
steps that sample. `step ms`: between events, steps one after another, the host
ahead of the device. `us` of a sum: one of many in a CUDA
graph, of [rows, 2560] in bfloat16.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from shapes import QWEN3_4B, TINY, write_model

from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.execution.collective import ALONE, Collective
from tasuki.execution.distributed import Distributed, join, make_store
from tasuki.execution.executor import Executor
from tasuki.execution.step_arrays import StepHeader
from tasuki.kv.layout import CacheLayout
from tasuki.models.loader import load_model
from tasuki.models.shard import Shard
from tasuki.models.spec_reader import read_spec

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_tensor_parallel.json"
BLOCK_SIZE = 32
CONTEXT = 770
BATCHES = (1, 50, 96)
SUM_ROWS = (1, 16, 96, 256, 2048)
SUMS_IN_A_GRAPH = 72  # as many as a step has
HIDDEN = 2560


class Timer:
    """Medians of repeated work on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._on_cuda = device.type == "cuda"
        self._repeats = repeats

    def ms(self, work: Callable[[], object]) -> float:
        """Of one `work` among many, one after another."""
        for _ in range(3):
            work()
        if not self._on_cuda:
            begin_s = time.perf_counter()
            for _ in range(self._repeats):
                work()
            return 1e3 * (time.perf_counter() - begin_s) / self._repeats
        events = [torch.cuda.Event(enable_timing=True) for _ in range(self._repeats + 1)]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        return statistics.median(times)


def sums(collective: Distributed, timer: Timer) -> Iterator[dict[str, Any]]:
    """Each way to sum, by rows."""
    device = torch.device("cuda", collective.rank)
    symmetric = collective._symmetric
    name, ops = dist.group.WORLD.group_name, torch.ops.symm_mem
    for rows in SUM_ROWS:
        x = torch.randn(rows, HIDDEN, device=device, dtype=torch.bfloat16)
        ways: dict[str, Callable[[], object]] = {"NCCL": lambda x=x: dist.all_reduce(x)}
        if symmetric is not None:
            import torch.distributed._symmetric_memory as memory

            buffer = memory.empty(x.numel(), dtype=x.dtype, device=device)
            memory.rendezvous(buffer, name)
            ways["one-shot, copied"] = lambda b=buffer, x=x: ops.one_shot_all_reduce_copy(
                b, x.view(-1), "sum", name
            )
            ways["one-shot, in place"] = lambda b=buffer: ops.one_shot_all_reduce(b, "sum", name)
            ways["two-shot, in place"] = lambda b=buffer: ops.two_shot_all_reduce_(b, "sum", name)
            flat = torch.empty_like(buffer)

            def copied(b: Any = buffer, x: Any = x, flat: Any = flat) -> None:
                b.copy_(x.view(-1))
                ops.two_shot_all_reduce_out(b, "sum", name, flat)

            ways["two-shot, copied"] = copied
        ways |= _with_norm(collective, x)
        for way, work in ways.items():
            for _ in range(2):
                work()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(SUMS_IN_A_GRAPH):
                    work()
            us = 1e3 * timer.ms(graph.replay) / SUMS_IN_A_GRAPH
            yield {"way": way, "rows": rows, "us": us}


def _with_norm(collective: Distributed, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """A sum, the addition to the residual and the norm, as in a layer."""
    from tasuki.models import kernels

    hidden, place = torch.randn_like(x), collective.place(*x.shape, x.dtype)
    placed = x if place is None else place
    weight = torch.ones_like(x[0])
    return {
        "ours + add + norm": lambda: kernels.add_norm(
            hidden, collective.all_reduce(x), weight, 1e-6
        ),
        "ours, placed, + add + norm": lambda: kernels.add_norm(
            hidden, collective.all_reduce(placed), weight, 1e-6
        ),
        "NCCL + add + norm": lambda: (
            dist.all_reduce(x),
            kernels.add_norm(hidden, x, weight, 1e-6),
        ),
    }


def steps(
    collective: Collective, folder: Path, device: torch.device, timer: Timer, batches: list[int]
) -> Iterator[dict[str, Any]]:
    """Decode steps of several batch sizes."""
    spec, on_cuda = read_spec(folder), device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    model = load_model(folder, dtype=dtype, device=device, weights="dummy", collective=collective)
    local = Shard(spec, collective.rank, collective.size).local
    width = -(-CONTEXT // BLOCK_SIZE)
    blocks = max(batches) * width
    pool = CacheLayout(
        blocks, local.num_kv_heads, local.num_layers, BLOCK_SIZE, local.head_dim, dtype
    ).allocate(device)
    attention, _ = make_attention(pool, local.num_heads, dtype)
    executor = Executor(model, attention, pool, collective)
    if on_cuda:
        executor.capture(max(batches), CONTEXT)
    for batch, greedy in itertools.product(batches, (True, False)):
        plain = StepHeader(
            [1] * batch, [CONTEXT] * batch, batch, width, wanted=batch, greedy=greedy
        )
        step = executor.padded(plain, decodes=True)

        def run(step: StepHeader = step, batch: int = batch) -> None:
            tokens, sources, positions, slots, tables, wanted = executor.staging.take(*step.parts())
            tokens[:], sources[:], positions[:], slots[:], tables[:] = 1, -1, CONTEXT - 1, -1, 0
            wanted[:] = range(len(wanted))
            order = tables.reshape(step.rows, width)
            order[:batch] = np.arange(batch * width).reshape(batch, width)
            slots[:batch] = order[:batch, -1] * BLOCK_SIZE + (CONTEXT - 1) % BLOCK_SIZE
            executor.run(step)

        said = {"batch": batch, "context": CONTEXT, "gathered": not greedy}
        yield said | {"step_ms": timer.ms(run)}


def on_rank(
    pipe: Connection | None, rank: int, size: int, port: int, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """All measurements of one rank."""
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    timer = Timer(device, 3 if args.tiny else 50)
    batches = [1, 3] if args.tiny else list(BATCHES)
    found: dict[str, Any] = {"ranks": size}

    def keep(key: str, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            found.setdefault(key, []).append(row)
            if rank == 0:
                print(f"ranks {size} {key}: {json.dumps(row)}", file=sys.stderr, flush=True)

    def say(what: str) -> None:
        if rank == 0:
            print(f"{time.monotonic() - begin_s:.1f} s: {what}", file=sys.stderr, flush=True)

    begin_s = time.monotonic()
    with torch.inference_mode():
        if size == 1:
            keep("steps", steps(ALONE, folder, device, timer, batches))
        else:
            say("meet")
            collective = join(rank, size, port, device)
            say("met")
            if device.type == "cuda":
                found["symmetric"] = collective._symmetric is not None
                keep("sums", sums(collective, timer))
            say("steps")
            keep("steps", steps(collective, folder, device, timer, batches))
            if device.type == "cuda":
                say("steps, NCCL")
                plain = Distributed(device, "nccl")
                keep("steps_nccl", steps(plain, folder, device, timer, batches))
    if pipe is not None:
        pipe.send(found)
    faulthandler.cancel_dump_traceback_later()
    return found


def measure(size: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """On so many ranks; the first one's figures."""
    store = make_store(size)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    ranks = [
        context.Process(target=on_rank, args=(theirs, rank, size, store.port, folder, args))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for rank, (_, theirs) in zip(ranks, pipes, strict=True):
        rank.start()
        theirs.close()
    try:
        return pipes[0][0].recv()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def main() -> None:
    """Measure, write the result, print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each number of ranks")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    result = header(
        "gpu_tensor_parallel",
        label="tensor parallel",
        topology=None,
        model="Qwen3-4B shape",
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), TINY if args.tiny else QWEN3_4B)
        result["runs"] = [measure(size, model, args) for size in args.ranks]
    write_result(args.output, result)


if __name__ == "__main__":
    main()
