"""A model through transformers and torch.compile, beside the same model on the fast path.

    python benchmarks/gpu/fallback.py               two minutes
    python benchmarks/gpu/fallback.py --device cpu --tiny   the same code on any machine

Qwen3-4B's shape with random weights, bfloat16. Decode steps run in CUDA graphs,
prefill does not, as in the engine; both models on the same cache, timed as
steps.py does. The fallback is compiled as a worker compiles it. It must stay within
LIMIT of the fast path, and must not have been compiled for a batch size or a layer:
torch may have made two graphs (many tokens, one token). Otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shapes import QWEN3_4B, TINY, write_model
from step_bench import Bench, Work
from torch._dynamo.utils import counters

from tasuki.bench.header import header, write_result
from tasuki.models.fallback import load_fallback
from tasuki.models.fallback_compile import compile_layers
from tasuki.models.loader import load_model

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_fallback.json"
LIMIT = 1.35
GRAPHS = 2
FAST, COMPILED = "fast path", "compiled fallback"
WORKS = (
    *(Work(f"decode, batch {n}, context 770", (770,) * n) for n in (1, 32, 96)),
    Work("prefill, 8 x 1,024", chunks=((0, 1024),) * 8),
)
TINY_WORKS = (
    *(Work(f"decode, batch {n}, tiny", (40,) * n) for n in (1, 2, 5)),
    Work("prefill, tiny", chunks=((0, 50), (0, 20))),
)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both models, all steps: times, ratios, what was compiled."""
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    works = TINY_WORKS if args.tiny else WORKS
    fast = load_model(folder, dtype=dtype, device=device, weights="dummy")
    bench = Bench(fast, device, args.pool_tokens)
    _steps(bench, FAST, works, args.block_size)
    spec = fast.spec
    del fast
    model = load_fallback(folder, spec, dtype, device, trust_remote_code=False, dummy=True)
    bench.model = model
    gc.collect()
    torch.compiler.reset()
    counters.clear()
    begin_s = time.perf_counter()
    if not compile_layers(model):
        sys.exit("the fallback was not compiled")
    compile_s = time.perf_counter() - begin_s
    _steps(bench, COMPILED, works, args.block_size)
    times = [
        {row["step"]: row["ms"] for row in bench.rows if row["variant"] == name}
        for name in (COMPILED, FAST)
    ]
    return {
        "steps": bench.rows,
        "compile_s": compile_s,
        "graphs": counters["stats"]["unique_graphs"],
        "ratios": {step: ms / times[1][step] for step, ms in times[0].items()},
        "limit": LIMIT,
        "traces": {name: each.to_json() for name, each in bench.traces.items()},
    }


def _steps(bench: Bench, name: str, works: tuple[Work, ...], block_size: int) -> None:
    for work in works:
        run = bench.step(work, name, block_size, graph=bench.on_cuda and not work.chunks)
        bench.profile(f"{work.name}, {name}", run)


def report(result: dict[str, Any]) -> str:
    """The ratios, and the kernels of the steps; short, for a log's end."""
    lines = []
    for name, found in result["traces"].items():
        lines.append(f"{name}: busy {found['busy']:.1%} of {found['ms']:.3f} ms")
        lines += [
            f"    {k['ms']:7.3f} ms {k['calls']:6.1f} x {k['name']}" for k in found["kernels"][:12]
        ]
    lines += [f"{row['variant']}: {row['step']}: {row['ms']:.3f} ms" for row in result["steps"]]
    lines.append(f"{result['graphs']} graphs compiled in {result['compile_s']:.1f} s")
    lines += [
        f"{step}: {ratio:.2f}x of {LIMIT}x the fast path's time"
        for step, ratio in result["ratios"].items()
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, write the result file, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=98_304)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.tiny:
        args.pool_tokens = 1024
    described = header(
        "gpu_fallback",
        label="fallback",
        topology=None,
        model="Qwen3-4B shape",
    )
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), TINY if args.tiny else QWEN3_4B)
        result = described | measure(args, model)
    write_result(args.output, result)
    print(report(result))
    if result["graphs"] > GRAPHS:
        sys.exit(f"{result['graphs']} graphs were compiled, more than {GRAPHS}")
    if not args.tiny and max(result["ratios"].values()) > LIMIT:
        sys.exit(f"the fallback takes more than {LIMIT} times what the fast path does")


if __name__ == "__main__":
    main()
