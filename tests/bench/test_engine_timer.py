"""Steps timed on a real engine with a runner that counts: the step that was meant ran."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tasuki.attention.sdpa import SdpaAttention
from tasuki.bench.engine_timer import EngineTimer
from tasuki.bench.errors import RunFailedError
from tasuki.bench.steps import (
    BackToBackPoint,
    BesidePoint,
    DecodePoint,
    PrefillPoint,
    StepPoint,
    TransferPoint,
)
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.execution.runner import ModelRunner
from tasuki.kv.layout import CacheLayout
from tasuki.models.loader import load_model

BLOCK_SIZE = 16


class Tick:
    """A clock that stands still but for what it is told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Rig:
    """An engine whose forward pass takes (tokens + context / 1000) seconds of the clock."""

    def __init__(
        self,
        folder: Path,
        num_blocks: int = 400,
        prefix_caching: bool = True,
        overlap: bool = False,
        lasting_s: float = 1.0,
    ) -> None:
        loaded = load_model(folder, dtype=torch.float32)
        spec = loaded.spec
        layout = CacheLayout(
            num_blocks, spec.num_kv_heads, spec.num_layers, BLOCK_SIZE, spec.head_dim, torch.float32
        )
        pool = layout.allocate()
        clock = Tick()
        self.batches: list[tuple[list[int], list[int]]] = []
        forward = loaded.forward

        def counted(batch, attention):  # type: ignore[no-untyped-def]
            self.batches.append((list(batch.query_lens), list(batch.context_lens)))
            clock.now_s += sum(batch.query_lens) + sum(batch.context_lens) / 1000.0
            return forward(batch, attention)

        loaded.forward = counted  # type: ignore[method-assign]
        self.engine = Engine(
            EngineConfig(
                num_blocks=num_blocks,
                max_model_len=1024,
                vocab_size=spec.vocab_size,
                block_size=BLOCK_SIZE,
                max_batched_tokens=256,
                max_running_requests=8,
                prefix_caching=prefix_caching,
                overlap=overlap,
            ),
            ModelRunner(loaded, SdpaAttention(pool), pool),
        )
        self.loaded, self.forward, self.clock = loaded, loaded.forward, clock
        self.timer = EngineTimer(self.engine, clock=clock, lasting_s=lasting_s)


@pytest.fixture
def rig(tiny_model: Path) -> Rig:
    return Rig(tiny_model)


@pytest.mark.parametrize(("tokens", "context"), [(48, 0), (1, 0), (32, 160), (256, 512)])
def test_a_prefill_is_one_step_on_its_context(rig: Rig, tokens: int, context: int) -> None:
    seconds = rig.timer.measure(PrefillPoint(tokens, context))
    assert rig.batches == [([tokens], [context + tokens])]
    assert seconds == pytest.approx(tokens + (context + tokens) / 1000)
    assert rig.engine.referenced_blocks == 0
    rig.engine.check()


@pytest.mark.parametrize(("tokens", "context"), [(48, 0), (32, 160), (256, 512)])
def test_prompts_back_to_back_are_a_step_each(tiny_model: Path, tokens: int, context: int) -> None:
    rig = Rig(tiny_model, overlap=True)
    point = BackToBackPoint(tokens, context)
    assert rig.timer.fits(point)
    seconds = rig.timer.measure(point)
    timed = [batch for batch in rig.batches if batch[0] == [tokens]]
    # Five have their tokens; a sixth has been launched.
    assert timed == [([tokens], [context + tokens])] * 6
    assert seconds == pytest.approx(tokens + (context + tokens) / 1000)
    assert rig.engine.referenced_blocks == 0
    rig.engine.check()


def test_prompts_back_to_back_last_and_only_the_later_half_counts(tiny_model: Path) -> None:
    rig = Rig(tiny_model, overlap=True, lasting_s=48 * 100)
    forward = rig.forward

    def slower(batch, attention):  # type: ignore[no-untyped-def]
        if len(rig.batches) >= 40:
            rig.clock.now_s += 10.0
        return forward(batch, attention)

    rig.loaded.forward = slower  # type: ignore[method-assign]
    seconds = rig.timer.measure(BackToBackPoint(48, 0))
    assert len(rig.batches) == pytest.approx(100 - 100 // 8, abs=3)
    assert seconds == pytest.approx(48.048 + 10.0)


def test_steps_that_do_not_overlap_have_none_back_to_back(rig: Rig) -> None:
    assert not rig.timer.fits(BackToBackPoint(48, 0))


@pytest.mark.parametrize(("batch", "context"), [(1, 32), (4, 100), (8, 300)])
def test_a_decode_step_has_the_whole_batch_at_its_context(
    rig: Rig, batch: int, context: int
) -> None:
    seconds = rig.timer.measure(DecodePoint(batch, context))
    timed = rig.batches[2:10]
    assert [queries for queries, _ in timed] == [[1] * batch] * 8
    assert all(context < held <= context + 12 for _, contexts in timed for held in contexts)
    assert seconds == pytest.approx(batch + batch * (context + 6.5) / 1000)
    assert rig.engine.referenced_blocks == 0
    rig.engine.check()


def test_a_prompt_beside_decodes_is_what_it_adds_to_their_steps(rig: Rig) -> None:
    seconds = rig.timer.measure(BesidePoint(200, 4, 64))
    mixed = [queries for queries, _ in rig.batches if len(queries) == 5]
    assert mixed == [[1, 1, 1, 1, 200]] * 3
    # Its tokens and context; the decodes' contexts are longer by then than in the steps before.
    assert seconds == pytest.approx(200 + 200 / 1000, abs=0.25)
    assert rig.engine.referenced_blocks == 0
    rig.engine.check()


def test_where_steps_overlap_prompts_warm_the_device_before(tiny_model: Path) -> None:
    rig = Rig(tiny_model, overlap=True, lasting_s=2000.0)
    seconds = rig.timer.measure(BesidePoint(200, 4, 64))
    prompts = [queries for queries, _ in rig.batches if 200 in queries]
    # For half of that: each takes 204 s, and 4 for each step without it.
    assert 3 + 4 <= len(prompts) <= 3 + 6
    assert seconds == pytest.approx(200 + 200 / 1000, abs=5.0)
    assert rig.engine.referenced_blocks == 0
    rig.engine.check()


def test_a_launch_is_measured_while_the_step_before_it_runs(rig: Rig) -> None:
    # Here nothing overlaps: to launch a step is to compute it.
    assert rig.timer.launch_s(4, 64) == pytest.approx(
        rig.timer.measure(DecodePoint(4, 64)), abs=0.1
    )
    assert rig.engine.referenced_blocks == 0


def test_points_can_be_repeated_in_any_order(rig: Rig) -> None:
    points: list[StepPoint] = [PrefillPoint(64, 128), DecodePoint(8, 128), PrefillPoint(64, 0)]
    points += [BesidePoint(64, 4, 32)]
    first = [rig.timer.measure(point) for point in points]
    for _ in range(5):
        assert [rig.timer.measure(point) for point in points] == pytest.approx(first)


@pytest.mark.parametrize(
    "point",
    [
        PrefillPoint(257, 0),  # more than a step
        PrefillPoint(16, 1008),  # longer than a request
        PrefillPoint(16, 8),  # half a block of context
        DecodePoint(9, 16),  # more than may run
        DecodePoint(8, 600),  # more than the pool
        BesidePoint(249, 8, 16),  # more than a step
        BesidePoint(16, 8, 16),  # no room for another sequence
        TransferPoint(1),
    ],
)
def test_what_the_engine_cannot_do_does_not_fit(rig: Rig, point: StepPoint) -> None:
    assert not rig.timer.fits(point)


def test_everything_that_fits_can_be_measured(rig: Rig) -> None:
    grid: list[StepPoint] = [PrefillPoint(t, c) for t in (16, 256) for c in (0, 752)]
    grid += [DecodePoint(b, c) for b in (1, 8) for c in (16, 370, 1000)]
    grid += [BesidePoint(t, 7, 16) for t in (1, 249)]
    fitting = [point for point in grid if rig.timer.fits(point)]
    assert len(fitting) >= 8
    for point in fitting:
        assert rig.timer.measure(point) > 0


def test_a_context_that_is_not_cached_is_an_error(tiny_model: Path) -> None:
    rig = Rig(tiny_model, prefix_caching=False)
    with pytest.raises(RunFailedError, match="found 0 of 64 tokens of context"):
        rig.timer.measure(PrefillPoint(16, 64))


def test_a_full_pool_is_an_error_not_a_wrong_number(
    tiny_models: Callable[[str], Path],
) -> None:
    rig = Rig(tiny_models("llama"), num_blocks=128)
    assert not rig.timer.fits(DecodePoint(8, 300))
    with pytest.raises(RunFailedError):
        rig.timer.measure(DecodePoint(8, 300))
    rig.engine.check()
