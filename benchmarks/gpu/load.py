"""Where a mixed worker's time goes: one engine in process under the peer's two workloads.

    python benchmarks/gpu/load.py                        a minute and a half
    python benchmarks/gpu/load.py --itl-target-ms 9 20   steps that decode last so long
    python benchmarks/gpu/load.py --device cpu --tiny    the same code on any machine

No HTTP, no gRPC, no router: the engine alone, in the worker's rhythm, over random
weights in the shape of Qwen3-4B, or another `--shape`. One worker's half of each workload,
closed loop: w1 is 50 at a time of 5..1019 tokens in and out, w2 24 at a time of 5,000 in
and 250 out.
Rates are of the steady middle: from a tenth of the answers' ends to the last one. Some
steps more are traced under the same load.

Steps by kind and prompt tokens: `gpu ms` from the first to the last kernel of a step
(waits for the host in between included), `gap ms` from the end of the step before it,
`launch ms` what the host took to plan and launch it. `busy` is the share of the time in
which a kernel ran, by the profiler's trace of some steps at the end.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from dummy import dummy_model, pool_for
from kernel_times import trace
from shapes import add_shape_option, result_file

from tasuki.attention.select import make_attention
from tasuki.bench.header import header, write_result
from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.plan import StepPlan
from tasuki.execution.runner import Launched, ModelRunner
from tasuki.models.base import CausalModel

BINS = (0, 64, 128, 256, 512, 1024, 2048)
GLANCE_S = 0.5e-3  # as the worker's loop does


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop.

    Attributes:
        requests: To be answered; more are sent, so that as many run to the end.
        at_a_time: Of them.
        inputs, outputs: Tokens, from and up to.
    """

    requests: int
    at_a_time: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]


WORKLOADS = {
    "w1": Workload(220, 50, (5, 1019), (5, 1019)),
    "w2": Workload(100, 24, (5000, 5000), (250, 250)),
}
TINY_WORKLOADS = {
    "w1": Workload(20, 6, (5, 60), (5, 20)),
    "w2": Workload(8, 4, (100, 100), (8, 8)),
}


@dataclass(slots=True)
class Step:
    """One launched step; events or, on a host that computes itself, seconds."""

    decodes: int
    prompt_tokens: int
    launch_s: float
    begin: Any
    end: Any

    @property
    def kind(self) -> str:
        """By what it computes, and prompt tokens up to which power of two."""
        if not self.prompt_tokens:
            return "decode"
        upto = next((edge for edge in BINS if self.prompt_tokens <= edge), self.prompt_tokens)
        return f"{'mixed' if self.decodes else 'prefill'} <= {upto}"


class TimedRunner(ModelRunner):
    """Notes every step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: list[Step] = []

    def launch(self, plan: StepPlan) -> Launched:
        """As the runner, timed."""
        launched_s = time.perf_counter()
        begin = _mark()
        launched = super().launch(plan)
        took_s = time.perf_counter() - launched_s
        decodes = sum(row.tokens for row in plan.rows) - plan.prefill_tokens
        self.steps.append(Step(decodes, plan.prefill_tokens, took_s, begin, _mark()))
        return launched


def _mark() -> Any:
    """This moment in the device's stream."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _between_ms(begin: Any, end: Any) -> float:
    return 1e3 * (end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end))


class Loop:
    """Keeps an engine supplied with requests, and notes when their tokens come."""

    def __init__(self, engine: Engine, workload: Workload, vocab_size: int) -> None:
        self._engine = engine
        self._workload = workload
        self._vocab_size = vocab_size
        self._draw = random.Random(0)
        self._sent_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}
        self._prompts: dict[str, int] = {}
        self.ttft_s: list[float] = []
        self.second_s: list[float] = []
        self.itl_s: list[float] = []
        self.tokens: list[tuple[float, int]] = []  # when, how many: outputs, or an answer's prompt
        self.outputs: list[float] = []
        self.ends_s: list[float] = []

    @property
    def running(self) -> bool:
        """Whether answers are missing."""
        return len(self.ends_s) < self._workload.requests

    def fill(self) -> None:
        """Send what may be sent."""
        workload = self._workload
        while len(self._sent_s) - len(self.ends_s) < workload.at_a_time:
            name = f"r{len(self._sent_s)}"
            length = self._draw.randint(*workload.inputs)
            prompt = [self._draw.randrange(self._vocab_size) for _ in range(length)]
            sampling = SamplingParams(
                seed=0, temperature=0.0, max_tokens=self._draw.randint(*workload.outputs)
            )
            self._prompts[name] = length
            self._sent_s[name] = time.perf_counter()
            self._engine.submit(RequestSpec(name, Leg.COLOCATED, prompt, sampling))

    def turn(self) -> None:
        """One step of the engine, when it is due."""
        while (due_s := self._engine.due_in_s()) > 0.0:
            time.sleep(min(due_s, GLANCE_S))
        result = self._engine.step(wait=False)
        now_s = time.perf_counter()
        for output in result.outputs:
            name = output.request_id
            if name not in self._last_s:
                self.ttft_s.append(now_s - self._sent_s[name])
                self.tokens.append((now_s, self._prompts[name]))
            else:
                self.itl_s.append(now_s - self._last_s[name])
                if output.position == 1:
                    self.second_s.append(now_s - self._last_s[name])
            self._last_s[name] = now_s
            self.outputs.append(now_s)
        self.ends_s += [now_s] * len(result.ended)
        self.fill()

    def figures(self) -> dict[str, float]:
        """Rates of the steady middle, times of all."""
        begin_s, end_s = self.ends_s[self._workload.requests // 10], self.ends_s[-1]
        outputs = sum(begin_s < at <= end_s for at in self.outputs)
        prompts = sum(tokens for at, tokens in self.tokens if begin_s < at <= end_s)
        return {
            "output_tok_s": outputs / (end_s - begin_s),
            "total_tok_s": (outputs + prompts) / (end_s - begin_s),
            "ttft_mean_ms": 1e3 * statistics.mean(self.ttft_s),
            "ttft_p99_ms": 1e3 * _percentile(self.ttft_s, 0.99),
            "second_p99_ms": 1e3 * _percentile(self.second_s, 0.99),
            "itl_mean_ms": 1e3 * statistics.mean(self.itl_s),
            "itl_p50_ms": 1e3 * _percentile(self.itl_s, 0.5),
            "itl_p99_ms": 1e3 * _percentile(self.itl_s, 0.99),
        }


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def by_kind(steps: list[Step]) -> dict[str, dict[str, float]]:
    """Of each kind: how many, and where their time went."""
    groups: dict[str, list[tuple[Step, float, float]]] = defaultdict(list)
    for before, step in itertools.pairwise(steps):
        gap_ms = _between_ms(before.end, step.begin)
        groups[step.kind].append((step, _between_ms(step.begin, step.end), gap_ms))
    table = {}
    for kind, rows in sorted(groups.items()):
        spans, gaps = [span for _, span, _ in rows], [gap for _, _, gap in rows]
        launches = [1e3 * step.launch_s for step, _, _ in rows]
        table[kind] = {
            "steps": float(len(rows)),
            "decodes": statistics.mean(step.decodes for step, _, _ in rows),
            "prompt_tokens": statistics.mean(step.prompt_tokens for step, _, _ in rows),
            "gpu_ms": statistics.mean(spans),
            "gpu_p99_ms": _percentile(spans, 0.99),
            "gap_ms": statistics.mean(gaps),
            "gap_p99_ms": _percentile(gaps, 0.99),
            "launch_ms": statistics.mean(launches),
            "launch_p99_ms": _percentile(launches, 0.99),
            "total_s": (sum(spans) + sum(gaps)) / 1e3,
        }
    return table


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with memory for its cache."""

    model: CausalModel
    pool: torch.Tensor
    rows: int
    mixed_graphs: bool
    budget: int

    def measure(
        self, name: str, workload: Workload, itl_target_ms: float, traced: int
    ) -> dict[str, Any]:
        """One workload; steps that decode take `itl_target_ms` with prompts in them."""
        spec = self.model.spec
        config = EngineConfig(
            num_blocks=self.pool.shape[0],
            max_model_len=workload.inputs[1] + workload.outputs[1] + 1,
            vocab_size=spec.vocab_size,
            block_size=self.pool.shape[4],
            max_batched_tokens=self.budget,
            itl_target_s=itl_target_ms / 1e3 or None,
            max_running_requests=self.rows,
            prefix_caching=False,
            overlap=self.pool.is_cuda,
        )
        attention, _ = make_attention(self.pool, spec.num_heads, self.pool.dtype)
        runner = TimedRunner(self.model, attention, self.pool)
        if self.pool.is_cuda:
            runner.capture(self.rows, config.max_model_len, self.budget if self.mixed_graphs else 0)
        loop = Loop(Engine(config, runner), workload, spec.vocab_size)
        row: dict[str, Any] = {
            "workload": name,
            "itl_target_ms": itl_target_ms,
            **asdict(workload),
        }
        loop.fill()
        while loop.running:
            loop.turn()
        if self.pool.is_cuda:
            torch.cuda.synchronize()
        row |= {"figures": loop.figures(), "kinds": by_kind(runner.steps)}
        if traced:
            row["trace"] = trace(loop.turn, traced, top=16).to_json()
            torch.cuda.synchronize()
        show(row)
        return row


def show(row: dict[str, Any]) -> None:
    """Print one measurement."""
    busy = f", busy {row['trace']['busy']:.1%}" if "trace" in row else ""
    print(f"\n{row['workload']}, {row['itl_target_ms']:g} ms for steps that decode{busy}")
    print("  " + ", ".join(f"{key} {value:,.1f}" for key, value in row["figures"].items()))
    columns = list(next(iter(row["kinds"].values())))
    print("  " + "kind".ljust(18) + "".join(f"{column:>14}" for column in columns))
    for kind, values in row["kinds"].items():
        cells = "".join(f"{values[column]:>14.2f}" for column in columns)
        print("  " + kind.ljust(18) + cells)
    sys.stdout.flush()


def main() -> None:
    """Measure, print, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_shape_option(parser)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w2"])
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a step")
    parser.add_argument(
        "--itl-target-ms", type=float, nargs="+", default=[9.0], help="0: no bound but --budget"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--pool-tokens", type=int, default=262_144)
    parser.add_argument("--rows", type=int, default=256, help="requests that may decode at once")
    parser.add_argument("--eager", action="store_true", help="no graphs but for decode steps")
    parser.add_argument("--traced", type=int, default=150, help="steps; 0: no trace")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load")
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results")
    args = parser.parse_args()
    device = torch.device(args.device)
    model = dummy_model(device, args.tiny, args.shape)
    tokens = 8192 if args.tiny else args.pool_tokens
    pool = pool_for(model, device, tokens, args.block_size)
    bench = Bench(model, pool, args.rows, not args.eager, args.budget)
    workloads = TINY_WORKLOADS if args.tiny else WORKLOADS
    traced = args.traced if device.type == "cuda" else 0
    rows = [
        bench.measure(name, workloads[name], target_ms, traced)
        for name in args.workloads
        for target_ms in args.itl_target_ms
    ]
    described = header("gpu_load", label="load", topology=None, model=f"{args.shape} shape")
    write_result(args.output or result_file("gpu_load", args.shape), described | {"runs": rows})


if __name__ == "__main__":
    main()
