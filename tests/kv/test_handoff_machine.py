"""The handoff's two state machines in every order of events that we can afford.

Three searches over the world of `handoff_model.py`: random schedules with
faults by the thousand; all schedules of a tiny case that deviate from the
straight one at up to two points; and fault-free ones, where every request must
come through. Broken machines go through the same searches, which must catch
them: that is how we know that the searches can fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from broken_machines import BROKEN, RemembersTurns, WantIsNoRenewal
from handoff_model import LEASE_S, Action, Sides, Violation, World
from support import searches

from tasuki.kv.prefill_side import PrefillSide

# Half a percent fast or slow: far worse than real clocks, within the margin.
CLOCKS = ((0.0, 1.0), (5_000.0, 1.005), (-70.0, 0.995), (13.0, 1.0))

FAULTS = (
    "drop",
    "repeat",
    "overtake",
    "cut",
    "crash",
    "refuse",
    "pause",
    "resume",
    "unpost",
    "abort",
    "retarget",
)

RANDOM_SCHEDULES = 5_000
# Seeds of schedules that broke a rule once; a failure prints what to add here.
REGRESSIONS: tuple[int, ...] = ()
EVENTS = 120
# Tokens in a block of prefill and of decode engines.
SIZES = ((1, 1), (1, 3), (4, 2), (2, 3))


def random_schedule(seed: int, sides: Sides, events: int = EVENTS) -> World:
    """One life of a random world: chaos, then calm."""
    choose = random.Random(seed)
    ahead = seed % 3 == 2
    engines_of_each = choose.choice((1, 1, 2)), choose.choice((1, 2, 2))
    blocks = choose.choice((3, 4, 6)) + (3 if ahead else 0)
    sizes = SIZES[seed // 6 % len(SIZES)]
    world = World(
        sides,
        *engines_of_each,
        sizes=sizes,
        blocks=blocks,
        most_ahead=max(0, blocks - 6) if ahead else 0,  # N - 2M, as in engine/budget.py
        clocks=[choose.choice(CLOCKS) for _ in range(4)],
        two_threads=seed % 2 == 0,  # the others go deeper
    )
    for number in range(choose.randint(1, 4)):
        total = choose.randint(1, 3 * min(sizes))  # at most 3 blocks on either side
        world.place(
            f"r{number}",
            total,
            choose.choice((0, 0, choose.randint(0, total))),
            choose.choice(world.prefills).engine_id,
            choose.choice(world.decodes).engine_id,
            finished_at_once=choose.random() < 0.1,
        )
    fault_rate = choose.choice((0.0, 0.03, 0.1, 0.25))
    swarm = choose.sample(FAULTS, choose.choice((2, 3, len(FAULTS))))  # few kinds go deeper
    delay_rate = choose.choice((0.02, 0.1, 0.3))
    for _ in range(events):
        dice = choose.random()
        if dice < fault_rate:
            possible = list(world.faults())
            kinds = {fault.kind for fault in possible}
            kind = choose.choice([kind for kind in swarm if kind in kinds] or [""])
            possible = [fault for fault in possible if fault.kind == kind]
        elif dice < fault_rate + delay_rate:
            possible = list(world.delays())
        else:
            possible = list(world.actions()) or list(world.delays())
        if possible:
            choose.choice(possible).run()
        for tick in list(world.ticks()) if dice < fault_rate + delay_rate else ():
            if choose.random() < 0.3:
                tick.run()
    engines = [node.engine_id for node in (*world.prefills, *world.decodes)]
    world.settle(frozen=choose.choice(engines) if choose.random() < 0.2 else "")
    return world


def tiny_world(sides: Sides, blocks: int, most_ahead: int) -> World:
    """One request, two decode engines to choose from."""
    world = World(sides, num_prefill=1, num_decode=2, blocks=blocks, most_ahead=most_ahead)
    world.place("r", blocks, 0, world.prefills[0].engine_id, world.decodes[0].engine_id)
    return world


def deviations(world: World) -> Iterator[Action]:
    """What may happen instead of the straight next action, to engines that are concerned."""
    unconcerned = {node.engine_id for node in world.decodes if node.side.idle}
    yield from list(world.actions())[1:]
    for action in (*world.faults(), *world.ticks()):
        if not unconcerned & set(action.name.split()):
            yield action
    yield Action("0.6 leases pass", lambda: world.pass_time(0.6 * LEASE_S))
    yield Action("1.1 leases pass", lambda: world.pass_time(1.1 * LEASE_S))


def run_with(
    sides: Sides, plan: dict[int, int], blocks: int, most_ahead: int, count: bool
) -> list[int]:
    """Run the tiny world, deviating at step i to alternative plan[i].

    Returns:
        How many alternatives each step had, if they are to be counted.
    """
    world = tiny_world(sides, blocks, most_ahead)
    counts = []
    for step in range(100):
        if step in plan:
            list(deviations(world))[plan[step]].run()
            counts.append(0)
            continue
        if count:
            counts.append(sum(1 for _ in deviations(world)))
        straight = next(world.actions(), None)
        if straight is None:
            break
        straight.run()
    world.settle()
    return counts


def exhaustive(sides: Sides, blocks: int, depth: int, most_ahead: int = 0) -> int:
    """All runs of the tiny world with up to `depth` deviations. Returns how many."""
    runs = 0
    frontier: list[dict[int, int]] = [{}]
    while frontier:
        plan = frontier.pop()
        counts = run_with(sides, plan, blocks, most_ahead, count=len(plan) < depth)
        runs += 1
        for step in range(max(plan, default=-1) + 1, len(counts) if len(plan) < depth else 0):
            frontier.extend({**plan, step: other} for other in range(counts[step]))
    return runs


@pytest.mark.search
@pytest.mark.parametrize("part", range(5))
def test_random_schedules_keep_the_rules(part: int) -> None:
    for seed in searches.seeds(RANDOM_SCHEDULES, REGRESSIONS)[part::5]:
        with searches.case(seed):
            random_schedule(seed, Sides())


def test_random_schedules_reach_every_ending() -> None:
    decoded = given_up = retargeted = ordered_ahead = answered_ahead = computed_ahead = 0
    for seed in range(200):
        world = random_schedule(seed, Sides())
        ordered_ahead += world.ordered_ahead
        answered_ahead += world.answered_ahead
        computed_ahead += world.computed_ahead
        for request in world.requests.values():
            decoded += request.decoded
            given_up += not request.decoded and not request.finished_at_once
            retargeted += request.retargets_left < 2 and request.decoded
    assert decoded > 50
    assert given_up > 50
    assert retargeted > 3
    assert ordered_ahead > 10
    assert answered_ahead > 10
    assert computed_ahead > 50


@pytest.mark.parametrize(("blocks", "depth"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_few_deviations_in_a_tiny_case_keep_the_rules(
    blocks: int, depth: int, ahead: bool
) -> None:
    runs = exhaustive(Sides(), blocks, depth, most_ahead=blocks if ahead else 0)
    assert runs > (8_000 if depth == 2 else 250)


def without_faults(seed: int, blocks: int, most_ahead: int) -> World:
    """Eight requests between two prefill and two decode engines, in a random order.

    Raises:
        Violation: one never decodes.
    """
    choose = random.Random(seed)
    sizes = SIZES[seed % len(SIZES)]
    world = World(
        Sides(),
        num_prefill=2,
        num_decode=2,
        blocks=blocks,
        clocks=CLOCKS,
        most_ahead=most_ahead,
        sizes=sizes,
    )
    for number in range(8):
        world.place(
            f"r{number}",
            choose.randint(1, 3 * min(sizes)),
            0,
            choose.choice(world.prefills).engine_id,
            choose.choice(world.decodes).engine_id,
        )
    for _ in range(20_000):
        possible = list(world.actions())
        if possible:
            choose.choice(possible).run()
            continue
        if not world.stranded():
            break
        deadline_s = world.next_deadline_s()
        if deadline_s is None:
            raise Violation(f"deadlock: {world.stranded()}")
        world.now_s = max(world.now_s, deadline_s + 1e-6)
        for tick in world.ticks():
            tick.run()
    late = [r.request_id for r in world.requests.values() if not r.decoded]
    if late:
        raise Violation(f"{late} never decoded")
    return world


@pytest.mark.search
@pytest.mark.parametrize(("blocks", "most_ahead"), [(3, 0), (9, 3), (7, 1)])
def test_without_faults_every_request_decodes(blocks: int, most_ahead: int) -> None:
    """`most_ahead` is N - 2M, as in engine/budget.py."""
    computed_ahead = 0
    for seed in searches.seeds(300):
        with searches.case(seed):
            computed_ahead += without_faults(seed, blocks, most_ahead).computed_ahead
    assert (computed_ahead > 0) is (most_ahead > 0)


@pytest.mark.search
def test_to_fill_a_pool_ahead_of_credit_is_a_deadlock() -> None:
    with pytest.raises(Violation, match=r"never decoded|deadlock"):
        for seed in searches.seeds(300):
            without_faults(seed, blocks=3, most_ahead=3)


def _name(sides: Sides) -> str:
    return (sides.decode if sides.prefill is PrefillSide else sides.prefill).__name__


@pytest.mark.slow
@pytest.mark.parametrize("sides", BROKEN, ids=_name)
def test_a_broken_machine_is_caught(sides: Sides) -> None:
    with pytest.raises(Violation):
        for seed in range(RANDOM_SCHEDULES):
            random_schedule(seed, sides)
        exhaustive(sides, blocks=1, depth=2)


# Two faults so deep that no search of ours comes upon them: their schedules by hand.


def do(world: World, *names: str) -> None:
    """What is called so, one after the other."""
    for name in names:
        possible = [*world.actions(), *world.ticks()]
        next(action for action in possible if action.name == name).run()


def hand_over(sides: Sides) -> World:
    """The first of two blocks is announced to d2, which may no longer have it: d3 may.

    d2's questions are numbered 1 to 4. d3's want, its number 1, is heard 0.6
    leases after the lease was granted to it, and so is what answers it.
    """
    world = World(sides, num_prefill=1, num_decode=2, blocks=2)
    world.place("r", 2, 0, "p1", "d2")
    do(world, "p1 submit r", "d2 submit r", "d2 dials p1")
    world.pass_time(0.2 * LEASE_S)
    do(world, "d2 beats", *["p1 hears d2"] * 4, "p1 steps r")
    world.retarget("r")
    do(world, "p1 retarget r d3")
    world.pass_time(0.6 * LEASE_S)
    do(world, "d3 submit r", "d3 dials p1", "p1 hears d3")
    world.stream("d3", "p1").to_prefill.clear()  # the renewal that came with it
    do(world, *["d3 hears p1"] * len(world.stream("d3", "p1").to_decode))
    assert len(world.decodes[1].side._handoffs["r"].remote[0].blocks) == 1
    return world


def a_want_renews(sides: Sides) -> None:
    """1.1 leases after the grant: the want that was heard since has moved the lease's end."""
    world = hand_over(sides)
    world.pass_time(0.5 * LEASE_S)
    do(world, "p1 ticks")
    world.settle()


def each_turn_has_its_own_numbers(sides: Sides) -> None:
    """d3's questions up to number 4 get lost. Then the second block is announced to it."""
    world = hand_over(sides)
    world.pass_time(0.5 * LEASE_S)
    do(world, "d3 beats")
    world.pass_time(0.2 * LEASE_S)
    do(world, "d3 beats")
    world.stream("d3", "p1").to_prefill.clear()
    do(world, "p1 steps r", *["d3 hears p1"] * 2)
    world.pass_time(0.4 * LEASE_S)
    do(world, "p1 ticks")
    world.settle()


@pytest.mark.parametrize("schedule", [a_want_renews, each_turn_has_its_own_numbers])
def test_deep_schedules_keep_the_rules(schedule: Callable[[Sides], None]) -> None:
    schedule(Sides())


@pytest.mark.parametrize(
    ("schedule", "sides"),
    [
        (a_want_renews, Sides(prefill=WantIsNoRenewal)),
        (each_turn_has_its_own_numbers, Sides(prefill=RemembersTurns)),
    ],
)
def test_deep_faults_are_caught(schedule: Callable[[Sides], None], sides: Sides) -> None:
    with pytest.raises(Violation, match="frees r while"):
        schedule(sides)
