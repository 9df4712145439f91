"""Requests for the tiny model whose right answer is known beyond doubt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from support.models import VOCAB_SIZE
from support.reference import Reference, greedy, load_float32

# Kernels of other batch shapes round otherwise; an answer counts as known only
# if no step of it was closer than this.
SURE_GAP = 5e-4


def known_requests(
    path: Path, count: int, *, prompt_lengths: Sequence[int], steps: int, seed: int = 1
) -> list[Reference]:
    """Random prompts with their greedy answers by `transformers`, near-ties left out.

    Args:
        path: folder of a tiny model.
        count: how many.
        prompt_lengths: tokens; used in turn.
        steps: output tokens of each.
        seed: of the prompts.
    """
    model = load_float32(path)
    draw = random.Random(seed)
    known: list[Reference] = []
    while len(known) < count:
        length = prompt_lengths[len(known) % len(prompt_lengths)]
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]
        answer = greedy(model, f"known-{len(known)}", prompt, steps)
        if min(answer.gaps) > SURE_GAP:
            known.append(answer)
    return known
