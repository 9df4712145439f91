"""The decode steps of `fp8.py`: four variants of a model and its cache, run once and timed."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fp8_results import Results, relative
from kernel_times import trace
from shapes import write_model
from step_bench import Bench, Work

from tasuki.attention.base import AttentionBackend
from tasuki.attention.kv_scales import FP8, KvScales
from tasuki.attention.select import make_attention
from tasuki.execution.recorder import CudaRecorder
from tasuki.execution.sampler import greedy
from tasuki.models.llama import LlamaModel
from tasuki.models.loader import load_model

BLOCK_SIZE = 32
STEPS = ((96, 770), (32, 770), (1, 770), (32, 5100))  # rows, tokens of each
ROUNDS = 3


@dataclass(frozen=True)
class Models:
    """The model with dense weights and with fp8 ones."""

    config: dict[str, Any]
    device: torch.device
    dense: LlamaModel
    fp8: LlamaModel

    @staticmethod
    def load(config: dict[str, Any], device: torch.device) -> Models:
        """Random weights, the same in both but for their rounding."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with tempfile.TemporaryDirectory() as folder:
            path = write_model(Path(folder), config)
            dense, fp8 = (
                load_model(path, dtype=dtype, device=device, weights="dummy", quantization=kind)
                for kind in ("none", "fp8")
            )
        assert isinstance(dense, LlamaModel) and isinstance(fp8, LlamaModel)
        return Models(config, device, dense, fp8)

    def variants(self) -> list[Variant]:
        """All that there are."""
        tokens = max(rows * -(-context // BLOCK_SIZE) * BLOCK_SIZE for rows, context in STEPS)
        scales = KvScales(((0, 0),) * self.config["num_hidden_layers"])
        made = []
        for name, model, kv_dtype in (
            ("bfloat16", self.dense, None),
            ("fp8 cache", self.dense, FP8),
            ("fp8 weights", self.fp8, None),
            ("fp8 weights and cache", self.fp8, FP8),
        ):
            torch.manual_seed(1)  # the same numbers in all caches
            bench = Bench(model, self.device, tokens, kv_dtype)
            made.append(Variant(name, bench, scales if kv_dtype else KvScales()))
        return made


@dataclass(frozen=True)
class Variant:
    """A model and a cache."""

    name: str
    bench: Bench
    scales: KvScales

    def record(self, rows: int, context: int) -> Callable[[], object]:
        """A step, on CUDA as a graph."""
        forward = self._step(rows, context)
        if not self.bench.on_cuda:
            return forward
        with torch.inference_mode():
            replay = CudaRecorder().record(forward)[0]

        def run(kept: Any = forward) -> object:
            """Replays; the graph reads what the step holds."""
            return replay()

        return run

    def eager(self, rows: int, context: int) -> torch.Tensor:
        """Logits of the step, launched kernel by kernel."""
        return self._step(rows, context)()[0]

    def _step(self, rows: int, context: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        pool = self.bench.pool(BLOCK_SIZE)
        heads = self.bench.model.spec.num_heads
        attention = own_attention(pool, heads, self.bench.dtype, self.scales)
        work = Work(f"{rows} x {context}", (context,) * rows)
        batch = self.bench.batch(work, BLOCK_SIZE, graph=True)
        with torch.inference_mode():
            attention.plan(batch)

        def forward() -> tuple[torch.Tensor, torch.Tensor]:
            logits = self.bench.model.forward(batch, attention)
            return logits, greedy(logits)

        return forward


def own_attention(
    pool: torch.Tensor, heads: int, dtype: torch.dtype, scales: KvScales
) -> AttentionBackend:
    """Without FlashInfer, whose kernels for prompts would have to be compiled first."""
    if not pool.is_cuda:
        return make_attention(pool, heads, dtype, scales=scales)[0]
    from tasuki.attention.own import OwnAttention

    return OwnAttention(pool, heads, dtype, scales)


def check_steps(results: Results, variants: list[Variant]) -> None:
    """Each variant's step once, launched kernel by kernel; logits beside bfloat16's."""
    for rows, context in STEPS:
        base = None
        for variant in variants:
            with results.noting(f"eager step {variant.name}, {rows} rows"), torch.inference_mode():
                logits = variant.eager(rows, context)
                base = logits if base is None else base
                found = {"step": variant.name, "rows": rows, "context": context}
                results.logits.append({**found, "differs": relative(logits, base)})
                print(results.logits[-1], file=sys.stderr, flush=True)


def measure_steps(results: Results, variants: list[Variant]) -> None:
    """All variants in turns."""
    for rows, context in STEPS:
        runs = {}
        for variant in variants:
            with results.noting(f"step {variant.name}, {rows} rows"):
                runs[variant.name] = variant.bench, variant.record(rows, context)
        times: dict[str, list[float]] = {name: [] for name in runs}
        with torch.inference_mode():
            for _ in range(ROUNDS):
                for name, (bench, run) in runs.items():
                    times[name].append(bench.device_ms(run))
            for name, (bench, run) in runs.items():
                ms = statistics.median(times[name])
                found = {"step": name, "rows": rows, "context": context}
                results.steps.append({**found, "ms": ms, "runs_ms": times[name]})
                print(f"{rows} x {context}, {name}: {ms:.3f} ms", file=sys.stderr, flush=True)
                if bench.on_cuda and (rows, context) == STEPS[0]:
                    results.traces[f"{name}, {rows} rows"] = trace(run, 5).to_json()
