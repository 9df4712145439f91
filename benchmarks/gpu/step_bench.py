"""One step of a model on one device: its input, its time, what it must cost at least."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from kernel_times import Trace, trace

from tasuki.attention.base import AttentionBackend
from tasuki.attention.batch import Batch
from tasuki.attention.select import make_attention
from tasuki.execution.recorder import CudaRecorder
from tasuki.execution.sampler import greedy
from tasuki.kv.layout import CacheLayout
from tasuki.models.base import CausalModel


@dataclass(frozen=True, slots=True)
class Work:
    """A step: contexts of decodes (the new token included), chunks as (past, new)."""

    name: str
    decodes: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(new for _, new in self.chunks)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values decodes read."""
        return sum(self.decodes)


class Bench:
    """A model, memory for its cache, and the results so far."""

    def __init__(
        self,
        model: CausalModel,
        device: torch.device,
        pool_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.device = model, device
        spec = model.spec
        self.on_cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_cuda else torch.float32
        self.kv_dtype = kv_dtype or self.dtype
        elements = pool_tokens * spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim
        self.memory = torch.empty(elements, dtype=self.kv_dtype, device=device)
        for part in self.memory.split(1 << 28):
            part.copy_(torch.randn(part.shape, dtype=self.dtype, device=device))
        self.tokens = pool_tokens
        self.rows: list[dict[str, Any]] = []
        self.kernels: list[dict[str, Any]] = []
        self.traces: dict[str, Trace] = {}

    def pool(self, block_size: int) -> torch.Tensor:
        """The memory as a pool of blocks of this size."""
        spec = self.model.spec
        layout = CacheLayout(
            self.tokens // block_size,
            spec.num_kv_heads,
            spec.num_layers,
            block_size,
            spec.head_dim,
            self.kv_dtype,
        )
        return self.memory[: layout.pool_bytes // self.kv_dtype.itemsize].view(layout.shape)

    def attention(self, block_size: int, **options: Any) -> AttentionBackend:
        """The backend over a pool, FlashInfer with these options on CUDA."""
        pool, heads = self.pool(block_size), self.model.spec.num_heads
        if not self.on_cuda:
            return make_attention(pool, heads, self.dtype)[0]
        from tasuki.attention.flashinfer import FlashInferAttention
        from tasuki.attention.flashinfer_kernels import FlashInferOptions

        return FlashInferAttention(pool, heads, self.dtype, FlashInferOptions(**options))

    def batch(self, work: Work, block_size: int, *, graph: bool = False) -> Batch:
        """The step's input, its blocks scattered over the pool."""
        draw = random.Random(0)
        contexts = [*work.decodes, *(past + new for past, new in work.chunks)]
        counts = [1] * len(work.decodes) + [new for _, new in work.chunks]
        needed = [-(-context // block_size) for context in contexts]
        free = iter(draw.sample(range(self.tokens // block_size), sum(needed)))
        tables = [[next(free) for _ in range(blocks)] for blocks in needed]
        positions = [range(c - n, c) for c, n in zip(contexts, counts, strict=True)]
        slots = [
            table[at // block_size] * block_size + at % block_size
            for table, places in zip(tables, positions, strict=True)
            for at in places
        ]
        width = max(needed)
        ends = torch.tensor(counts).cumsum(0) - 1

        def put(values: Iterable[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(list(values), dtype=dtype, device=self.device)

        vocab = self.model.spec.vocab_size
        return Batch(
            tokens=put(draw.randrange(vocab) for _ in slots),
            positions=put(at for places in positions for at in places),
            slots=put(slots),
            block_tables=put((t + t[:1] * (width - len(t)) for t in tables), torch.int32),
            query_lens=counts,
            context_lens=contexts,
            logits_rows=put(ends.tolist()),
            num_decodes=len(work.decodes),
            bucket=len(counts) if graph else None,
        )

    def step(
        self, work: Work, variant: str, block_size: int, *, graph: bool = False, **options: Any
    ) -> Callable[[], object]:
        """Time a step and keep the row; returns what runs it again."""
        attention = self.attention(block_size, **options)
        batch = self.batch(work, block_size, graph=graph)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.model.forward(batch, attention)
            return logits, greedy(logits)

        with torch.inference_mode():
            attention.plan(batch)
            run: Callable[[], object] = CudaRecorder().record(forward)[0] if graph else forward

            def whole() -> None:
                attention.plan(batch)
                run()

            whole()
            row: dict[str, Any] = {
                "step": work.name,
                "variant": variant,
                "block_size": block_size,
                "graph": graph,
                "ms": self.device_ms(run),
                "plan_ms": self.host_ms(lambda: attention.plan(batch)),
                "wall_ms": self.wall_ms(whole),
            }
        if work.chunks:
            row["tflops"] = self.flops(work) / row["ms"] / 1e9
        self.rows.append(row)
        print(line(row), file=sys.stderr, flush=True)
        return run

    def profile(self, name: str, run: Callable[[], object]) -> None:
        """Keep what a trace of some runs says."""
        if self.on_cuda:
            with torch.inference_mode():
                self.traces[name] = trace(run, 5)

    def flops(self, work: Work) -> float:
        """Of the products for every token, the head for the rows read, and attention."""
        spec = self.model.spec
        width = spec.num_heads * spec.head_dim
        layer = spec.hidden_size * (2 * width + 2 * spec.num_kv_heads * spec.head_dim)
        layer += 3 * spec.hidden_size * spec.intermediate_size
        head = spec.hidden_size * spec.vocab_size * (len(work.decodes) + len(work.chunks))
        seen = work.cached + sum(new * past + new * (new + 1) / 2 for past, new in work.chunks)
        return 2 * (layer * spec.num_layers * work.tokens + head) + 4 * width * seen * (
            spec.num_layers
        )

    def bytes_read(self, work: Work) -> float:
        """What a step must read: weights and cache."""
        spec = self.model.spec
        width = spec.num_heads * spec.head_dim
        layer = spec.hidden_size * (2 * width + 2 * spec.num_kv_heads * spec.head_dim)
        layer += 3 * spec.hidden_size * spec.intermediate_size
        weights = layer * spec.num_layers + spec.hidden_size * spec.vocab_size
        token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
        cached = work.cached + sum(past + new for past, new in work.chunks)
        return self.dtype.itemsize * (weights + token * cached)

    def floor_ms(self, work: Work, copy_gb_s: float, product_tflops: float) -> float:
        """The longer of reading and computing, at these rates."""
        reading_ms = self.bytes_read(work) / copy_gb_s / 1e6
        return max(reading_ms, self.flops(work) / product_tflops / 1e9)

    def device_ms(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median between events around each run, the device idle before none of them."""
        run()
        if not self.on_cuda:
            return self.host_ms(run, 3)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda._sleep(2_000_000)  # about a millisecond: the host gets ahead
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events)

    def host_ms(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Median of the host's time, the device idle before each."""
        times = []
        for _ in range(repeats):
            self.wait()
            begin_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin_s)
        return 1e3 * statistics.median(times)

    def wall_ms(self, run: Callable[[], object], repeats: int = 20) -> float:
        """Per run, one after another, one in flight beside the one being launched."""
        ends: list[torch.cuda.Event] = []
        self.wait()
        begin_s = time.perf_counter()
        for _ in range(repeats if self.on_cuda else 2):
            if len(ends) > 1:
                ends[-2].synchronize()
            run()
            if self.on_cuda:
                ends.append(torch.cuda.Event())
                ends[-1].record()
        self.wait()
        return 1e3 * (time.perf_counter() - begin_s) / (repeats if self.on_cuda else 2)

    def wait(self) -> None:
        """Until the device has finished."""
        if self.on_cuda:
            torch.cuda.synchronize()


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    rate = f", {row['tflops']:.0f} TFLOP/s" if "tflops" in row else ""
    return (
        f"{row['step']:45} {row['variant']:14} block {row['block_size']:2}"
        f" {'graph' if row['graph'] else 'eager'}: {row['ms']:8.3f} ms, plan {row['plan_ms']:.3f},"
        f" wall {row['wall_ms']:.3f}{rate}"
    )
