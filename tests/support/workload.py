"""Requests for the tiny model whose right answer is known beyond doubt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from support.models import VOCAB_SIZE
from support.reference import Reference, greedy_batch, load_float32

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
    known: dict[int, Reference] = {}
    for first, length in enumerate(prompt_lengths):
        wanted = list(range(first, count, len(prompt_lengths)))
        while wanted:  # those of one length run as one batch; near-ties are drawn again
            prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for _ in wanted]
            names = [f"known-{number}" for number in wanted]
            answers = greedy_batch(model, names, prompts, steps)
            sure = dict(zip(wanted, answers, strict=True))
            known |= {n: each for n, each in sure.items() if min(each.gaps) > SURE_GAP}
            wanted = [number for number in wanted if number not in known]
    return [known[number] for number in range(count)]
