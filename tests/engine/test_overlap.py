"""Steps that overlap against steps in turn, over every kind of traffic and tiny pools.

The runner here has no tensors. Its next token is a hash of the sequence, and a
token that the host has not seen yet is where a device would have it. It notes
which blocks a launched step may touch: nobody may be given one of those before
the step is collected.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import searches

from tasuki.engine.api import (
    FinishReason,
    FirstToken,
    Leg,
    LegEndReason,
    LegTimings,
    RequestSpec,
    SamplingParams,
    StepResult,
)
from tasuki.engine.config import EngineConfig
from tasuki.engine.engine import Engine
from tasuki.engine.plan import Draw, StepOutcome, StepPlan
from tasuki.engine.request import SequenceState

VOCAB = 24
BLOCK = 4
MAX_LEN = 40
BAD = 23  # a prompt with it has logits that are not finite
CURSED = 22  # a step with it raises


def next_token(tokens: Sequence[int], choice: int) -> int:
    data = bytes([choice, *tokens])
    return blake2b(data, digest_size=4).digest()[0] % CURSED


@dataclass
class Launched:
    draws: list[Draw]
    tokens: list[int]
    failed: list[SequenceState]
    touched: set[int]
    constrained: Sequence[int] = ()


@dataclass
class HashRunner:
    """A device that computes at launch and tells at collection."""

    sampled: dict[SequenceState, int] = field(default_factory=dict)
    flying: list[Launched] = field(default_factory=list)
    engine: Engine | None = None

    def touched(self) -> set[int]:
        return set().union(*(launched.touched for launched in self.flying))

    def launch(self, plan: StepPlan) -> Launched:
        assert len(self.flying) <= 1, "two steps are in flight already"
        assert all(row.tokens == 1 for row in plan.rows[: plan.num_decodes])
        launched = Launched([], [], [], {block for pair in plan.copies for block in pair})
        drawn: dict[SequenceState, int] = {}
        written: set[int] = set()
        for row in plan.rows:
            sequence, end = row.sequence, row.end
            tokens = list(sequence.tokens[:end])
            if len(tokens) < end:
                tokens.append(self.sampled[sequence])
            assert len(tokens) == end, "more than one token is unknown"
            if CURSED in tokens:
                raise RuntimeError("a cursed token")
            blocks = sequence.tables[0].part(0, -(-end // BLOCK))
            assert len(blocks) * BLOCK >= end, "a token has no block"
            launched.touched.update(blocks)
            own = set(blocks[row.start // BLOCK :])
            assert not own & written, "two rows write to one block"
            written |= own
            if BAD in tokens:
                launched.failed.append(sequence)
            if end >= len(sequence.tokens):
                for choice in sequence.choices:
                    launched.draws.append(Draw.next(sequence, choice))
                    launched.tokens.append(next_token(tokens, choice))
                    drawn[sequence] = launched.tokens[-1]
        self.sampled = drawn
        self.flying.append(launched)
        return launched

    def landed(self, launched: Launched) -> bool:
        return launched not in self.flying

    def collect(self, launched: Launched) -> StepOutcome:
        assert self.flying.pop(0) is launched, "collected out of order"
        return StepOutcome(launched.draws, launched.tokens, failed=launched.failed)

    def scrub(self, blocks: Sequence[int], first_slot: int = 0) -> None:
        assert self.engine is not None
        assert all(self.engine._pool.references(block) for block in blocks)


@dataclass
class World:
    """An engine, and what it told."""

    engine: Engine
    runner: HashRunner
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    finishes: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    ended: dict[str, LegEndReason] = field(default_factory=dict)
    announced: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    prefilled: set[str] = field(default_factory=set)
    steps: int = 0

    def step(self, *, wait: bool = True) -> None:
        self.take(self.engine.step(wait=wait))
        self.engine.check()
        assert self.engine._landing is None or not wait
        flights = [self.engine._landing, self.engine._flight]
        flying = sum(flight is not None and flight.error is None for flight in flights)
        assert len(self.runner.flying) == flying
        self.steps += 1
        assert self.steps < 20_000, "something never ends"

    def take(self, result: StepResult) -> None:
        for output in result.outputs:
            key = (output.request_id, output.choice)
            assert output.position == len(self.outputs[key])
            assert key not in self.finishes, "a token after the last one"
            self.outputs[key] += output.tokens
            if output.finish is not None:
                self.finishes[key] = output.finish
        for announced in result.announced:
            blocks = self.announced[announced.request_id]
            assert announced.first_token == len(blocks) * BLOCK
            [part] = announced.parts
            blocks += part.blocks
            assert not set(part.blocks) & self.written_now(), "announced while written to"
        self.prefilled |= {prefilled.request_id for prefilled in result.prefilled}
        for end in result.ended:
            assert end.request_id not in self.ended, "a leg ended twice"
            self.ended[end.request_id] = end.reason

    def written_now(self) -> set[int]:
        """Blocks that the steps in flight write to."""
        flights = [self.engine._landing, self.engine._flight]
        return {
            block
            for flight in flights
            if flight is not None
            for row in flight.plan.rows
            if not row.void
            for block in row.sequence.tables[0].part(row.start // BLOCK, -(-row.end // BLOCK))
        }


def make_world(*, overlap: bool, **settings: int | bool) -> World:
    config = EngineConfig(
        max_model_len=MAX_LEN, vocab_size=VOCAB, block_size=BLOCK, overlap=overlap, **settings
    )
    runner = HashRunner()
    engine = runner.engine = Engine(config, runner)
    pool = engine._pool
    allocate = pool.allocate

    def checked(count: int) -> list[int]:
        blocks = allocate(count)
        assert not runner.touched() & set(blocks), "a launched step may still touch this block"
        return blocks

    pool.allocate = checked  # type: ignore[method-assign]
    return World(engine, runner)


@st.composite
def requests(draw: st.DrawFn, name: str) -> RequestSpec:
    prefix = draw(st.sampled_from([(), tuple(range(8)), tuple(range(13)), tuple(range(3, 20))]))
    own = draw(st.lists(st.integers(0, CURSED - 1), min_size=1, max_size=8))
    if draw(st.integers(0, 14)) == 0:
        own.append(CURSED if name == "r0" else BAD)  # when all raise, the worker is broken
    choices = draw(st.sampled_from([(0,), (0,), (0,), (1,), (0, 1), (0, 1, 2)]))
    params = SamplingParams(
        seed=0,
        temperature=0.0,
        max_tokens=draw(st.integers(1, 20)),
        stop_token_ids=frozenset(draw(st.sets(st.integers(0, CURSED - 1), max_size=2))),
    )
    leg = draw(st.sampled_from([Leg.COLOCATED, Leg.COLOCATED, Leg.PREFILL, Leg.DECODE]))
    return RequestSpec(name, leg, [*prefix, *own], params, choices=choices)


def handoff_call(world: World, spec: RequestSpec, kind: int) -> None:
    """What a handoff would do with this leg now, if anything."""
    engine, name = world.engine, spec.request_id
    if name in world.ended:
        return
    if spec.leg is Leg.PREFILL:
        if kind == 0:
            engine.admit(name)
        elif kind == 1 or name in world.prefilled:
            engine.end_prefill_leg(name, LegEndReason.HANDED_OFF)
    elif spec.leg is Leg.DECODE:
        request = engine._legs.requests.get(name)
        if request is None:
            return
        if request.phase.value == "parked":
            engine.may_credit(name)
            engine.assign(name)
        elif request.phase.value == "assigned" and kind == 1:
            blocks = request.sequences[0].pages
            busy = [b for b in blocks if engine._pool.references(b) == 1][:2]
            engine.end_decode_leg(name, LegEndReason.KV_LOST, quarantine=busy)
            engine.free_quarantined(busy)
        elif request.phase.value == "assigned":
            first = [
                FirstToken(choice, next_token(spec.prompt_tokens, choice), False)
                for choice in spec.choices
            ]
            engine.start_decode(name, first, LegTimings())


Event = tuple[str, int, int]
EVENTS = st.tuples(
    st.sampled_from(["submit", "submit", "handoff", "handoff", "step", "step", "step", "abort"]),
    st.integers(0, 11),  # whose
    st.integers(0, 7),  # how; of steps, even ones do not wait
)


def play(world: World, specs: list[RequestSpec], events: list[Event]) -> set[str]:
    """Let the events happen, then let everything end; returns what was cut short."""
    waiting = specs.copy()
    cut: set[str] = set()
    for name, which, kind in events:
        spec = specs[which % len(specs)]
        if name == "submit" and waiting:
            world.engine.submit(waiting.pop())
        elif name == "handoff":
            handoff_call(world, spec, kind)
            if kind == 1:
                cut.add(spec.request_id)
        elif name == "abort" and kind < 3:
            some = spec.choices[:kind]
            world.engine.abort(spec.request_id, some)
            cut.add(spec.request_id)
        elif name == "step" and world.engine.has_work():
            world.step(wait=kind % 2 == 1)
        world.engine.check()
    for spec in waiting:
        world.engine.submit(spec)
    while len(world.ended) < len(specs):
        for spec in specs:
            handoff_call(world, spec, 0)
            if spec.leg is Leg.PREFILL and spec.request_id in cut | world.prefilled:
                world.engine.end_prefill_leg(spec.request_id, LegEndReason.HANDED_OFF)
            request = world.engine._legs.requests.get(spec.request_id)
            if request is not None and request.cancelled:
                world.engine.end_decode_leg(spec.request_id, LegEndReason.ABORTED)
        world.step()
    while world.engine.has_work():
        world.step()
    assert world.engine.referenced_blocks == 0
    assert not world.runner.flying
    returned = (LegEndReason.RETURNED, LegEndReason.ABORTED, LegEndReason.KV_LOST)
    return cut | {name for name, reason in world.ended.items() if reason in returned}


@pytest.mark.timeout(240)
@settings(max_examples=searches.count(150))
@given(data=st.data())
def test_overlapping_steps_tell_what_steps_in_turn_tell(data: st.DataObject):
    specs = [data.draw(requests(f"r{i}")) for i in range(data.draw(st.integers(1, 9)))]
    events = data.draw(st.lists(EVENTS, max_size=60))
    values = {
        "num_blocks": data.draw(st.integers(20, 32)),
        "max_batched_tokens": data.draw(st.sampled_from([3, 8, 64])),
        "max_running_requests": data.draw(st.sampled_from([3, 6, 100])),
        "prefix_caching": data.draw(st.booleans()),
    }
    worlds = [make_world(overlap=overlap, **values) for overlap in (False, True)]
    cut = set().union(*(play(world, specs, events) for world in worlds))
    in_turn, overlapped = worlds
    for spec in specs:
        name = spec.request_id
        for choice in spec.choices:
            mine, other = (world.outputs[name, choice] for world in worlds)
            shorter = min(len(mine), len(other))
            assert mine[:shorter] == other[:shorter]
            if name not in cut:
                assert mine == other
                assert in_turn.finishes.get((name, choice)) == overlapped.finishes.get(
                    (name, choice)
                )
        if name not in cut:
            assert in_turn.ended[name] is overlapped.ended[name]
            if in_turn.ended[name] is not LegEndReason.FAILED:  # of a chunk that is none
                assert len(in_turn.announced[name]) == len(overlapped.announced[name])


def test_the_runner_would_notice_a_block_given_away_too_early():
    world = make_world(overlap=True, num_blocks=20)
    params = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    world.engine.submit(RequestSpec("a", Leg.COLOCATED, list(range(9)), params))
    world.step()
    sequence = world.engine._legs.requests["a"].sequences[0]
    sequence.flying = 0  # as if nothing were launched
    world.engine.abort("a")
    with pytest.raises(AssertionError, match="still touch"):
        world.engine._pool.allocate(3)


class SlowRunner(HashRunner):
    """Its steps are over when `over` says so."""

    over = False

    def landed(self, launched: Launched) -> bool:
        return self.over


def test_the_next_step_is_due_shortly_before_the_one_in_flight_ends() -> None:
    clock = [0.0]
    runner = SlowRunner()
    config = EngineConfig(
        max_model_len=MAX_LEN, vocab_size=VOCAB, block_size=BLOCK, num_blocks=40, overlap=True
    )
    engine = runner.engine = Engine(config, runner, lambda: clock[0])
    assert engine.due_in_s() == 0.0
    engine.submit(
        RequestSpec(
            "a", Leg.COLOCATED, [1] * 5, SamplingParams(seed=0, max_tokens=20, temperature=0)
        )
    )
    engine.step()
    assert engine.due_in_s() == 0.0, "nothing like it was measured"
    for now_s in (1.0, 2.0, 3.0):
        clock[0] = now_s
        engine.step()
    assert engine.due_in_s() == pytest.approx(1.0, abs=0.01)
    clock[0] = 3.6
    assert engine.due_in_s() == pytest.approx(0.4, abs=0.01)
    clock[0] = 4.0
    assert engine.due_in_s() == 0.0
    clock[0] = 3.6
    runner.over = True
    assert engine.due_in_s() == 0.0, "the device waits"


def test_a_device_that_waited_for_a_launch_is_given_the_next_one_earlier() -> None:
    clock = [0.0]
    runner = SlowRunner()
    config = EngineConfig(
        max_model_len=MAX_LEN, vocab_size=VOCAB, block_size=BLOCK, num_blocks=40, overlap=True
    )
    engine = runner.engine = Engine(config, runner, lambda: clock[0])
    params = SamplingParams(seed=0, max_tokens=30, temperature=0)
    engine.submit(RequestSpec("a", Leg.COLOCATED, [1] * 5, params))

    def due_after_steps(over: bool) -> float:
        for _ in range(4):
            runner.over = over
            clock[0] += 1.0
            engine.step()
        runner.over = False
        return engine.due_in_s()

    in_time_s = due_after_steps(over=False)
    assert due_after_steps(over=True) < in_time_s
    assert engine.due_in_s() < due_after_steps(over=False) < in_time_s


def test_how_long_before_a_decode_steps_end_the_next_one_was_planned_is_told() -> None:
    clock = [0.0]
    runner = SlowRunner()
    config = EngineConfig(
        max_model_len=MAX_LEN, vocab_size=VOCAB, block_size=BLOCK, num_blocks=40, overlap=True
    )
    engine = runner.engine = Engine(config, runner, lambda: clock[0])
    params = SamplingParams(seed=0, max_tokens=30, temperature=0)
    engine.submit(RequestSpec("a", Leg.COLOCATED, [1] * 5, params))
    engine.step()
    clock[0] = 1.0
    engine.step()  # collects the prompt's step
    assert engine.load().planned_ahead_s == 0.0
    for end_s in (2.0, 3.0, 4.0):
        clock[0] = end_s - 0.3
        engine.step(wait=False)  # plans the next one
        clock[0] = end_s
        engine.step()
    assert engine.load().planned_ahead_s == pytest.approx(0.3)


def test_a_step_that_is_not_over_is_collected_by_a_later_call() -> None:
    runner = SlowRunner()
    config = EngineConfig(
        max_model_len=MAX_LEN, vocab_size=VOCAB, block_size=BLOCK, num_blocks=40, overlap=True
    )
    engine = runner.engine = Engine(config, runner)
    params = SamplingParams(seed=0, max_tokens=20, temperature=0)
    engine.submit(RequestSpec("a", Leg.COLOCATED, [1] * 5, params))
    engine.step(wait=False)
    for _ in range(3):
        assert not engine.step(wait=False).outputs
        assert len(runner.flying) == 2, "launched again, or not at all"
        assert engine.has_work() and engine.due_in_s() > 0.0
    engine.submit(RequestSpec("b", Leg.COLOCATED, [2] * 5, params))
    runner.over = True
    assert engine.due_in_s() == 0.0
    assert [output.request_id for output in engine.step(wait=False).outputs] == ["a"]
    assert len(runner.flying) == 1, "the one in flight goes on; b is part of the next"
    engine.step(wait=False)
    assert {output.request_id for output in engine.step().outputs} == {"a", "b"}
