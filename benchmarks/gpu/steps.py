"""Single steps of the model on one GPU, beside what the device allows at most.

    python benchmarks/gpu/steps.py                  everything, a few minutes
    python benchmarks/gpu/steps.py --only decode --block-sizes 16
    python benchmarks/gpu/steps.py --shape llama-3-8b    another model's sizes
    python benchmarks/gpu/steps.py --device cpu --tiny   the same code on any machine

Random weights in the shape of Qwen3-4B, or another, in bfloat16, a cache full of random
numbers, blocks taken from it at random. Model and attention are called as the
engine's runner calls them: plan outside, forward and greedy choice in a CUDA
graph for decodes, launched one by one for the rest. Times are medians: `ms` of
the device between two events, `plan ms` of the host for one plan, `wall ms` of
plan and launch together, one step after another, the host ahead of the device.

Floors are measured in the same run: a large copy on the device (bytes read plus
bytes written) and a large product. A step must read every weight but the embedding's
other rows, and every key and value of its sequences, and must compute its products and
the causal half of attention: its floor is the longer of the two times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from shapes import add_shape_option, config_of, result_file, write_model
from step_bench import Bench, Work, line

from tasuki.bench.header import header, write_result
from tasuki.execution.recorder import CudaRecorder
from tasuki.models.loader import load_model

PARTS = ("decode", "prefill", "mixed", "kernels")

WORKS: dict[str, tuple[Work, ...]] = {
    "decode": (
        Work("decode, batch 96, context 770", (770,) * 96),
        Work("decode, batch 1, context 770", (770,)),
        Work("decode, batch 32, context 5,100", (5100,) * 32),
    ),
    "prefill": (
        Work("prefill, 8 x 1,024", chunks=((0, 1024),) * 8),
        Work("prefill, 1 x 5,008", chunks=((0, 5008),)),
        Work("prefill, 2,048 after 3,072", chunks=((3072, 2048),)),
    ),
    "mixed": (
        Work("mixed, 96 decodes at 770 and a chunk of 512", (770,) * 96, ((0, 512),)),
        Work("mixed, 16 decodes at 5,100 and a chunk of 2,048", (5100,) * 16, ((2048, 2048),)),
    ),
}
TINY_WORKS: dict[str, tuple[Work, ...]] = {
    "decode": (Work("decode, tiny", (40, 7)),),
    "prefill": (Work("prefill, tiny", chunks=((0, 50), (0, 20))),),
    "mixed": (Work("mixed, tiny", (40, 7), ((16, 20),)),),
}


def floors(bench: Bench, size: int) -> dict[str, float]:
    """Bytes a second of a copy, and FLOP a second of a product of random numbers."""
    source = bench.memory[: bench.memory.numel() // 2]
    target = torch.empty_like(source)
    copy_ms = bench.device_ms(lambda: target.copy_(source))
    a, b = torch.randn(2, size, size, device=bench.device, dtype=bench.dtype)
    product_ms = bench.device_ms(lambda: a @ b)
    return {
        "copy_gb_s": 2 * source.numel() * source.itemsize / copy_ms / 1e6,
        "product_tflops": 2 * size**3 / product_ms / 1e9,
    }


def elementwise(bench: Bench, rows: int) -> None:
    """Our small kernels against FlashInfer's, and the ways to float32 logits, in graphs."""
    import flashinfer

    from tasuki.models import kernels
    from tasuki.models.layers import make_head

    spec, device = bench.model.spec, bench.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=bench.dtype)

    hidden, x = normal(rows, spec.hidden_size), normal(rows, spec.hidden_size)
    weight = normal(spec.hidden_size)
    gate_up = normal(rows, 2 * spec.intermediate_size)
    head, some = normal(spec.vocab_size, spec.hidden_size), normal(min(rows, 96), spec.hidden_size)
    unrounded = make_head(head)
    works: dict[str, Callable[[], object]] = {
        "add + norm, ours": lambda: kernels.add_norm(hidden, x, weight, 1e-6),
        "add + norm, FlashInfer": lambda: flashinfer.norm.fused_add_rmsnorm(x, hidden, weight),
        "gated, ours": lambda: kernels.gated(gate_up),
        "gated, FlashInfer": lambda: flashinfer.activation.silu_and_mul(gate_up),
        "head, float32 product": lambda: unrounded(some),
        "head, bfloat16 and converted": lambda: torch.nn.functional.linear(some, head).float(),
    }
    for name, work in works.items():

        def repeated(work: Callable[[], object] = work) -> Any:
            for _ in range(20):
                work()
            return torch.empty(0), torch.empty(0)

        with torch.inference_mode():
            ms = bench.device_ms(CudaRecorder().record(repeated)[0]) / 20
        bench.kernels.append({"kernel": name, "rows": rows, "us": 1e3 * ms})
        print(f"{name}, {rows} rows: {1e3 * ms:.1f} us", file=sys.stderr, flush=True)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that was asked for; a part that fails is noted, and the next one begins."""
    device = torch.device(args.device)
    works = TINY_WORKS if args.tiny else WORKS
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(folder, dtype=dtype, device=device, weights="dummy")
    bench = Bench(model, device, args.pool_tokens)
    result: dict[str, Any] = {"floors": floors(bench, 256 if args.tiny else 8192)}
    print(result["floors"], file=sys.stderr, flush=True)
    sizes = args.block_sizes
    parts: dict[str, Callable[[], None]] = {
        "decode": lambda: _decode(bench, works["decode"], sizes),
        "prefill": lambda: _prefill(bench, works["prefill"], sizes),
        "mixed": lambda: _mixed(bench, works["mixed"], sizes[0]),
        "kernels": lambda: _kernels(bench),
    }
    result["failed"] = {}
    for name in args.only:
        try:
            parts[name]()
        except Exception:
            result["failed"][name] = traceback.format_exc()
            print(result["failed"][name], file=sys.stderr, flush=True)
    result["floor_ms"] = {
        work.name: bench.floor_ms(work, **result["floors"])
        for part in works
        if part in args.only
        for work in works[part]
    }
    result["steps"], result["kernels"] = bench.rows, bench.kernels
    result["traces"] = {name: each.to_json() for name, each in bench.traces.items()}
    return result


def _decode(bench: Bench, works: Iterable[Work], sizes: list[int]) -> None:
    graph = bench.on_cuda
    for work in works:
        for size in sizes:
            run = bench.step(work, "graph", size, graph=graph)
            if size == sizes[0]:
                bench.profile(work.name, run)
        bench.step(work, "no graph", sizes[0])


def _prefill(bench: Bench, works: Iterable[Work], sizes: list[int]) -> None:
    for work in works:
        bench.profile(work.name, bench.step(work, "default", sizes[0]))
        for size in sizes:
            bench.step(work, "paged fa3", size, ragged=False, prefill="fa3")
        bench.step(work, "fa2", sizes[0], prefill="fa2")


def _mixed(bench: Bench, works: Iterable[Work], size: int) -> None:
    for work in works:
        bench.profile(work.name, bench.step(work, "two calls", size))
        bench.step(work, "one call", size, joint=True)
        bench.step(work, "one call, fa2", size, joint=True, prefill="fa2")


def _kernels(bench: Bench) -> None:
    if bench.on_cuda:
        for rows in (1, 96, 8192):
            elementwise(bench, rows)


def report(result: dict[str, Any]) -> str:
    """The tables, floors first; short, for a log's end."""
    lines = [
        f"copy {result['floors']['copy_gb_s']:.0f} GB/s,"
        f" product {result['floors']['product_tflops']:.0f} TFLOP/s"
    ]
    lines += [f"floor {ms:.2f} ms: {name}" for name, ms in result["floor_ms"].items()]
    lines += [line(row) for row in result["steps"]]
    lines += [f"{k['kernel']}, {k['rows']} rows: {k['us']:.1f} us" for k in result["kernels"]]
    for name, found in result["traces"].items():
        lines.append(f"{name}: busy {found['busy']:.1%} of {found['ms']:.3f} ms")
        lines += [
            f"    {k['ms']:7.3f} ms {k['calls']:6.1f} x {k['name']}" for k in found["kernels"][:9]
        ]
    lines += [f"FAILED: {name}" for name in result["failed"]]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the result file, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_shape_option(parser)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, of " + ", ".join(PARTS))
    parser.add_argument("--block-sizes", default="16,32,64")
    parser.add_argument("--pool-tokens", type=int, default=196_608)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results")
    args = parser.parse_args()
    args.only = args.only.split(",")
    args.block_sizes = [int(size) for size in args.block_sizes.split(",")]
    if args.tiny:
        args.pool_tokens = 1024
    described = header("gpu_steps", label="steps", topology=None, model=f"{args.shape} shape")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), config_of(args.shape, args.tiny))
        result = described | measure(args, model)
    write_result(args.output or result_file("gpu_steps", args.shape), result)
    print(report(result))


if __name__ == "__main__":
    main()
