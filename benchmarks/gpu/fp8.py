"""fp8 weights and an fp8 cache on one GPU: right, and how fast.

    python benchmarks/gpu/fp8.py --output fp8.json          under four minutes
    python benchmarks/gpu/fp8.py --device cpu --tiny --output fp8.json     the same code anywhere

Random weights of Qwen3-4B's shape. First each step runs once, kernel by kernel. Then decode
steps of 1, 32 and 96 rows at a context of 770 tokens, and of 32 rows at 5,100, in CUDA graphs,
take turns: bfloat16, an fp8 cache, fp8 weights, and both. Attention is by our own kernels. Then
GEMMs alone, through the weights of all layers: bfloat16, fp8 as it is served, and by our kernel
where a library's serves; last all are compared with float32. Each part is a process; what fails,
or what the time does not suffice for, is named.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from kernel_times import trace
from shapes import config_of, write_model
from step_bench import Bench, Work

from tasuki.attention.base import AttentionBackend
from tasuki.attention.kv_scales import FP8, KvScales
from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.execution.recorder import CudaRecorder
from tasuki.execution.sampler import greedy
from tasuki.models.llama import LlamaModel
from tasuki.models.loader import load_model

BLOCK_SIZE = 32
STEPS = ((96, 770), (32, 770), (1, 770), (32, 5100))  # rows, tokens of each
GEMM_ROWS = (16, 32, 96, 256, 608, 2048, 4096)
ROUNDS = 3
PARTS = ("eager", "steps", "gemms", "checks")


@dataclass
class Results:
    """What was found, and the time left."""

    deadline_s: float
    checks: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    gemms: list[dict[str, Any]] = field(default_factory=list)
    traces: dict[str, Any] = field(default_factory=dict)
    logits: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What was found."""
        return {name: value for name, value in vars(self).items() if name != "deadline_s"}

    def add(self, found: dict[str, Any]) -> None:
        """What another process found."""
        for name, value in found.items():
            held = getattr(self, name)
            if isinstance(held, list):
                held.extend(value)
            else:
                held.update(value)

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Let what fails be known, and the rest go on."""
        if time.monotonic() > self.deadline_s:
            self.failed[what] = "no time left"
            raise TimeoutError
        try:
            yield
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            self.failed[what] = f"{type(error).__name__}: {first}"
            print(f"FAILED {what}: {self.failed[what]}", file=sys.stderr, flush=True)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Distance over length, in float32."""
    return float((got.float() - want.float()).norm() / want.float().norm())


# ---- kernels against float32


def check_kernels(
    results: Results, shapes: dict[str, tuple[int, int]], device: torch.device
) -> None:
    """Each GEMM at each kind of number of rows, with random weights and scales."""
    from tasuki.models.fp8_linear import rounded
    from tasuki.models.gemms import FewRows

    few = FewRows(1e-6, device)
    for height in (128, 1):
        for rows in (1, 2, 16, 77, 96, 200, 1000) if device.type == "cuda" else (2, 65):
            for name, (out, size) in shapes.items():
                with results.noting(f"{name}, {rows} rows"):
                    torch.manual_seed(rows)
                    gemm = random_linear(out, size, height, device)
                    x = torch.randn(rows, size, device=device).to(gemm.weight.dtype)
                    one = few.takes(gemm, rows)
                    got = few.plain(gemm, x) if one else gemm(x)
                    seen = x if one else rounded(x).dense()
                    want = seen.float() @ gemm.weight.dense().float().t()
                    found = {"gemm": name, "rows": rows, "scales": f"{height} x 128"}
                    results.checks.append({**found, "error": relative(got, want)})


def random_linear(out: int, size: int, height: int, device: torch.device) -> Any:
    """A GEMM by fp8 whose blocks' scales differ."""
    from tasuki.models.fp8_linear import Fp8Linear
    from tasuki.models.weights import Fp8Weight

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    values = (4 * torch.randn(out, size, device=device)).to(FP8)
    scales = 0.5 + torch.rand(-(-out // height), size // 128, device=device)
    return Fp8Linear(Fp8Weight(values, scales * size**-0.5 / 4, height, 128, dtype), None)


# ---- whole decode steps


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


# ---- GEMMs alone


def measure_gemms(results: Results, models: Models, bench: Bench) -> None:
    """Each GEMM at each number of rows."""
    from tasuki.models.fp8_linear import Fp8Linear, rounded

    dense: Any = models.dense.layers
    fp8: Any = models.fp8.layers
    gemms: dict[str, Callable[[Any], Any]] = {
        "qkv": lambda layer: layer.qkv,
        "output": lambda layer: layer.output,
        "gate_up": lambda layer: layer.mlp.gate_up,
        "down": lambda layer: layer.mlp.down,
    }
    with torch.inference_mode():
        # The same weights with scales of 128 x 128, as folders have them: of no other one's values.
        square = [
            {
                name: Fp8Linear(
                    replace(of(layer).weight, scales=_squares(of(layer).weight), rows=128), None
                )
                for name, of in gemms.items()
            }
            for layer in fp8
        ]
    for rows in GEMM_ROWS:
        for name, of in gemms.items():
            x = torch.randn(rows, of(dense[0]).weight.shape[1], device=bench.device)
            x = x.to(bench.dtype)
            r = rounded(x)
            works: dict[str, tuple[Any, Callable[[Any], object]]] = {
                "bfloat16": (dense, lambda layer, x=x, of=of: of(layer)(x)),
                "fp8": (fp8, lambda layer, r=r, of=of: of(layer)(r)),
                "fp8, 128 x 128": (square, lambda layer, r=r, name=name: layer[name](r)),
                "our kernel": (fp8, lambda layer, r=r, of=of: _own(of(layer), r)),
                "rounding": (fp8, lambda layer, x=x: rounded(x)),
            }
            for way, (layers, work) in works.items():
                what = {"gemm": name, "rows": rows, "way": way}
                with results.noting(f"{name}, {way}, {rows} rows"), torch.inference_mode():
                    results.gemms.append({**what, "us": _us(bench, layers, work)})


def _squares(weight: Any) -> Any:
    """Scales as many as blocks of 128 x 128 have: times are of interest, not results."""
    return weight.scales[::128].contiguous()


def _own(gemm: Any, x: Any) -> Any:
    """By the kernel of ours."""
    out = torch.empty(x.shape[0], gemm.outs, dtype=x.dtype, device=x.device)
    return gemm._launch(out, x)


def _us(bench: Bench, layers: Any, each: Callable[[Any], object]) -> float:
    """Microseconds of one layer's, over all layers, on CUDA in a graph."""

    def all_layers() -> tuple[torch.Tensor, torch.Tensor]:
        for layer in layers:
            each(layer)
        return torch.empty(0), torch.empty(0)

    run: Callable[[], object] = all_layers
    if bench.on_cuda:
        run = CudaRecorder().record(all_layers)[0]
    return 1e3 * bench.device_ms(run) / len(layers)


# ---- all of it


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


def run_part(part: str, args: argparse.Namespace, results: Results) -> None:
    """One of PARTS, in this process."""
    device = torch.device(args.device)
    config = config_of("qwen3-4b", False)
    if args.tiny:
        config |= {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
        config |= {"eos_token_id": 0}
    if part == "checks":
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        query = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        shapes = {"qkv": (query + 2 * kv, hidden), "output": (hidden, query)}
        shapes |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        with torch.inference_mode():
            check_kernels(results, shapes, device)
        return
    models = Models.load(config, device)
    if part == "eager":
        check_steps(results, models.variants())
    elif part == "steps":
        measure_steps(results, models.variants())
    elif device.type == "cuda":
        bench = Bench(models.fp8, device, BLOCK_SIZE)
        measure_gemms(results, models, bench)


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


def report(results: Results) -> str:
    """A short table."""
    lines = []
    if results.checks:
        lines.append(f"largest error of a GEMM: {max(c['error'] for c in results.checks):.5f}")
    lines += [f"    {c}" for c in results.checks if not c["error"] < 0.01]
    for name, found in results.traces.items():
        lines.append(f"{name}: busy {found['busy']:.1%} of {found['ms']:.3f} ms")
        lines += [
            f"    {k['ms']:7.3f} ms {k['calls']:6.1f} x {k['name'][:60]}"
            for k in found["kernels"][:7]
        ]
    for each in results.gemms:
        lines.append(f"{each['gemm']:8} {each['rows']:5} {each['way']:16} {each['us']:9.2f} us")
    lines += [f"logits {each}" for each in results.logits]
    lines += [f"FAILED {what}: {why}" for what, why in results.failed.items()]
    for s in results.steps:
        lines.append(f"{s['rows']:3} x {s['context']}, {s['step']:24} {s['ms']:7.3f} ms")
    return "\n".join(lines)


def in_child(part: str, args: argparse.Namespace, results: Results, folder: Path) -> None:
    """A part in a process of its own: a kernel that fails ends no other part."""
    left_s = results.deadline_s - time.monotonic()
    if left_s <= 5:
        results.failed[part] = "no time left"
        return
    output = folder / f"{part}.json"
    command = [sys.executable, __file__, "--part", part, "--device", args.device]
    command += ["--seconds", f"{left_s:.0f}", "--output", str(output)]
    command += ["--tiny"] if args.tiny else []
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if part == "eager" else {}
    try:
        done = subprocess.run(command, env={**os.environ, **blocking}, timeout=left_s + 20)
        if done.returncode:
            results.failed[part] = f"ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        results.failed[part] = "took too long"
    if output.exists():
        results.add(json.loads(output.read_text()))


def main() -> None:
    """Check, measure, write the result, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--seconds", type=float, default=180.0, help="nothing begins after them")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    results = Results(time.monotonic() + args.seconds)
    if args.part is not None:
        try:
            run_part(args.part, args, results)
        except TimeoutError:
            print(f"{args.part}: no time left", file=sys.stderr)
        finally:
            args.output.write_text(json.dumps(results.to_json()))
        return
    described = header("gpu_fp8", label="fp8", topology=None, model="qwen3-4b shape")
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts.split(","):
            in_child(part, args, results, Path(folder))
    write_result(args.output, described | results.to_json())
    print(report(results))


if __name__ == "__main__":
    main()
