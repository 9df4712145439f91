"""What the first rank tells the others is enough to compute the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_fakes import VOCAB, HashModel, NoAttention, Rig, expected, spec

from tasuki.attention.batch import Batch
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.errors import OutOfStepError
from tasuki.engine.grammar_masks import StepMasks
from tasuki.execution.collective import ALONE, Alone
from tasuki.execution.executor import Executor
from tasuki.execution.runner import ModelRunner
from tasuki.execution.sampler import Prepared, Sampled, Sampler
from tasuki.execution.step_arrays import StepHeader

CONFIG = EngineConfig(
    num_blocks=64, max_model_len=64, block_size=4, max_batched_tokens=16, vocab_size=VOCAB
)


class Follower:
    """Another rank's executor, fed with copies of what it would be sent."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.told: list[str] = []

    def run(self, header: StepHeader, slab: memoryview) -> None:
        self.told.append("run")
        staging = self.executor.staging
        staging.take(*copy.deepcopy(header).parts())
        staging.filled()[:] = bytes(slab)
        self.executor.run(header)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.told.append("copy")
        self.executor.copy(pairs)

    def scrub(self, blocks: Sequence[int], first_slot: int) -> None:
        self.told.append("scrub")
        self.executor.scrub(blocks, first_slot)


class Fenced(Alone):
    """Counts the fences."""

    fences = 0

    def fence(self) -> None:
        self.fences += 1


def make_rig(follower_of: type[Follower] = Follower) -> tuple[Rig, Follower, torch.Tensor]:
    first, second = (torch.zeros(CONFIG.num_blocks, 1, 1, 2, 4, 2) for _ in range(2))
    attention: Any = NoAttention()
    follower = follower_of(Executor(HashModel(second), attention, second))
    model = HashModel(first)
    runner = ModelRunner(model, attention, first, ALONE, follower)
    return Rig(Engine(CONFIG, runner), first, model), follower, second


def test_a_follower_writes_the_same_cache() -> None:
    rig, follower, second = make_rig()
    requests = [
        spec("chunks", range(40), max_tokens=9, temperature=0.9),
        spec("forks", range(7), choices=(0, 1, 2), temperature=1.0, max_tokens=12),
        spec("greedy", range(3), max_tokens=20),
    ]
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    for request in requests:
        for choice in request.choices:
            assert rig.tokens(request.request_id, choice) == expected(request, choice, 64)[0]
    assert {"run", "copy"} <= set(follower.told)
    assert rig.pool.any()
    assert torch.equal(rig.pool, second)


def test_scrubbed_blocks_are_scrubbed_everywhere() -> None:
    rig, follower, second = make_rig()
    rig.model.poison = 40
    rig.engine.submit(spec("bad", range(9), max_tokens=20, logit_bias={40: 100.0}))
    rig.drain()
    assert "finite" in rig.ended["bad"].message
    assert "scrub" in follower.told
    assert torch.equal(rig.pool, second)


def test_a_step_without_logits_ends_with_a_fence() -> None:
    pool = torch.zeros(8, 1, 1, 2, 4, 2)
    collective = Fenced()
    executor = Executor(HashModel(pool), NoAttention(), pool, collective)  # type: ignore[arg-type]
    for wanted, fences in ((0, 1), (1, 1)):
        header = StepHeader([2], [2], num_decodes=0, width=1, wanted=wanted)
        for array in executor.staging.take(*header.parts()):
            array[:] = range(len(array))
        executor.run(header)
        assert collective.fences == fences


def test_what_fails_after_the_others_were_told_ends_the_engine() -> None:
    class Broken(Follower):
        def run(self, header: StepHeader, slab: memoryview) -> None:
            raise OSError("the pipe is gone")

    rig, _, _ = make_rig(Broken)
    rig.engine.submit(spec("a", range(5), max_tokens=3))
    with pytest.raises(OutOfStepError, match=r"must be started anew: OSError"):
        rig.drain()


@pytest.mark.parametrize(
    "first_error", [torch.OutOfMemoryError("out of memory"), RuntimeError("broken")]
)
def test_what_fails_while_a_step_is_computed_again_ends_the_engine(
    first_error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By halves after running out of memory, row by row after any other error."""
    rig, _, _ = make_rig()

    def fail_after_the_others_were_told(batch: Batch, attention: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    def fail_once(sampler: Sampler, prepared: Prepared, masks: StepMasks | None = None) -> Sampled:
        monkeypatch.undo()
        monkeypatch.setattr(rig.model, "forward", fail_after_the_others_were_told)
        raise first_error

    monkeypatch.setattr(Sampler, "draw", fail_once)
    for name in ("a", "b"):
        rig.engine.submit(spec(name, range(5), max_tokens=3))
    with pytest.raises(OutOfStepError, match=r"must be started anew: .*out of memory"):
        rig.drain()
