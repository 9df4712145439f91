"""The largest step that is profiled is a real one: as many tokens, each in a slot of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tasuki.attention.batch import Batch
from tasuki.attention.sdpa import SdpaAttention
from tasuki.engine.plan import Draw
from tasuki.execution.sampler import Sampler
from tasuki.models.loader import load_model
from tasuki.worker import profile
from tasuki.worker.config import ConfigError, Limits
from tasuki.worker.profile import _batch, _largest_step, _lengths, pool_bytes

LIMITS = Limits(block_size=16, max_batched_tokens=64, max_running_requests=8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A GPU of 1,000 bytes, 300 of them free once weights are loaded; a step takes 100."""
    memory = [(300, 1_000)]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: memory[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 250)
    monkeypatch.setattr(profile, "_largest_step", lambda *_: 100)
    return memory


def test_the_pool_takes_what_weights_and_a_step_leave_of_the_share(
    gpu: list[tuple[int, int]],
) -> None:
    def left(utilization: float) -> int:
        return pool_bytes(None, None, None, LIMITS, utilization, None)  # type: ignore[arg-type]

    assert left(0.9) == 900 - 700 - 100
    assert left(1.0) == 200
    gpu[0] = (500, 1_000)
    assert left(0.9) == 300
    with pytest.raises(ConfigError, match="of the GPU's 1000 bytes 500 are used, 250 of them by"):
        left(0.6)


def test_the_largest_step_runs_on_the_model(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("synchronize", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 1_000),
        ("max_memory_allocated", 1_500),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    model = load_model(tiny_model, dtype=torch.float32, weights="dummy")
    spec, seen = model.spec, []

    class Recording(SdpaAttention):
        def plan(self, batch: Batch) -> None:
            seen.append(batch)
            super().plan(batch)

    def make_pool(blocks: int) -> torch.Tensor:
        return torch.zeros(blocks, spec.num_kv_heads, spec.num_layers, 2, 16, spec.head_dim)

    limits = Limits(block_size=16, max_batched_tokens=5_000, max_running_requests=80)
    joined, sampled = [], []
    sample = Sampler.sample

    def recording(sampler: Sampler, logits: torch.Tensor, rows: list[int], draws: list[Draw]):
        assert not any(draw.sequence.request.plain for draw in draws)
        result = sample(sampler, logits, rows, draws)
        assert result.scores is not None
        sampled.append(len(result.tokens))
        return result

    monkeypatch.setattr(Sampler, "sample", recording)

    def whole(part: torch.Tensor) -> torch.Tensor:
        joined.append(part.shape)
        return part

    assert _largest_step(model, Recording, make_pool, limits, whole) == 500
    assert joined == [(160, spec.vocab_size)]
    assert sampled == [160], "own sequences and pulled ones"
    assert [sum(batch.query_lens) for batch in seen] == [5_000]
    assert max(seen[0].context_lens) == spec.max_position


@pytest.mark.parametrize(
    ("tokens", "longest", "lengths"),
    [(200, 4096, [200]), (100, 40, [40, 40, 20]), (80, 40, [40, 40])],
)
def test_the_step_is_full(tokens: int, longest: int, lengths: list[int]) -> None:
    limits = Limits(block_size=16, max_batched_tokens=tokens, max_running_requests=80)
    assert _lengths(tokens, longest) == lengths
    tables = [-(-length // 16) for length in lengths]
    batch = _batch(lengths, tables, limits, torch.device("cpu"))
    assert len(batch.tokens) == len(batch.positions) == tokens
    assert len(batch.slots.unique()) == tokens
    assert int(batch.slots.max()) < 16 * sum(tables)
    assert batch.logits_rows.tolist() == list(range(tokens - min(160, tokens), tokens))
    for row, (length, blocks) in enumerate(zip(lengths, tables, strict=True)):
        begin = sum(lengths[:row])
        slots = batch.slots[begin : begin + length]
        wanted = batch.block_tables[row][:blocks].repeat_interleave(16)[:length]
        assert torch.equal(slots // 16, wanted.long())
