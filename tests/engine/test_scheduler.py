"""Who runs in a step, and who gives way: no model, no torch."""

from __future__ import annotations

import pytest

from tasuki.engine.api import Leg, RequestSpec, SamplingParams, TokenLogprob
from tasuki.engine.block_pool import BlockPool
from tasuki.engine.budget import Budget
from tasuki.engine.config import EngineConfig
from tasuki.engine.plan import StepPlan
from tasuki.engine.prefix_cache import PrefixCache
from tasuki.engine.queues import Queues
from tasuki.engine.request import Request, SequenceState, Stage
from tasuki.engine.scheduler import Scheduler
from tasuki.engine.stats import EngineCounters, StepRates, StepSample


class Bench:
    """A scheduler whose steps are computed by counting."""

    def __init__(self, **settings: float) -> None:
        values = {"num_blocks": 32, "max_model_len": 64, "block_size": 4, "vocab_size": 10**6}
        self.config = EngineConfig(**({"max_batched_tokens": 16} | values | settings))  # type: ignore[arg-type]
        self.pool = BlockPool(self.config.num_blocks, PrefixCache())
        self.counters = EngineCounters()
        self.budget = budget = Budget(self.config, self.pool)
        self.queues = Queues(self.config, self.pool)
        self.scheduler = Scheduler(self.config, self.pool, budget, self.queues, self.counters)
        self.arrivals = 0
        self.rates = StepRates()
        self.now_s = 0.0

    def add(
        self,
        tokens: int,
        leg: Leg = Leg.COLOCATED,
        waited_s: float = 0.0,
        prompt_logprobs: int | None = None,
    ) -> SequenceState:
        self.arrivals += 1
        first = self.arrivals * 1000
        spec = RequestSpec(
            f"r{self.arrivals}",
            leg,
            range(first, first + tokens),
            SamplingParams(seed=0, max_tokens=1000, prompt_logprobs=prompt_logprobs),
            waited_s=waited_s,
        )
        request = Request(spec, self.arrivals, b"", 0.0)
        request.credited = True
        self.queues.enqueue(request.sequences[0])
        return request.sequences[0]

    def step(self) -> StepPlan:
        plan = self.plan()
        self.queues.launched(plan)
        self.land(plan)
        return plan

    def plan(self, *, ahead: bool = False) -> StepPlan:
        plan = self.scheduler.plan(self.now_s, self.rates, ahead=ahead)
        assert plan is not None
        return plan

    def land(self, plan: StepPlan) -> None:
        self.queues.landed(plan)
        for row in plan.rows:
            if not row.void:
                self.queues.settle(row.sequence, row.end)
                if row.end == len(row.sequence.tokens):
                    row.sequence.tokens.append(7)


def rows(plan: StepPlan) -> list[tuple[SequenceState, int]]:
    return [(row.sequence, row.tokens) for row in plan.rows]


def test_decodes_come_first_and_chunks_share_what_is_left():
    bench = Bench()
    a, b, c = bench.add(10), bench.add(20), bench.add(11)
    assert rows(bench.step()) == [(a, 10), (b, 6)]
    plan = bench.step()
    assert rows(plan) == [(a, 1), (c, 1), (b, 14)]
    assert (plan.num_decodes, plan.prefill_tokens) == (2, 15)
    plan = bench.step()
    assert rows(plan) == [(a, 1), (b, 1), (c, 10)]


def test_a_later_attempt_stands_in_line_where_the_first_one_stood():
    bench = Bench()
    running, waiting = bench.add(16), bench.add(12)
    assert rows(bench.step()) == [(running, 16)]
    again = bench.add(11, waited_s=60.0)
    assert bench.queues.waiting == [again, waiting]
    assert rows(bench.step())[:2] == [(running, 1), (again, 11)]


def test_single_token_chunks_stand_with_the_decodes():
    bench = Bench()
    a, b, c = bench.add(7), bench.add(8), bench.add(5)
    assert rows(bench.step()) == [(c, 1), (a, 7), (b, 8)]


def test_prefill_never_stops_however_many_decode():
    bench = Bench(max_batched_tokens=2, num_blocks=64)
    for _ in range(6):
        bench.add(1)
    late = bench.add(9)
    for _ in range(20):
        bench.step()
    assert late.stage is Stage.DECODE


def test_prompts_come_in_small_chunks_where_somebody_decodes():
    bench = Bench(num_blocks=64, max_batched_tokens=32, itl_target_s=0.010)
    bench.rates.prefill_tokens_per_s = 2_000.0
    bench.rates.record(StepSample(1, 0.004, 2, 62, 0, 0.0))
    first, second = bench.add(40), bench.add(20)
    assert rows(bench.step()) == [(first, 16), (second, 16)], "nobody decodes yet"
    assert rows(bench.step()) == [(first, 24), (second, 4)]
    third = bench.add(14)
    assert rows(bench.step()) == [(first, 1), (second, 1), (third, 12)], "6 ms of 2,000 a second"
    assert rows(bench.step()) == [(first, 1), (second, 1), (third, 2)]


def test_all_blocks_of_a_prompt_are_taken_at_admission():
    bench = Bench(max_batched_tokens=4)
    first = bench.add(30)
    bench.step()
    assert (first.computed, first.num_pages) == (4, 8)


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
    a, b, c = bench.add(40), bench.add(40), bench.add(36)
    bench.step()
    late = bench.add(20)
    while not bench.counters.preemptions:
        bench.step()
    assert c.stage is Stage.WAITING
    assert (a.stage, b.stage) == (Stage.DECODE, Stage.DECODE)
    assert bench.queues.waiting == [c, late]
    assert c.num_pages == 0
    bench.queues.remove(a)
    bench.step()
    assert c.stage is not Stage.WAITING
    assert late.stage in (Stage.PREFILL, Stage.DECODE)


def test_prefill_legs_do_not_give_way():
    bench = Bench(max_batched_tokens=256)
    bench.add(60)
    leg = bench.add(60, Leg.PREFILL)
    bench.step()
    bench.queues.stop(leg)
    held = list(leg.pages)
    for _ in range(30):
        bench.step()
    assert list(leg.pages) == held
    assert bench.counters.preemptions == 0


def test_hit_blocks_are_not_evicted_by_the_admission_that_uses_them():
    bench = Bench(max_batched_tokens=256)
    first = bench.add(40)
    bench.step()
    blocks = list(first.pages)
    bench.queues.remove(first)
    again = SequenceState(first.request, [0], first.tokens)
    bench.queues.enqueue(again)
    bench.step()
    assert list(again.pages)[:10] == blocks[:10]
    assert again.registered == 10


def test_a_step_ahead_goes_on_from_the_token_on_its_way():
    bench = Bench()
    a = bench.add(10)
    first = bench.plan()
    bench.queues.launched(first)
    second = bench.plan(ahead=True)
    assert [(row.sequence, row.start, row.tokens) for row in second.rows] == [(a, 10, 1)]
    assert len(a.tokens) == 10
    bench.queues.launched(second)
    bench.land(first)
    bench.land(second)
    assert (len(a.tokens), a.computed, a.flying) == (12, 11, 0)


def test_a_step_ahead_leaves_out_what_ends_by_its_length():
    bench = Bench()
    bench.add(63)  # of 64 that a sequence may have
    for budget_left in (16, 16, 16):
        plan = bench.step()
        assert plan.prefill_tokens == budget_left
    bench.queues.launched(bench.plan())
    assert bench.plan(ahead=True).rows == []


def test_a_step_ahead_preempts_nobody():
    bench = Bench(max_batched_tokens=256)
    a, b, c = bench.add(40), bench.add(40), bench.add(36)
    flying = bench.plan()
    bench.queues.launched(flying)
    while (ahead := bench.scheduler.plan(0.0, bench.rates, ahead=True)) is not None:
        bench.queues.launched(ahead)
        bench.land(flying)
        flying = ahead
    assert bench.counters.preemptions == 0
    bench.land(flying)
    bench.step()
    assert [s.stage for s in (a, b, c)] == [Stage.DECODE, Stage.DECODE, Stage.WAITING]


def test_blocks_come_back_when_the_last_step_that_may_touch_them_has_landed():
    bench = Bench()
    a = bench.add(10)
    first = bench.plan()
    bench.queues.launched(first)
    second = bench.plan(ahead=True)
    bench.queues.launched(second)
    free = bench.pool.available
    bench.queues.remove(a)
    assert bench.pool.available == free
    bench.land(first)
    assert bench.pool.available == free
    bench.land(second)
    assert bench.pool.available == bench.config.num_blocks
    bench.pool.check([])


def test_what_a_copy_reads_is_nobody_elses_until_it_has_landed():
    bench = Bench()
    a = bench.add(10)
    bench.step()
    shared = a.pages[2]
    others = [bench.queues.fork(a, choice) for choice in (1, 2)]
    for other in others:
        bench.queues.start_decode(other)
    bench.pool.allocate(bench.pool.available - 1)  # enough for one copy
    plan = bench.plan()
    assert rows(plan) == [(a, 1)]
    assert plan.copies == [(shared, a.pages[2])]
    assert [other.stage for other in others] == [Stage.WAITING] * 2
    bench.queues.launched(plan)
    assert bench.pool.references(shared) == 1
    bench.land(plan)
    assert bench.pool.references(shared) == 0


@pytest.mark.parametrize(("most", "rows"), [(1, 128), (100, 200)])
def test_scored_prompts_share_the_logits_that_memory_was_measured_with(most: int, rows: int):
    bench = Bench(
        num_blocks=1024, max_model_len=512, max_batched_tokens=1024, max_running_requests=most
    )
    scored = [bench.add(300, Leg.PREFILL, prompt_logprobs=20) for _ in range(3)]
    plain = bench.add(400, Leg.PREFILL)
    for done in (rows, 2 * rows):
        plan = bench.step()
        assert sum(row.tokens for row in plan.rows if row.sequence is not plain) == rows
        assert sum(sequence.computed for sequence in scored) == done
    assert plain.computed >= 400, "other prompts do not wait for them"


def test_a_scored_prompt_goes_on_beside_any_number_of_decodes():
    bench = Bench(num_blocks=1024, max_model_len=512, max_batched_tokens=512)
    for _ in range(bench.config.max_running_requests):
        bench.add(1)
    bench.step()
    for _ in range(bench.config.max_running_requests):
        bench.queues.start_decode(bench.queues.fork(bench.queues.running[0], 0))
    scored = bench.add(300, Leg.PREFILL, prompt_logprobs=20)
    bench.step()
    assert scored.computed == bench.config.block_size


def test_a_prompt_is_not_admitted_to_the_blocks_that_decodes_grow_into():
    bench = Bench(max_batched_tokens=256)
    bench.add(58), bench.add(58)
    bench.step()
    assert bench.pool.available == 2
    late = bench.add(5)
    for _ in range(4):
        bench.step()
    assert (late.stage, bench.counters.preemptions) == (Stage.WAITING, 0)


@pytest.mark.parametrize("scored", [None, 0])
def test_a_prompt_that_gave_way_counts_as_when_it_began(scored: int | None):
    bench = Bench(max_batched_tokens=8)
    bench.add(3)
    bench.step()
    prompt = bench.add(40, prompt_logprobs=scored)
    others = bench.pool.allocate(bench.pool.available - 11)
    bench.now_s = 1.0
    bench.step()
    if prompt.request.prompt_logprobs is not None:
        prompt.request.prompt_logprobs.append(TokenLogprob(1, 0.0, 1, ()))
    while bench.counters.preemptions == 0:
        bench.step()
    assert (prompt.stage, prompt.computed) == (Stage.WAITING, 0)
    bench.pool.release(others)
    bench.now_s = 5.0
    bench.plan()
    assert prompt.computed == (32 if scored is None else 0), "cached by itself"
    assert (prompt.request.cached_tokens, prompt.request.scheduled_s) == (0, 1.0)
    assert prompt.request.prompt_logprobs == (None if scored is None else [])


def test_a_pulled_request_that_gives_way_leaves_no_copies_behind():
    bench = Bench()
    a = bench.add(10, Leg.DECODE)
    bench.step()
    forks = [bench.queues.fork(a, choice) for choice in (1, 2)]
    for fork in forks:
        bench.queues.start_decode(fork)
    others = bench.pool.allocate(bench.pool.available - 1)  # enough for one copy of two
    plan = bench.plan()
    assert plan.returned == [a.request]
    assert (plan.rows, plan.copies) == ([], [])
    bench.pool.check([others])


def test_a_step_ahead_does_not_grow_into_promised_blocks():
    bench = Bench()
    bench.add(12)
    bench.queues.launched(bench.plan())
    bench.budget.reserved_blocks = bench.pool.available
    assert bench.scheduler.plan(0.0, bench.rates, ahead=True) is None
    bench.budget.reserved_blocks -= 1
    assert bench.plan(ahead=True).rows


def test_the_youngest_gives_way_before_promised_blocks_are_taken():
    bench = Bench()
    first, second = bench.add(8), bench.add(8)
    bench.step()
    bench.budget.reserved_blocks = bench.pool.available
    assert rows(bench.step()) == [(first, 1)]
    assert (second.stage, bench.counters.preemptions) == (Stage.WAITING, 1)
