"""How busy the engine keeps the GPU in steady decode, and what its steps cost the host.

    python benchmarks/gpu/busy.py                        about two minutes
    python benchmarks/gpu/busy.py --device cpu --tiny    the same code on any machine

The engine itself runs: it schedules, prepares, samples and books, over random
weights in the shape of Qwen3-4B. Its requests are DECODE legs that start on
blocks nobody has filled, as if a handoff had: attention takes as long over
whatever is there. `ms` is one step from end to end, many in a row; `host ms`
the part of it in which the engine's thread did not wait for the GPU; `busy` the
share of the time in which a kernel or a copy ran, by the profiler's trace.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from dummy import dummy_model, pool_for
from kernel_times import trace

from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.engine.api import FirstToken, Leg, LegTimings, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.plan import StepOutcome
from tasuki.execution.runner import Launched, ModelRunner
from tasuki.models.base import CausalModel

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT = REPOSITORY / "benchmarks" / "results" / "gpu_busy.json"
WARM_STEPS = 8
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {
        "temperature": 0.7,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": dict.fromkeys(range(300), 0.1),
    },
}


@dataclass(frozen=True, slots=True)
class Variant:
    """How the engine is set up, and what it decodes."""

    batch: int
    context: int
    sampling: str = "greedy"
    overlap: bool = True
    graphs: bool = True

    def __str__(self) -> str:
        """For the table."""
        ways = f"{'overlapped' if self.overlap else 'in turn'}, "
        ways += "graphs" if self.graphs else "eager"
        return f"batch {self.batch}, context {self.context}, {self.sampling}; {ways}"


VARIANTS = (
    Variant(96, 770),
    Variant(96, 770, overlap=False),
    Variant(96, 770, graphs=False),
    Variant(96, 770, "top-p"),
    Variant(96, 770, "penalties"),
    Variant(1, 770),
    Variant(1, 770, "top-p"),
    Variant(1, 770, overlap=False),
    Variant(32, 5100),
    Variant(256, 770),
)
TINY_VARIANTS = (Variant(4, 40, graphs=False), Variant(4, 40, "top-p", False, False))


class TimedRunner(ModelRunner):
    """Counts the seconds in which `collect` waited."""

    waited_s = 0.0

    def collect(self, launched: Launched) -> StepOutcome:
        """As the runner, timed."""
        begin_s = time.perf_counter()
        if launched.event is not None:
            launched.event.synchronize()
        self.waited_s += time.perf_counter() - begin_s
        return super().collect(launched)


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with memory for its cache."""

    model: CausalModel
    pool: torch.Tensor

    def engine(self, variant: Variant, steps: int) -> tuple[Engine, TimedRunner]:
        """An engine that decodes nothing but the variant's sequences."""
        spec = self.model.spec
        config = EngineConfig(
            num_blocks=self.pool.shape[0],
            max_model_len=variant.context + steps + 1,
            vocab_size=spec.vocab_size,
            block_size=self.pool.shape[4],
            max_running_requests=variant.batch,
            prefix_caching=False,
            overlap=variant.overlap,
        )
        dtype = self.pool.dtype
        runner = TimedRunner(
            self.model, make_attention(self.pool, spec.num_heads, dtype)[0], self.pool
        )
        if variant.graphs:
            runner.capture(variant.batch, config.max_model_len)
        engine = Engine(config, runner)
        draw = random.Random(0)
        for index in range(variant.batch):
            name = f"r{index}"
            prompt = [draw.randrange(spec.vocab_size) for _ in range(variant.context)]
            sampling = SamplingParams(seed=index, max_tokens=steps, **SAMPLINGS[variant.sampling])
            engine.submit(RequestSpec(name, Leg.DECODE, prompt, sampling))
            if engine.assign(name) is None:
                raise SystemExit(f"the pool is too small for {variant}")
            engine.start_decode(name, [FirstToken(0, 1, False)], LegTimings())
        return engine, runner

    def measure(self, variant: Variant, repeats: int, traced: int) -> dict[str, Any]:
        """Times of one step, and what a trace of some steps says."""
        engine, runner = self.engine(variant, 2 * repeats + 2 * traced + WARM_STEPS + 8)
        for _ in range(WARM_STEPS):
            engine.step()
        row: dict[str, Any] = {"name": str(variant), **asdict(variant)}
        runner.waited_s, tokens = 0.0, engine.counters().output_tokens
        begin_s = time.perf_counter()
        for _ in range(repeats):
            engine.step()
        took_s = time.perf_counter() - begin_s
        assert engine.counters().output_tokens - tokens == repeats * variant.batch
        row["ms"] = 1e3 * took_s / repeats
        row["host_ms"] = 1e3 * (took_s - runner.waited_s) / repeats
        if self.pool.is_cuda:
            row["trace"] = trace(engine.step, traced).to_json()
        for index in range(variant.batch):
            engine.abort(f"r{index}")
        while engine.has_work():
            engine.step()
        print(line(row), file=sys.stderr, flush=True)
        return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    busy = f", busy {row['trace']['busy']:.1%}" if "trace" in row else ""
    return f"{row['name']:60} {row['ms']:7.3f} ms, host {row['host_ms']:.3f}{busy}"


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--pool-tokens", type=int, default=327_680)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--traced", type=int, default=20)
    parser.add_argument("--only", default="", help="variants whose name holds this")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    device = torch.device(args.device)
    model = dummy_model(device, args.tiny)
    tokens = 4096 if args.tiny else args.pool_tokens
    pool = pool_for(model, device, tokens, args.block_size)
    bench = Bench(model, pool)
    variants = TINY_VARIANTS if args.tiny else VARIANTS
    variants = tuple(v for v in variants if args.only in str(v))
    rows = [bench.measure(variant, args.repeats, args.traced) for variant in variants]
    described = header("gpu_busy", label="busy", topology=None, model="Qwen3-4B shape")
    write_result(args.output, described | {"steps": rows})
    print("\n".join(line(row) for row in rows))


if __name__ == "__main__":
    main()
