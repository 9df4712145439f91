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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fp8_gemms import check_kernels, measure_gemms, shapes_of
from fp8_results import Results, report
from fp8_steps import BLOCK_SIZE, Models, check_steps, measure_steps
from shapes import config_of
from step_bench import Bench

from tasuki.bench.header import header, write_result

PARTS = ("eager", "steps", "gemms", "checks")


def run_part(part: str, args: argparse.Namespace, results: Results) -> None:
    """One of PARTS, in this process."""
    device = torch.device(args.device)
    config = config_of("qwen3-4b", False)
    if args.tiny:
        config |= {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2}
        config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
        config |= {"eos_token_id": 0}
    if part == "checks":
        with torch.inference_mode():
            check_kernels(results, shapes_of(config), device)
        return
    models = Models.load(config, device)
    if part == "eager":
        check_steps(results, models.variants())
    elif part == "steps":
        measure_steps(results, models.variants())
    elif device.type == "cuda":
        measure_gemms(results, models.dense, models.fp8, Bench(models.fp8, device, BLOCK_SIZE))


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
