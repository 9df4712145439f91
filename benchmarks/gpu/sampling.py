"""What sampling costs a step beside the model: GPU, host and memory, by kind of request.

    python benchmarks/gpu/sampling.py                          about half a minute
    python benchmarks/gpu/sampling.py --tune                   the kernel's other divisions too
    python benchmarks/gpu/sampling.py --device cpu --tiny      the same code on any machine

Rows of random logits, rounded to bfloat16 as a model makes them, are sampled by `Sampler`,
step after step, each sequence growing by a token. *flat*: normal with a deviation of 3, as
random weights give, so that a nucleus holds tens of thousands of tokens. *peaked*: falling
with the logarithm of a token's rank, as text gives. `gpu` is the time in which a kernel or a
copy ran, by the profiler's trace; `host` the time that a call takes the calling thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kernel_times import trace

from tasuki.bench.header import header, own_command, write_result
from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.plan import Draw
from tasuki.engine.request import Request
from tasuki.execution import draw_kernel
from tasuki.execution.sampler import Sampler, greedy, sampler_bytes

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_sampling.json"
NUCLEUS = {"temperature": 0.7, "top_p": 0.9}
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-p": NUCLEUS,
    "top-k, top-p": {**NUCLEUS, "top_k": 50},
    "min-p": {"temperature": 0.7, "min_p": 0.05},
    "top-p, penalties": {**NUCLEUS, **PENALTIES},
    "top-p, penalties, bias": {**NUCLEUS, **PENALTIES, "logit_bias": 300},
    "top-p, logprobs": {**NUCLEUS, "logprobs": 5},
}
TUNED = [
    {"_WAYS": ways, "_PASSES": passes, "_STAGES": stages, "_WIDTH": width, "_LANES": lanes}
    for ways, passes, stages, width, lanes in (
        (4, 2, 4, 4096, 2048),
        (2, 3, 4, 4096, 2048),
        (4, 3, 4, 4096, 2048),
        (8, 2, 4, 4096, 2048),
        (4, 2, 1, 4096, 2048),
        (4, 2, 2, 4096, 2048),
        (4, 2, 6, 4096, 2048),
        (4, 2, 4, 2048, 2048),
        (4, 2, 6, 2048, 2048),
        (4, 2, 4, 2048, 1024),
        (4, 2, 4, 4096, 4096),
        (2, 4, 4, 4096, 2048),
        (2, 4, 2, 8192, 2048),
    )
]


def logits_of(shape: str, rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    """[rows, vocab] float32 of one of the two kinds that the module's docstring names."""
    generator = torch.Generator().manual_seed(0)
    if shape == "flat":
        logits = torch.randn(rows, vocab, generator=generator) * 3
    else:
        ranks = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(rows)])
        logits = 20 - 1.5 * (ranks + 1).log()
    return logits.bfloat16().float().to(device)


def draws_of(kind: str, rows: int, vocab: int, prompt: int, output: int) -> list[Draw]:
    """One draw for each of `rows` sequences."""
    params = dict(KINDS[kind])
    if "logit_bias" in params:
        params["logit_bias"] = {7 * i % vocab: 0.1 for i in range(params["logit_bias"])}
    tokens = torch.randint(vocab, (rows, prompt + output)).tolist()
    draws = []
    for index, own in enumerate(tokens):
        sampling = SamplingParams(seed=index, max_tokens=1 << 20, **params)
        spec = RequestSpec(f"r{index}", Leg.COLOCATED, own[:prompt], sampling, own[prompt:])
        draws.append(Draw.next(Request(spec, index, b"", 0.0).sequences[0], 0))
    return draws


def measure(kind: str, logits: torch.Tensor, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    rows, vocab = logits.shape
    sampler, best = Sampler(logits.device), greedy(logits)
    draws = draws_of(kind, rows, vocab, 512, 258)
    sampled = torch.zeros(rows, dtype=torch.int64, device=logits.device)

    def step() -> None:
        for index, each in enumerate(draws):
            each.sequence.drawn = index
            each.position += 1
        tokens = sampler.sample(logits, range(rows), draws, best=best, sampled=sampled).tokens
        sampled.copy_(tokens)
        for each in draws:
            each.sequence.tokens.append(1)

    row: dict[str, Any] = {"kind": kind, "rows": rows}
    cuda = logits.is_cuda
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for each in draws:
        each.position -= 1
    for _ in range(3):
        step()
    if cuda:
        torch.cuda.synchronize()
        row["memory_mb"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        row["memory_bound_mb"] = sampler_bytes(rows, vocab) / 1e6
    host_s = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        step()
        host_s.append(time.perf_counter() - begin_s)
        if cuda:
            torch.cuda.synchronize()
    row["host_us"] = 1e6 * statistics.median(host_s)
    if cuda:
        traced = trace(step, 10)
        row["gpu_us"] = 1e3 * sum(kernel.ms for kernel in traced.kernels)
        row["kernels"] = {kernel.name: round(1e3 * kernel.ms, 2) for kernel in traced.kernels}
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    name = f"{row['logits']:7} {row['rows']:4} rows  {row['kind']:24}"
    gpu = f" gpu {row['gpu_us']:8.1f} us," if "gpu_us" in row else ""
    memory = ""
    if "memory_mb" in row:
        memory = f", {row['memory_mb']:7.1f} of at most {row['memory_bound_mb']:.1f} MB"
    tuned = f"  {row['tuned']}" if "tuned" in row else ""
    return f"{name}{gpu} host {row['host_us']:7.1f} us{memory}{tuned}"


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 96, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="try the kernel's other divisions")
    parser.add_argument("--tiny", action="store_true", help="a small vocabulary, few rows")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.tiny:
        args.vocab_size, args.rows = 500, [1, 4]
    device = torch.device(args.device)
    rows = []

    def add(**more: Any) -> None:
        rows.append(more)
        print(line(more), file=sys.stderr, flush=True)

    with torch.inference_mode():
        for shape in ("flat", "peaked"):
            for count in args.rows:
                logits = logits_of(shape, count, args.vocab_size, device)
                for kind in KINDS:
                    add(logits=shape, **measure(kind, logits, args.repeats))
        for constants in TUNED if args.tune else ():
            for name, value in constants.items():
                setattr(draw_kernel, name, value)
            for shape in ("flat", "peaked"):
                logits = logits_of(shape, 96, args.vocab_size, device)
                try:
                    found = measure("top-p", logits, 5)
                except Exception as error:  # a division that the device has no room for
                    print(f"{constants}: {error!r}", file=sys.stderr)
                    continue
                add(logits=shape, **found, tuned=" ".join(map(str, constants.values())))
    described = header(
        "gpu_sampling", command=own_command(), label="sampling", topology=None, model="random"
    )
    write_result(args.output, described | {"vocab_size": args.vocab_size, "steps": rows})


if __name__ == "__main__":
    main()
