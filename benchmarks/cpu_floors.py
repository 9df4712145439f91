"""What two cores allow at most for the model of engine_vs_peers.py, and where its aim lies.

    python benchmarks/cpu_floors.py

Measured here: reading memory (a sum over more than any cache holds) and products
in bfloat16 and float32 (512 rows, a weight that torch has packed), each by all
threads, the best of several. From these the least time of engine_vs_peers.py's
two scenarios: every output token but the first reads all weights once; the
prompts' products run at the measured rate; all else costs nothing. Its peers and
its aim, 1.5 times the better one, come from results/engine_vs_peers.json.
Writes benchmarks/results/cpu_floors.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_process import EIGHT, SINGLE, Scenario
from memory_stream import read_bytes_per_s, weights

from tasuki.bench.header import header, write_result
from tasuki.models.fetch import resolve_model
from tasuki.models.layers import make_linear
from tasuki.models.spec import ModelSpec
from tasuki.models.spec_reader import read_spec

RESULTS = Path(__file__).resolve().parent / "results"
AIM = 1.5


def best_s(run: Callable[[], object], repeats: int = 15) -> float:
    """Seconds of the quickest of several runs."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def flops_per_s(dtype: torch.dtype) -> float:
    """Of products with 512 rows, two operations for each weight and row."""
    rows, inner, outer = 512, 2048, 4096
    product = make_linear(torch.full((outer, inner), 0.01, dtype=dtype))
    x = torch.full((rows, inner), 0.01, dtype=dtype)
    return 2 * rows * inner * outer / best_s(lambda: product(x))


def ceiling(scenario: Scenario, spec: ModelSpec, read: float, flops: float, size: int) -> float:
    """Output tokens per second if nothing but the products took time; of one alone, decode only."""
    layers, head = weights(spec)
    step_s = (layers + head) * size / read
    if scenario.requests == 1:
        return 1 / step_s
    prefill_s = 2 * layers * scenario.requests * scenario.prompt_tokens / flops
    total_s = prefill_s + (scenario.output_tokens - 1) * step_s
    return scenario.requests * scenario.output_tokens / total_s


def main() -> None:
    """Measure, print, write."""
    spec = read_spec(Path(resolve_model("smollm2-135m")))
    with torch.inference_mode():
        read = read_bytes_per_s()
        flops = {
            name: flops_per_s(dtype)
            for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
        }
    result: dict[str, Any] = header(
        "cpu_floors", label="floors", topology=None, model="smollm2-135m"
    ) | {
        "threads": torch.get_num_threads(),
        "read_bytes_per_s": read,
        "flops_per_s": flops,
        "output_tokens_per_s_at_most": {
            dtype: {
                scenario.name: ceiling(scenario, spec, read, flops[dtype], size)
                for scenario in (SINGLE, EIGHT)
            }
            for dtype, size in (("bfloat16", 2), ("float32", 4))
        },
    }
    ratios = json.loads((RESULTS / "engine_vs_peers.json").read_text())["ratios"]
    for name, ratio in ratios.items():
        best = max(peer["best"] for peer in ratio["against"].values())
        if name not in result["output_tokens_per_s_at_most"]["float32"]:
            continue
        most = max(limits[name] for limits in result["output_tokens_per_s_at_most"].values())
        result[name] = {
            "better_peer": best,
            "aim": AIM * best,
            "at_most": most,
            "aim_of_at_most": AIM * best / most,
        }
    print(json.dumps(result, indent=1))
    write_result(RESULTS / "cpu_floors.json", result)


if __name__ == "__main__":
    main()
