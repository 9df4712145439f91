"""Writes prompt_shares.json, the golden values of how prompts divide a step's tokens.

The worker (`tasuki.engine.step_size`) and the simulator's copy of its rule
(`crates/sim/src/worker/chunks.rs`) are both tested against the file, so that neither changes
alone. Run it by hand when the rule changes, and change the other copy with it:

    PYTHONPATH=python python tests/golden/make_prompt_shares.py

A case has the budget of a step and the tokens that each prompt has left. Each is offered tokens
twice, before and after `lift`; only those with `takes` take what they are offered. All is drawn
from a seed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tasuki.engine.step_size import Shares

SEED = 1
CASES = 200


def divided(case: dict[str, Any]) -> dict[str, Any]:
    """What the prompts of a case are offered, both times, and what is left in the end."""
    lengths = list(case["lengths"])
    shares = Shares(case["budget"], lengths)
    offers: list[list[int]] = []
    for lifted in (False, True):
        if lifted:
            shares.lift()
        offers.append([])
        for index, takes in enumerate(case["takes"]):
            tokens = shares.offer(lengths[index])
            offers[-1].append(tokens)
            if takes:
                shares.take(lengths[index], tokens)
                lengths[index] -= tokens
    return {"offers": offers, "left": shares.left}


def drawn(draw: random.Random) -> dict[str, Any]:
    """The inputs of one case: lengths from a budget's twentieth to its twentyfold."""
    budget = draw.choice((1, 2, 33, 512, 4_095, 16_384))
    lengths = [max(1, round(budget * 20 ** draw.uniform(-1, 1))) for _ in range(draw.randint(1, 8))]
    takes = [draw.random() < 0.8 for _ in lengths]
    return {"budget": budget, "lengths": lengths, "takes": takes}


def generate() -> str:
    """The content of the file: a case on each line."""
    draw = random.Random(SEED)
    cases = [drawn(draw) for _ in range(CASES)]
    return "[\n" + ",\n".join(json.dumps(case | divided(case)) for case in cases) + "\n]\n"


if __name__ == "__main__":
    (Path(__file__).parent / "prompt_shares.json").write_text(generate(), encoding="utf-8")
