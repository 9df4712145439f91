"""Who runs in a step, and who gives way: no model, no torch."""

from __future__ import annotations

from tasuki.engine.api import Leg, RequestSpec, SamplingParams
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.config import EngineConfig
from tasuki.engine.plan import StepPlan
from tasuki.engine.prefix_cache import PrefixCache
from tasuki.engine.request import Phase, Request, SequenceState, Stage
from tasuki.engine.scheduler import Scheduler
from tasuki.engine.stats import EngineCounters


class Bench:
    """A scheduler whose steps are computed by counting."""

    def __init__(self, **settings: int) -> None:
        values = {"num_blocks": 32, "max_model_len": 64, "block_size": 4, "vocab_size": 10**6}
        self.config = EngineConfig(**({"max_batched_tokens": 16} | values | settings))  # type: ignore[arg-type]
        self.pool = BlockPool(self.config.num_blocks, PrefixCache())
        self.counters = EngineCounters()
        budget = Budget(self.config, self.pool)
        self.scheduler = Scheduler(self.config, self.pool, budget, self.counters)
        self.arrivals = 0

    def add(self, tokens: int, leg: Leg = Leg.COLOCATED) -> SequenceState:
        self.arrivals += 1
        first = self.arrivals * 1000
        spec = RequestSpec(
            f"r{self.arrivals}",
            leg,
            range(first, first + tokens),
            SamplingParams(seed=0, max_tokens=1000),
        )
        request = Request(spec, self.arrivals, b"", 0.0)
        request.phase = Phase.ACTIVE
        self.scheduler.enqueue(request.sequences[0])
        return request.sequences[0]

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(0.0)
        for sequence, tokens in plan.rows:
            self.scheduler.advance(sequence, tokens)
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(7)
                if sequence.stage is Stage.PREFILL:
                    self.scheduler.stop(sequence)
                    self.scheduler.start_decode(sequence)
        return plan


def test_decodes_come_first_and_chunks_share_what_is_left():
    bench = Bench()
    a, b, c = bench.add(10), bench.add(20), bench.add(5)
    assert bench.step().rows == [(a, 10), (b, 6)]
    plan = bench.step()
    assert plan.rows == [(a, 1), (c, 1), (b, 14)]
    assert (plan.num_decodes, plan.prefill_tokens) == (2, 15)
    plan = bench.step()
    assert plan.rows == [(a, 1), (b, 1), (c, 4)]


def test_single_token_chunks_stand_with_the_decodes():
    bench = Bench()
    a, b = bench.add(15), bench.add(3)
    assert bench.step().rows == [(b, 1), (a, 15)]


def test_prefill_never_stops_however_many_decode():
    bench = Bench(max_batched_tokens=2, num_blocks=64)
    for _ in range(6):
        bench.add(1)
    late = bench.add(9)
    for _ in range(20):
        bench.step()
    assert late.stage is Stage.DECODE


def test_all_blocks_of_a_prompt_are_taken_at_admission():
    bench = Bench(max_batched_tokens=4)
    first = bench.add(30)
    bench.step()
    assert (first.computed, len(first.blocks)) == (4, 8)


def test_nobody_overtakes_when_blocks_are_short():
    bench = Bench(max_batched_tokens=256)
    bench.add(60)
    bench.add(60)
    large, small = bench.add(30), bench.add(2)
    bench.step()
    assert bench.pool.available == 2
    bench.step()
    assert [large.stage, small.stage] == [Stage.WAITING, Stage.WAITING]


def test_youngest_gives_way_and_comes_back_before_those_that_wait():
    bench = Bench(max_batched_tokens=256)
    a, b = bench.add(60), bench.add(56)
    bench.step()
    late = bench.add(20)
    while not bench.counters.preemptions:
        bench.step()
    assert b.stage is Stage.WAITING
    assert a.stage is Stage.DECODE
    assert bench.scheduler.waiting == [b, late]
    assert len(b.blocks) == 0
    bench.scheduler.remove(a)
    bench.step()
    assert b.stage is not Stage.WAITING
    assert late.stage in (Stage.PREFILL, Stage.DECODE)


def test_prefill_legs_do_not_give_way():
    bench = Bench(max_batched_tokens=256)
    a = bench.add(60)
    leg = bench.add(60, Leg.PREFILL)
    bench.scheduler.plan(0.0)
    bench.scheduler.stop(leg)
    held = list(leg.blocks)
    bench.scheduler.advance(a, 60)
    bench.scheduler.stop(a)
    bench.scheduler.start_decode(a)
    for _ in range(30):
        a.tokens.append(7)
        bench.step()
    assert list(leg.blocks) == held
    assert bench.counters.preemptions == 0


def test_hit_blocks_are_not_evicted_by_the_admission_that_uses_them():
    bench = Bench(max_batched_tokens=256)
    first = bench.add(40)
    bench.step()
    blocks = list(first.blocks)
    bench.scheduler.remove(first)
    again = SequenceState(first.request, [0], first.tokens)
    bench.scheduler.enqueue(again)
    bench.step()
    assert list(again.blocks)[:10] == blocks[:10]
    assert again.registered == 10
