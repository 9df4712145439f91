"""fp8 weights and an fp8 cache on one GPU: right, and how fast.

    python benchmarks/gpu/fp8.py --output fp8.json          under four minutes
    python benchmarks/gpu/fp8.py --device cpu --tiny --output fp8.json     the same code anywhere

Random weights of Qwen3-4B's shape. First each step runs once, kernel by kernel. Then decode
steps of 1, 32 and 96 rows at a context of 770 tokens, in CUDA graphs, take turns: bfloat16, fp8
weights, fp8 weights and cache, and fp8 weights with rows in bfloat16 where they are rounded
otherwise. Attention is by our own kernels. Then GEMMs alone, through the weights of all layers:
other tiles at 96 and 32 rows, and prompts' rows beside bfloat16 and PyTorch's block-scaled GEMM;
last the kernels are compared with float32. Each part is a process; what fails, or what the time
does not suffice for, is named.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from kernel_times import trace
from shapes import config_of, write_model
from step_bench import Bench, Work

from tasuki.attention import decode_kernels
from tasuki.attention.base import AttentionBackend
from tasuki.attention.kv_scales import FP8, KvScales
from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.execution.recorder import CudaRecorder
from tasuki.execution.sampler import greedy
from tasuki.models.llama import LlamaModel
from tasuki.models.loader import load_model

BLOCK_SIZE, CONTEXT = 32, 770
ROWS = (96, 32, 1)
ROUNDS = 3
PARTS = ("eager", "steps", "gemms", "prompts", "checks")
TILINGS: dict[str, tuple[tuple[int, int, int, float], ...]] = {
    "rounded": ((128, 8, 5, 1), (128, 8, 4, 2), (64, 4, 6, 2), (64, 4, 6, 1), (128, 4, 5, 1)),
    "rounded gated": ((128, 8, 4, 1), (128, 8, 3, 1), (128, 8, 4, 2)),
    "few": ((64, 4, 6, 1), (64, 4, 5, 2), (64, 4, 8, 1), (128, 8, 4, 1), (128, 4, 4, 1)),
    "few gated": ((64, 4, 6, 1), (64, 4, 4, 1), (64, 8, 5, 1), (32, 4, 6, 1), (128, 8, 3, 1)),
    "unrounded 96": ((64, 4, 4, 1), (128, 8, 4, 1), (64, 4, 3, 2)),
    "unrounded 96 gated": ((64, 4, 4, 1), (64, 8, 4, 1), (128, 8, 3, 1)),
}


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
    """Each kind of GEMM at each kind of number of rows, with random weights and scales."""
    from tasuki.models.fp8_linear import rounded
    from tasuki.models.gemms import FewRows

    few = FewRows(1e-6, device)
    every = (1, 16, 48, 64, 65, 96, 128, 200, 1000)
    for rows in every if device.type == "cuda" else (2, 65):
        for name, (out, size) in shapes.items():
            what = f"{name}, {rows} rows"
            with results.noting(what):
                torch.manual_seed(rows)
                gemm = random_linear(out, size, device)
                weight = gemm.weight.dense().float()
                x = torch.randn(rows, size, device=device).to(gemm.weight.dtype)
                if few.takes_rounded(gemm, rows):
                    given: Any = rounded(x)
                    error_in = relative(given.dense(), x)
                    x = given.dense()
                elif not few.takes(gemm, rows):
                    given, error_in = x, 0.0
                    x = rounded(x).dense()
                else:
                    given, error_in = x, 0.0
                want = x.float() @ weight.t()
                own = few.takes_rounded(gemm, rows) or few.takes(gemm, rows)
                if name == "gate_up":
                    gate, up = want.chunk(2, -1)
                    want = torch.nn.functional.silu(gate) * up
                    if few.takes_rounded(gemm, rows):
                        got = few.gated_rounded(gemm, given).dense()
                    elif own:
                        got = few.gated(gemm, given, None)
                    else:
                        gate, up = gemm(given).float().chunk(2, -1)
                        got = torch.nn.functional.silu(gate) * up
                elif name in ("output", "down") and own:
                    hidden = torch.randn(rows, out, device=device).to(gemm.weight.dtype)
                    want = want + hidden.float()
                    few.add(gemm, given, hidden)
                    got = hidden
                else:
                    got = few.plain(gemm, given) if own else gemm(given)
                error = relative(got, want)
                results.checks.append(
                    {"gemm": name, "rows": rows, "error": error, "rounding_of_rows": error_in}
                )


def random_linear(out: int, size: int, device: torch.device) -> Any:
    """A GEMM by fp8 whose blocks' scales differ."""
    from tasuki.models.fp8_linear import Fp8Linear
    from tasuki.models.weights import Fp8Weight

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    values = (4 * torch.randn(out, size, device=device)).to(FP8)
    scales = 0.5 + torch.rand(-(-out // 128), size // 128, device=device)
    return Fp8Linear(Fp8Weight(values, scales * size**-0.5 / 4, 128, 128, dtype), None)


# ---- whole decode steps


@dataclass(frozen=True)
class Variant:
    """A model and a cache."""

    name: str
    bench: Bench
    scales: KvScales
    rounded: bool = True
    loads: int = decode_kernels.LOADS

    def record(self, rows: int) -> Callable[[], object]:
        """The step of so many rows, on CUDA as a graph."""
        forward = self._step(rows)
        with torch.inference_mode(), self._changed():
            if not self.bench.on_cuda:
                return forward
            replay = CudaRecorder().record(forward)[0]

        def run(kept: Any = forward) -> object:
            """Replays; the graph reads what the step holds."""
            return replay()

        return run

    def eager(self, rows: int) -> torch.Tensor:
        """Logits of the step, launched kernel by kernel."""
        with self._changed():
            return self._step(rows)()[0]

    @contextmanager
    def _changed(self) -> Iterator[None]:
        with rows_unrounded(not self.rounded), patch.object(decode_kernels, "LOADS", self.loads):
            yield

    def _step(self, rows: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        pool = self.bench.pool(BLOCK_SIZE)
        heads = self.bench.model.spec.num_heads
        with self._changed():
            attention = own_attention(pool, heads, self.bench.dtype, self.scales)
        work = Work(f"{rows} x {CONTEXT}", (CONTEXT,) * rows)
        batch = self.bench.batch(work, BLOCK_SIZE, graph=True)
        with torch.inference_mode(), self._changed():
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


@contextmanager
def rows_unrounded(wanted: bool) -> Iterator[None]:
    """Rows in bfloat16 where they would be rounded."""
    if not wanted:
        yield
        return
    from tasuki.models import gemms

    with (
        patch.object(gemms.FewRows.takes, "__defaults__", (gemms.LIMIT_ROWS,)),
        patch.object(gemms, "MAX_ROWS", gemms.LIMIT_ROWS),
    ):
        yield


def measure_steps(results: Results, variants: list[Variant]) -> None:
    """All variants in turns."""
    for rows in ROWS:
        runs = {}
        for variant in variants:
            with results.noting(f"step {variant.name}, {rows} rows"):
                runs[variant.name] = variant.bench, variant.record(rows)
        times: dict[str, list[float]] = {name: [] for name in runs}
        with torch.inference_mode():
            for _ in range(ROUNDS):
                for name, (bench, run) in runs.items():
                    times[name].append(bench.device_ms(run))
            for name, (bench, run) in runs.items():
                ms = statistics.median(times[name])
                results.steps.append({"step": name, "rows": rows, "ms": ms, "runs_ms": times[name]})
                print(f"{rows} rows, {name}: {ms:.3f} ms", file=sys.stderr, flush=True)
                if bench.on_cuda and rows == ROWS[0]:
                    results.traces[f"{name}, {rows} rows"] = trace(run, 5).to_json()


# ---- GEMMs alone


def measure_gemms(results: Results, models: Models, bench: Bench) -> None:
    """Tiles of few rows and of rounded rows."""
    from tasuki.models import gemm_tiles
    from tasuki.models.fp8_linear import rounded
    from tasuki.models.gemms import FewRows

    few, layers = FewRows(1e-6, bench.device), models.fp8.layers
    layer: Any = layers[0]
    sizes = [
        layer.qkv.weight.shape[1],
        layer.output.weight.shape[1],
        layer.mlp.down.weight.shape[1],
    ]
    for rows, part in ((96, "rounded"), (32, "few"), (96, "unrounded 96")):
        xs = [torch.randn(rows, size, device=bench.device).to(bench.dtype) for size in sizes]
        hidden = xs[0].clone()
        given: list[Any] = [rounded(x) for x in xs] if part == "rounded" else list(xs)
        works: dict[str, Callable[[Any], object]] = {
            "qkv": lambda layer, x=given[0]: few.plain(layer.qkv, x),
            "output": lambda layer, x=given[1], h=hidden: few.add(layer.output, x, h),
            "down": lambda layer, x=given[2], h=hidden: few.add(layer.mlp.down, x, h),
            "gate_up": lambda layer, x=given[0]: few.gated(layer.mlp.gate_up, x, None),
        }
        constant = "FP8_FEW"
        if part == "rounded":
            works["gate_up"] = lambda layer, x=given[0]: few.gated_rounded(layer.mlp.gate_up, x)
            constant = "FP8_ROUNDED"
        for name, work in works.items():
            gated = name == "gate_up"
            for tiling in TILINGS[f"{part} gated" if gated else part]:
                what, own = f"{name}, {part}, {rows} rows", constant + "_GATED" * gated
                with (
                    results.noting(f"{what} {tiling}"),
                    torch.inference_mode(),
                    rows_unrounded(part.startswith("unrounded")),
                    patch.object(gemm_tiles, own, gemm_tiles.Fp8Tiling(*tiling)),
                ):
                    us = _us(bench, layers, work)
                    if few.refused:
                        raise RuntimeError("refused")
                    results.gemms.append({"gemm": what, "tiling": list(tiling), "us": us})
                few.refused = False


def measure_prompts(results: Results, models: Models, bench: Bench) -> None:
    """The GEMM of gate and up with prompts' rows, beside bfloat16 and PyTorch's for fp8."""
    from tasuki.models.fp8_linear import rounded

    layers: Any = models.fp8.layers
    dense: Any = models.dense.layers
    scaled = {id(layer): scaled_weight(layer.mlp.gate_up) for layer in layers}
    for rows in (608, 4096, 2048):
        x = torch.randn(rows, models.config["hidden_size"], device=bench.device).to(bench.dtype)
        r = rounded(x)
        scales = r.scales.t().contiguous().t()
        works: dict[str, tuple[Any, Callable[[Any], object]]] = {
            "bfloat16": (dense, lambda layer, x=x: layer.mlp.gate_up(x)),
            "fp8": (layers, lambda layer, r=r: layer.mlp.gate_up(r)),
            "rounding": (layers, lambda layer, x=x: rounded(x)),
            "PyTorch's fp8": (
                layers,
                lambda layer, r=r, s=scales: scaled_mm(r.values, s, scaled[id(layer)]),
            ),
        }
        for name, (of, work) in works.items():
            with results.noting(f"gate_up, {name}, {rows} rows"), torch.inference_mode():
                us = _us(bench, of, work)
                results.gemms.append({"gemm": f"gate_up, {name}, {rows} rows", "us": us})


def scaled_weight(gemm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight as PyTorch's block-scaled GEMM takes it."""
    weight = gemm.weight
    scales = weight.scales[:: 128 // weight.rows]  # times are of interest, not results
    padding = -scales.shape[1] % 4
    scales = torch.nn.functional.pad(scales, (0, padding))[:, : scales.shape[1]]
    return weight.values.t(), scales.t()


def scaled_mm(
    x: torch.Tensor, scales: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """PyTorch's: rows scaled by 1 x 128, the weight by 128 x 128."""
    return torch._scaled_mm(x, weight[0], scales, weight[1], out_dtype=torch.bfloat16)


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
        """All that there are on the device."""
        tokens = max(ROWS) * -(-CONTEXT // BLOCK_SIZE) * BLOCK_SIZE
        made_of = ((self.dense, None), (self.fp8, None), (self.fp8, FP8))
        benches = []
        for model, kv_dtype in made_of:
            torch.manual_seed(1)  # the same numbers in all caches
            benches.append(Bench(model, self.device, tokens, kv_dtype))
        dense, fp8, cached = benches
        scales = KvScales(((0, 0),) * self.config["num_hidden_layers"])
        made = [
            Variant("bfloat16", dense, KvScales()),
            Variant("fp8 weights", fp8, KvScales()),
            Variant("fp8 weights and cache", cached, scales),
        ]
        if self.device.type == "cuda":
            made.append(Variant("fp8 weights, rows unrounded", fp8, KvScales(), rounded=False))
            made.append(Variant("fp8 weights and cache, 5 loads", cached, scales, loads=5))
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
        (measure_gemms if part == "gemms" else measure_prompts)(results, models, bench)


def check_steps(results: Results, variants: list[Variant]) -> None:
    """Each variant's step once, launched kernel by kernel; logits beside bfloat16's."""
    for rows in ROWS:
        base = None
        for variant in variants:
            with results.noting(f"eager step {variant.name}, {rows} rows"), torch.inference_mode():
                logits = variant.eager(rows)
                base = logits if base is None else base
                found = {"step": variant.name, "rows": rows, "differs": relative(logits, base)}
                results.logits.append(found)
                print(found, file=sys.stderr, flush=True)


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
        differs = f", differs {each['differs']:.4f}" if "differs" in each else ""
        tiling = each.get("tiling") or ""
        lines.append(f"{each['gemm']:34} {tiling!s:20} {each['us']:9.2f} us{differs}")
    lines += [f"logits {each}" for each in results.logits]
    lines += [f"FAILED {what}: {why}" for what, why in results.failed.items()]
    lines += [f"{s['rows']:3} rows, {s['step']:30} {s['ms']:7.3f} ms" for s in results.steps]
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
