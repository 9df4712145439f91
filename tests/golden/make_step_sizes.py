"""Writes step_sizes.json, the golden values of how many prompt tokens a step gets.

The worker (`tasuki.engine.step_size`) and the simulator's copy of its rule
(`crates/sim/src/worker/chunks.rs`) are both tested against the file, so that neither changes
alone. Run it by hand when the rule changes, and change the other copy with it:

    PYTHONPATH=python python tests/golden/make_step_sizes.py

A case has the bounds of a worker, the rates that it has measured, and what waits. All bounds and
rates are drawn from a seed, over the ranges that CPUs and GPUs have.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tasuki.engine.config import EngineConfig
from tasuki.engine.stats import StepRates
from tasuki.engine.step_size import step_tokens

SEED = 1
CASES = 200


class Fit:
    """Stands for what a worker has learnt of its steps."""

    def __init__(self, decode_s: float, prompt_token_s: float | None) -> None:
        self._decode_s = decode_s
        self._prompt_token_s = prompt_token_s

    def decode_s(self, decodes: int, kv_tokens: int) -> float:
        """Of a step that only decodes."""
        return self._decode_s

    def prompt_token_s(self) -> float:
        """Of a prompt token beside decodes."""
        assert self._prompt_token_s is not None
        return self._prompt_token_s


class Chunks:
    """Stands for what a worker has learnt of its chunks."""

    def __init__(self, overhead_tokens: float) -> None:
        self._overhead_tokens = overhead_tokens

    def overhead_tokens(self) -> float:
        """Tokens that take as long as a chunk's overhead."""
        return self._overhead_tokens


def prompt_tokens(case: dict[str, Any]) -> int:
    """Prompt tokens of the next step, as the scheduler asks for them."""
    config = EngineConfig(
        num_blocks=100_000,
        max_model_len=100_000,
        vocab_size=99,
        block_size=case["block_size"],
        max_batched_tokens=case["max_batched_tokens"],
        itl_target_s=case["itl_target_s"],
        longest_step_s=case["longest_step_s"],
    )
    beside_s = case["beside_token_s"]
    rates = StepRates(
        prefill_tokens_per_s=case["alone_per_s"],
        _fit=Fit(case["decode_s"], beside_s),  # type: ignore[arg-type]
        _chunks=Chunks(case["overhead_tokens"]),  # type: ignore[arg-type]
        _seen_mixed=beside_s is not None,
    )
    decodes = case["decodes"]
    tokens = step_tokens(config, rates, decodes, 1_000 * decodes, case["backlog"])
    return max(tokens - decodes, config.block_size)


def drawn(draw: random.Random) -> dict[str, Any]:
    """The inputs of one case."""

    def between(least: float, most: float) -> float:
        return float(f"{least * (most / least) ** draw.random():.4g}")

    alone_per_s = between(300, 100_000)
    decodes = draw.choice((0, 1, 8, 60, 250, 460, 600))
    # In half of the cases prompts compute about as many tokens in that time as a step best has.
    decode_s = draw.choice((between(0.001, 0.2), float(f"{between(150, 900) / alone_per_s:.4g}")))
    return {
        "block_size": draw.choice((16, 32)),
        "max_batched_tokens": draw.choice((1_000, 4_096, 16_384)),
        "itl_target_s": draw.choice((None, 0.009, 0.009, 0.009, 0.1, 0.1, 0.1)),
        "longest_step_s": draw.choice((0.05, 1.0, 1.0)),
        "alone_per_s": alone_per_s,
        "beside_token_s": draw.choice((None, float(f"{between(0.1, 2) / alone_per_s:.4g}"))),
        "overhead_tokens": draw.choice((0.0, between(10, 10_000))),
        "decodes": decodes,
        "decode_s": decode_s if decodes else 0.0,
        "backlog": round(between(1, 1_000_000)),
    }


def generate() -> str:
    """The content of the file: a case on each line."""
    draw = random.Random(SEED)
    cases = [drawn(draw) for _ in range(CASES)]
    lines = [json.dumps(case | {"prompt_tokens": prompt_tokens(case)}) for case in cases]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    (Path(__file__).parent / "step_sizes.json").write_text(generate(), encoding="utf-8")
