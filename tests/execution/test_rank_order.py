"""A step that is over on the first rank has written and read every rank's cache for the last time.

The KV handoff rests on it: the first rank alone announces blocks to be read
and gives freed ones to transfers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks

from tasuki.attention.sdpa import SdpaAttention
from tasuki.execution.collective import Collective
from tasuki.execution.executor import Executor
from tasuki.execution.step_arrays import StepHeader
from tasuki.kv.layout import CacheLayout
from tasuki.models.loader import load_model

pytestmark = pytest.mark.system

BLOCK_SIZE, CHUNK = 8, 6
SLOW_S = 0.05
LAYERS = 2


class Slow:
    """Attention that takes its time, and keeps when it ended."""

    def __init__(self, inner: SdpaAttention, pause_s: float) -> None:
        self._inner = inner
        self._pause_s = pause_s
        self.ended_s: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        time.sleep(self._pause_s)
        result = self._inner.forward(*arguments, **options)
        self.ended_s.append(time.monotonic())
        return result


def run_steps(collective: Collective, folder: Path) -> list[tuple[float, float]]:
    """Chunks of one prompt, some without logits: when its attention and when each step ended."""
    model = load_model(folder, dtype=torch.float32, weights="dummy", collective=collective)
    spec = model.spec
    layout = CacheLayout(
        8, spec.num_kv_heads, spec.num_layers, BLOCK_SIZE, spec.head_dim, torch.float32
    )
    pool = layout.allocate()
    attention = Slow(SdpaAttention(pool), 0.0 if collective.is_first else SLOW_S)
    executor = Executor(model, attention, pool, collective)  # type: ignore[arg-type]
    found = []
    for step, wanted in enumerate((0, 1, 0, 0, 1)):
        first = step * CHUNK
        width = -(-(first + CHUNK) // BLOCK_SIZE)
        header = StepHeader([CHUNK], [first + CHUNK], num_decodes=0, width=width, wanted=wanted)
        tokens, sources, positions, slots, tables, rows = executor.staging.take(*header.parts())
        tokens[:] = [3 + i for i in range(CHUNK)]
        sources[:] = -1
        positions[:] = slots[:] = range(first, first + CHUNK)
        tables[:] = range(width)
        rows[:] = [CHUNK - 1] * wanted
        executor.run(header)
        over_s = time.monotonic()
        assert len(attention.ended_s) == LAYERS
        found.append((max(attention.ended_s), over_s))
        attention.ended_s.clear()
        assert pool[:width].flatten(1).any(1).all()
    return found


def test_no_rank_touches_its_cache_after_the_first_ones_step(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    first, *others = on_ranks(2, run_steps, tmp_path)
    for other in others:
        for (_, over_s), (attended_s, _) in zip(first, other, strict=True):
            assert attended_s < over_s
