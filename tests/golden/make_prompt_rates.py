"""Writes prompt_rates.json, the golden values of what steps teach about the speed of prompts.

The worker (`StepRates.record` of `tasuki.engine.stats`) and the simulator's copy of its rule
(`PromptRates::learn` of `crates/sim/src/worker/chunks.rs`) are both tested against the file, so
that neither changes alone. Run it by hand when the rule changes, and change the other copy with
it:

    PYTHONPATH=python python tests/golden/make_prompt_rates.py

A case has the rate at which a worker computes prompts alone, and steps with their times. What
its decodes take is given for each step: a worker fits it (`StepFit`), a simulated one knows it.
All is drawn from a seed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tasuki.engine.stats import StepRates, StepSample

SEED = 1
CASES = 60


class Fit:
    """Stands for what a worker has learnt of its decodes."""

    decode_step_s = 0.0

    def learn(self, decodes: int, kv_tokens: int, prompt_tokens: int, duration_s: float) -> None:
        """It knows already."""

    def decode_s(self, decodes: int, kv_tokens: int) -> float:
        """Of a step that only decodes."""
        return self.decode_step_s


def learnt(case: dict[str, Any]) -> float:
    """Prompt tokens a second after the steps of a case."""
    fit = Fit()
    rates = StepRates(prefill_tokens_per_s=case["alone_per_s"], _fit=fit)  # type: ignore[arg-type]
    for number, step in enumerate(case["steps"]):
        fit.decode_step_s = step["decode_s"]
        decodes, prompt_tokens = step["decodes"], step["prompt_tokens"]
        rates.record(
            StepSample(number, step["duration_s"], decodes, 500 * decodes, prompt_tokens, 0.0)
        )
    return rates.prefill_tokens_per_s


def drawn(draw: random.Random) -> dict[str, Any]:
    """The inputs of one case: some steps take less than their decodes alone, as a fit may say."""

    def between(least: float, most: float) -> float:
        return float(f"{least * (most / least) ** draw.random():.4g}")

    alone_per_s = between(300, 100_000)
    steps = []
    for _ in range(draw.randint(1, 8)):
        decodes = draw.choice((0, 0, 1, 60, 250))
        decode_s = between(0.001, 0.2) if decodes else 0.0
        prompt_tokens = round(between(1, 16_384))
        took_s = between(0.2, 5) * prompt_tokens / alone_per_s + draw.choice((0.5, 1)) * decode_s
        steps.append(
            {
                "decodes": decodes,
                "decode_s": decode_s,
                "prompt_tokens": prompt_tokens,
                "duration_s": float(f"{took_s:.4g}"),
            }
        )
    return {"alone_per_s": alone_per_s, "steps": steps}


def generate() -> str:
    """The content of the file: a case on each line."""
    draw = random.Random(SEED)
    cases = [drawn(draw) for _ in range(CASES)]
    lines = [json.dumps(case | {"learnt_per_s": learnt(case)}) for case in cases]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    (Path(__file__).parent / "prompt_rates.json").write_text(generate(), encoding="utf-8")
