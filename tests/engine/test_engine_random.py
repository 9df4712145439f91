"""Random traffic over tiny pools: right tokens, nothing leaked, nothing stuck."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engine_fakes import VOCAB, expected, make_rig, spec
from engine_relay import Relay
from support import searches

from tasuki.engine.api import LegEndReason, RequestSpec
from tasuki.engine.cache_groups import ONE_GROUP, CacheGroup

MAX_LEN = 40
# Seeds of traffic that failed once; a failure prints what to add here.
REGRESSIONS: tuple[int, ...] = ()


def random_spec(rng: random.Random, name: str) -> RequestSpec:
    """A request; prompts begin with few different prefixes so that caches hit."""
    prefix = rng.choice([[], list(range(8)), list(range(13)), list(range(5, 25))])
    prompt = [*prefix, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 10)))]
    choices = rng.choice([(0,), (0,), (0,), (2,), (0, 1), (0, 1, 2)])
    resumed = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 0, 3]))]
    extra = rng.choice(
        [
            {},
            {},
            {"temperature": 0.0},
            {"temperature": 0.7, "top_k": 5},
            {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
            {"logprobs": 1},
            {"prompt_logprobs": 0},
            {"min_tokens": 3},
        ]
    )
    return spec(
        name,
        prompt,
        choices=choices if not resumed else choices[:1],
        resumed=resumed,
        max_tokens=rng.randint(len(resumed) + 1, 30),
        seed=rng.randrange(2**64),
        tenant=rng.choice(["", "", "other"]),
        **{
            "temperature": 1.0,
            "stop_token_ids": frozenset(rng.sample(range(VOCAB), rng.choice([0, 2]))),
            **extra,
        },
    )


def some_groups(seed: int) -> Sequence[CacheGroup]:
    """A third of the cases have layers with windows, some of these no others; a third states."""
    if seed % 3 == 0:
        return ONE_GROUP
    rng = random.Random(2000 + seed)
    if seed % 3 == 1:
        states = [CacheGroup((layer,), state_bytes=8) for layer in range(1, rng.choice([2, 3]))]
        return [CacheGroup((0,)), *states]
    windows = [rng.randint(1, 12) for _ in range(rng.choice([1, 1, 2]))]
    kinds = windows if rng.random() < 0.3 else [None, *windows]
    return [CacheGroup((layer,), window) for layer, window in enumerate(kinds)]


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(60, REGRESSIONS))
def test_one_engine(seed: int):
    with searches.case(seed):
        run_one_engine(seed)


def run_one_engine(seed: int) -> None:
    rng = random.Random(seed)
    groups = some_groups(seed)
    rig = make_rig(
        groups=groups,
        num_blocks=rng.randint(20, 40) * len(groups),
        max_model_len=MAX_LEN,
        max_batched_tokens=rng.choice([3, 8, 32]),
        max_running_requests=rng.choice([3, 6, 100]),
        prefix_caching=rng.random() < 0.8,
    )
    requests = [random_spec(rng, f"r{i}") for i in range(14)]
    aborted: set[tuple[str, int]] = set()
    waiting = requests.copy()
    while waiting or rig.engine.has_work():
        if waiting and rng.random() < 0.4:
            rig.engine.submit(waiting.pop())
        if rng.random() < 0.06:
            victim = rng.choice(requests)
            some = rng.sample(victim.choices, rng.randint(0, len(victim.choices)))
            rig.engine.abort(victim.request_id, some)
            aborted |= {(victim.request_id, choice) for choice in some or victim.choices}
        rig.step()
    for request in requests:
        end = rig.ended[request.request_id]
        assert end.reason in (LegEndReason.FINISHED, LegEndReason.ABORTED)
        for choice in request.choices:
            tokens, finish = expected(request, choice, MAX_LEN, groups)
            told = rig.tokens(request.request_id, choice)
            if (request.request_id, choice) in aborted:
                assert told == tokens[: len(told)]
            else:
                assert (told, rig.finish(request.request_id, choice)) == (tokens, finish)
    assert rig.engine.referenced_blocks == 0
    assert rig.engine.load().free_blocks == rig.engine.load().total_blocks


@pytest.mark.search
@pytest.mark.parametrize("seed", searches.seeds(80, REGRESSIONS))
def test_crossed_handoffs_between_tiny_pools(seed: int):
    with searches.case(seed):
        run_crossed_handoffs(seed)


def run_crossed_handoffs(seed: int) -> None:
    rng = random.Random(1000 + seed)
    groups = some_groups(seed // 2)
    most_blocks = 26 if seed % 2 else 64  # of two longest requests and some, or of six
    rigs = [
        make_rig(
            groups=groups,
            num_blocks=rng.randint(20, most_blocks) * len(groups),
            max_model_len=MAX_LEN,
            max_batched_tokens=rng.choice([3, 8, 32]),
            max_running_requests=rng.choice([3, 8]),
        )
        for _ in range(rng.choice([2, 2, 3]))
    ]
    relay = Relay(rigs, seed, impatience=0.01 if seed % 4 < 2 else 0.0)
    requests = [random_spec(rng, f"r{i}") for i in range(12)]
    waiting = requests.copy()
    aborted: set[str] = set()
    for _ in range(200_000):
        if waiting and rng.random() < 0.2:
            split = len(rigs) - 1 and rng.random() < 0.8
            source = rng.randrange(len(rigs))
            target = rng.choice([i for i in range(len(rigs)) if i != source]) if split else source
            relay.submit(waiting.pop(), source, target)
        elif rng.random() < 0.005:
            victim = rng.choice(requests)
            aborted.add(victim.request_id)
            relay.abort(victim.request_id)
        elif not relay.turn() and not waiting:
            break
    else:
        raise AssertionError(f"something never ends: {relay.handoffs}")
    cut = aborted | set(relay.refused) | set(relay.returned)
    for request in requests:
        for choice in request.choices:
            tokens, _ = expected(request, choice, MAX_LEN, groups)
            told = relay.tokens(request.request_id, choice)
            if request.request_id in cut:
                assert told == tokens[: len(told)]
            else:
                assert told == tokens
    for rig in rigs:
        assert rig.engine.referenced_blocks == 0
        load = rig.engine.load()
        assert load.free_blocks == load.total_blocks
        assert (load.waiting_requests, load.running_requests) == (0, 0)
