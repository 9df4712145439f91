"""The search against a simulated server whose true answer is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import searches

from tasuki.bench.errors import BenchError
from tasuki.bench.goodput import (
    Probe,
    SearchSettings,
    Verdict,
    interval,
    judge,
    next_rate,
    next_runs,
)


def attainment(rate: float, limit: float, steepness: float) -> float:
    """Falls with the rate; 0.9 exactly at `limit`."""
    return 1.0 / (1.0 + math.exp(steepness * math.log(rate / limit)) / 9.0)


def search(
    config: SearchSettings, limit: float, steepness: float, seed: int, burst: int = 1
) -> list[Probe]:
    """Runs the search; outcomes come in bursts of `burst` equal ones."""
    draw = random.Random(seed)
    probes: dict[float, Probe] = {}
    while (todo := next_runs(config, tuple(probes.values()))) is not None:
        rate, looks = todo
        share = attainment(rate, limit, steepness)
        for look in looks:
            count = config.requests(rate, look)
            blocks = [draw.random() < share for _ in range(-(-count // burst))]
            outcomes = [met for met in blocks for _ in range(burst)][:count]
            verdict = judge(config, outcomes)
            if verdict is not Verdict.UNDECIDED:
                break
        met = sum(outcomes) / count
        probes[rate] = Probe(rate, count, met, met * rate, verdict, look)
    return list(probes.values())


@settings(max_examples=searches.count(150))
@given(
    limit=st.floats(0.05, 300.0),
    start=st.floats(0.1, 100.0),
    steepness=st.floats(3.0, 30.0),
    target=st.sampled_from([0.5, 0.9, 0.99]),
    seed=st.integers(0, 2**32),
)
def test_it_ends_within_its_probes_and_never_repeats_a_rate(
    limit: float, start: float, steepness: float, target: float, seed: int
) -> None:
    config = SearchSettings(attainment=target, start_rate=start)
    probes = search(config, limit, steepness, seed)
    assert len(probes) <= config.max_probes
    assert len({p.rate for p in probes}) == len(probes)
    low, high = interval(probes)
    assert low < high


def test_the_answer_holds_the_truth_as_often_as_stated() -> None:
    config = SearchSettings(confidence=0.9, start_rate=1.0)
    wrong = 0
    for seed in range(200):
        limit = 2.0 ** random.Random(seed).uniform(-3, 6)
        low, high = interval(search(config, limit, 8.0, seed))
        wrong += not low <= limit <= high
    assert wrong <= 20  # 10% of 200; the sum of errors is a bound, so far fewer are expected


@pytest.mark.parametrize("burst", [5, 20])
def test_bursts_of_late_requests_do_not_make_it_overconfident(burst: int) -> None:
    config = SearchSettings(confidence=0.9, min_requests=200)
    wrong = 0
    for seed in range(150):
        low, high = interval(search(config, 4.0, 8.0, seed, burst))
        wrong += not low <= 4.0 <= high
    assert wrong <= 15


@pytest.mark.parametrize("target", [0.98, 0.99, 0.999])
def test_a_high_attainment_can_be_shown(target: float) -> None:
    config = SearchSettings(attainment=target)
    truth = 4.0 * (9.0 * (1.0 / target - 1.0)) ** (1.0 / 8.0)
    for seed in range(10):
        low, high = interval(search(config, 4.0, 8.0, seed))
        assert 0.0 < low <= truth <= high


def test_a_clear_server_is_found_to_the_precision() -> None:
    config = SearchSettings(precision=0.1, max_probes=20)
    probes = search(config, 10.0, 400.0, seed=3)
    low, high = interval(probes)
    assert low <= 10.0 <= high
    assert high / low <= 1.1


def test_it_starts_where_told_doubles_and_halves() -> None:
    config = SearchSettings(start_rate=3.0)

    def tried(rate: float, verdict: Verdict) -> Probe:
        return Probe(rate, 100, 0.5, 1.0, verdict)

    assert next_rate(config, []) == 3.0
    assert next_rate(config, [tried(3.0, Verdict.MEETS)]) == 6.0
    assert next_rate(config, [tried(3.0, Verdict.FAILS)]) == 1.5
    assert next_rate(config, [tried(3.0, Verdict.UNDECIDED)]) == 6.0
    both = [tried(4.0, Verdict.MEETS), tried(9.0, Verdict.FAILS)]
    assert next_rate(config, both) == pytest.approx(6.0)
    # An undecided rate stays inside; the wider gap beside it is halved.
    assert next_rate(config, [*both, tried(5.0, Verdict.UNDECIDED)]) == pytest.approx(45**0.5)


def test_the_answer_is_run_again_as_long_as_the_last_look() -> None:
    config = SearchSettings(max_probes=2)
    failed = Probe(9.0, 100, 0.1, 1.0, Verdict.FAILS)
    met = Probe(4.0, 100, 1.0, 4.0, Verdict.MEETS)
    assert next_runs(config, []) == (config.start_rate, range(3))
    assert next_runs(config, [met, failed]) == (4.0, range(2, 3))
    assert next_runs(config, [Probe(4.0, 400, 1.0, 4.0, Verdict.MEETS, 2), failed]) is None
    assert next_runs(config, [failed, Probe(4.0, 400, 0.9, 3.6, Verdict.UNDECIDED, 2)]) is None


def test_it_gives_up_where_nothing_meets_and_where_everything_does() -> None:
    config = SearchSettings(max_probes=100)
    always = search(config, 1e9, 5.0, seed=1)
    assert interval(always)[1] == math.inf
    assert max(p.rate for p in always) == 1024.0
    never = search(config, 1e-9, 5.0, seed=1)
    assert interval(never)[0] == 0.0
    assert min(p.rate for p in never) == 1 / 1024


def test_a_meeting_rate_above_a_failing_one_is_not_believed() -> None:
    probes = [
        Probe(1.0, 100, 1.0, 1.0, Verdict.MEETS),
        Probe(2.0, 100, 0.1, 0.2, Verdict.FAILS),
        Probe(4.0, 100, 1.0, 4.0, Verdict.MEETS),
    ]
    assert interval(probes) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("met", "total", "verdict"),
    [
        (400, 400, Verdict.MEETS),
        (0, 20, Verdict.FAILS),
        (90, 100, Verdict.UNDECIDED),
        (0, 0, Verdict.UNDECIDED),
        (10, 10, Verdict.UNDECIDED),  # too few to be sure of 0.9
    ],
)
def test_a_run_is_judged_by_its_bound(met: int, total: int, verdict: Verdict) -> None:
    outcomes = [True] * met + [False] * (total - met)
    random.Random(0).shuffle(outcomes)
    assert judge(SearchSettings(), outcomes) is verdict


def test_late_requests_in_a_row_count_for_less_than_as_many_apart() -> None:
    outcomes = [index % 250 < 240 for index in range(500)]  # 96%
    assert judge(SearchSettings(), outcomes) is Verdict.UNDECIDED
    random.Random(0).shuffle(outcomes)
    assert judge(SearchSettings(), outcomes) is Verdict.MEETS


def test_every_bound_of_a_search_has_its_share_of_the_error() -> None:
    assert SearchSettings(confidence=0.9, max_probes=5, looks=2).error == pytest.approx(0.01)


def test_runs_last_long_enough_at_high_rates_and_double() -> None:
    config = SearchSettings(min_requests=100, min_probe_s=20.0)
    assert [config.requests(1.0, look) for look in range(3)] == [100, 200, 400]
    assert config.requests(50.0, 0) == 1000


@pytest.mark.parametrize("wrong", [{"attainment": 1.0}, {"confidence": 0.2}, {"start_rate": 0.0}])
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(BenchError, match=f"{name} is .*use a value from"):
        SearchSettings(**wrong)  # type: ignore[arg-type]
