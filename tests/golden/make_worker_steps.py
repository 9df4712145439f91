"""Writes worker_steps.json, the golden steps of a worker: which prompts each one has, and when.

The engine (`tasuki.engine`) and the simulator's worker (`crates/sim/src/worker`) are both tested
against the file, so that neither changes alone. Run it by hand when a rule changes, and change the
other one with it:

    PYTHONPATH=python python tests/golden/make_worker_steps.py

A case has a worker's limits, what its steps take, and requests with their times. The engine is the
real one. Its runner computes nothing, and takes the time that the case says. An idle worker wakes
for the first request that comes, and plans at once (`EngineLoop._take`): one that comes while the
step is launched is part of the next one. All is drawn from a seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.plan import Draw, StepOutcome, StepPlan
from tasuki.engine.request import Stage

SEED = 1
CASES = 40
WARM_UP = "warm"  # the ids of requests before those of a case begin so


@dataclass
class Launched:
    """A step that takes its time when it is collected."""

    plan: StepPlan
    decodes: int
    draws: list[Draw]
    constrained: Sequence[int] = ()


@dataclass
class TimedRunner:
    """Steps that take what the case says, and give token 0."""

    case: dict[str, Any]
    now_s: float = 0.0
    idle: bool = True
    steps: list[dict[str, Any]] = field(default_factory=list)

    def launch(self, plan: StepPlan) -> Launched:
        """The plan is made; the step begins."""
        if self.idle:
            self.now_s += self.case["launch_s"]
        prompts = [row for row in plan.rows if row.sequence.stage is Stage.PREFILL]
        chunks = {row.sequence.request.request_id: row.tokens for row in prompts}
        decodes = len(plan.rows) - len(chunks)
        if chunks:
            self.steps.append({"begins_s": self.now_s, "decodes": decodes, "chunks": chunks})
        ends = [row.sequence for row in plan.rows if row.end >= len(row.sequence.tokens)]
        return Launched(plan, decodes, [Draw.next(sequence, 0) for sequence in ends])

    def landed(self, launched: Launched) -> bool:
        """Collection takes the time."""
        return True

    def collect(self, launched: Launched) -> StepOutcome:
        """The step ends."""
        plan, decodes, took = launched.plan, launched.decodes, self.case["rates"]
        self.now_s += took["step_s"] if decodes else took["prompt_step_s"]
        self.now_s += took["sequence_s"] * decodes + took["kv_token_s"] * plan.kv_tokens
        self.now_s += took["prompt_token_s"] * plan.prefill_tokens
        return StepOutcome(launched.draws, [0] * len(launched.draws))

    def scrub(self, blocks: Sequence[int], first_slot: int = 0) -> None:
        """There is no KV."""


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The engine's steps with prompts, and the times of each request's first and last token."""
    config = EngineConfig(
        num_blocks=case["num_blocks"],
        max_model_len=1_024,
        vocab_size=9,
        block_size=16,
        max_batched_tokens=case["max_batched_tokens"],
        max_running_requests=case["max_running_requests"],
        itl_target_s=case["itl_target_s"],
        prefix_caching=False,
    )
    runner = TimedRunner(case)
    engine = Engine(config, runner, lambda: runner.now_s)
    if case["itl_target_s"] is not None:  # rates are to be learnt
        warm = [{"at_s": 0.4 * n, "prompt": 64 * (1 + n % 4), "output": 60} for n in range(60)]
        serve(engine, runner, warm, WARM_UP)
    begin_s = runner.now_s + 1.0
    runner.steps.clear()
    requests = [request | {"at_s": begin_s + request["at_s"]} for request in case["requests"]]
    told = serve(engine, runner, requests, "")
    return {
        "steps": [
            {
                "begins_s": round(step["begins_s"] - begin_s, 9),
                "decodes": step["decodes"],
                "chunks": [[int(name), tokens] for name, tokens in sorted(step["chunks"].items())],
            }
            for step in runner.steps
        ],
        "tokens_s": [[round(at_s - begin_s, 9) for at_s in told[n]] for n in range(len(told))],
    }


def serve(
    engine: Engine, runner: TimedRunner, requests: list[dict[str, Any]], prefix: str
) -> dict[int, list[float]]:
    """Times of the first and the last token of each request."""
    told: dict[int, list[float]] = {}
    left = list(enumerate(requests))
    while left or engine.has_work():
        runner.idle = not engine.has_work() and left[0][1]["at_s"] > runner.now_s
        if runner.idle:
            runner.now_s = left[0][1]["at_s"]
        while left and left[0][1]["at_s"] <= runner.now_s:
            number, request = left.pop(0)
            sampling = SamplingParams(seed=0, max_tokens=request["output"])
            prompt = [1] * request["prompt"]
            engine.submit(RequestSpec(f"{prefix}{number:02}", Leg.COLOCATED, prompt, sampling))
        for output in engine.step().outputs:
            times = told.setdefault(int(output.request_id.removeprefix(prefix)), [])
            times[1:] = [runner.now_s]
    return told


def drawn(draw: random.Random) -> dict[str, Any]:
    """The inputs of one case: bursts, and requests one by one."""
    at_s, requests = 0.0, []
    longest = draw.choice((60, 400, 700))
    for _ in range(12):
        at_s += draw.choice((1e-4, 1e-4, 0.02, 0.15)) * (1.0 + draw.random())
        request = {"prompt": draw.randint(16, longest), "output": draw.randint(1, 40)}
        requests.append({"at_s": round(at_s, 6)} | request)
    return {
        "num_blocks": draw.choice((160, 10_000)),
        "max_batched_tokens": draw.choice((128, 512, 1_024)),
        "max_running_requests": draw.choice((3, 64)),
        "itl_target_s": draw.choice((None, 0.1)),
        "launch_s": draw.choice((0.0, 5e-4)),
        "rates": {
            "step_s": 0.011,
            "sequence_s": 5e-4,
            "kv_token_s": 4e-7,
            "prompt_step_s": 0.01,
            "prompt_token_s": draw.choice((1e-4, 6e-4)),
        },
        "requests": requests,
    }


def generate() -> str:
    """The content of the file: a case on each line."""
    draw = random.Random(SEED)
    cases = [drawn(draw) for _ in range(CASES)]
    return "[\n" + ",\n".join(json.dumps(case | run(case)) for case in cases) + "\n]\n"


if __name__ == "__main__":
    (Path(__file__).parent / "worker_steps.json").write_text(generate(), encoding="utf-8")
