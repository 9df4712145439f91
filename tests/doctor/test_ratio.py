"""Queues on one side and room on the other, and what only looks like it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from support.pictures import found, scrapes, unseen, worker

from tasuki.doctor.checks import CHECKS
from tasuki.doctor.picture import Engine, Fleet, Router


def sides(prefill: Mapping[str, float], decode: Mapping[str, float]) -> Fleet:
    return Fleet(
        [
            worker("p", *[prefill] * 6, role="prefill"),
            worker("d", *[decode] * 6, role="decode"),
        ]
    )


WAITS = {"running": 4.0, "waiting": 25.0, "kv_used": 0.95}
ROOM = {"running": 1.0, "waiting": 0.0, "kv_used": 0.1}
IDLE = {"running": 0.0, "waiting": 0.0, "kv_used": 0.0}


def test_a_queue_on_one_side_and_room_on_the_other_is_a_wrong_ratio() -> None:
    assert "wait for prefill" in found("ratio", sides(WAITS, ROOM))[0]
    assert "wait for decode" in found("ratio", sides(IDLE, WAITS))[0]


@pytest.mark.parametrize(("prefill", "decode"), [(WAITS, WAITS), (ROOM, ROOM), (IDLE, IDLE)])
def test_queues_on_both_sides_or_on_none_are_no_wrong_ratio(
    prefill: Mapping[str, float], decode: Mapping[str, float]
) -> None:
    assert not found("ratio", sides(prefill, decode))


def test_prompts_that_come_one_at_a_time_keep_prefill_busy_whatever_the_gauge_shows() -> None:
    shown = [{**IDLE, "running": float(now % 2), "ttft_sum": 2.0 * now} for now in range(6)]
    fleet = sides(ROOM, ROOM)
    fleet.workers[0] = worker("p", *shown, role="prefill")
    waiting = [{"admission_waiting": 20.0}] * 6
    fleet.routers = [Router("r", "tasuki", scrapes=scrapes(*waiting))]
    assert "wait for prefill" in found("ratio", fleet)[0]
    quick = [{**each, "ttft_sum": 0.1 * each["ttft_sum"]} for each in shown]
    fleet.workers[0] = worker("p", *quick, role="prefill")
    assert not found("ratio", fleet)


def test_mixed_workers_have_no_ratio_and_hide_no_role() -> None:
    fleet = Fleet([worker("p", role="prefill", engine="tasuki"), worker("v", engine="vllm")])
    assert "say the others'" in unseen("ratio", fleet)
    fleet.workers[1] = worker("m", role="mixed", engine="tasuki")
    assert not unseen("ratio", fleet)


def test_what_waits_on_decode_for_its_kv_is_no_queue_of_decode() -> None:
    fleet = sides(WAITS, {**ROOM, "waiting": 9.0, "waiting_capacity": 0.0})
    assert "wait for prefill" in found("ratio", fleet)[0]


def test_what_the_fleets_own_log_says_is_the_remedy() -> None:
    fleet = sides(WAITS, ROOM)
    fleet.advice = "2:1 would give +18%, from your own log"
    assert CHECKS["ratio"](fleet).findings[0].remedy == fleet.advice


def test_a_ratio_is_judged_for_each_model() -> None:
    fleet = sides(WAITS, ROOM)
    for other in sides(IDLE, IDLE).workers:
        other.model, other.name = "n", f"{other.name} of n"
        fleet.workers.append(other)
    (finding,) = CHECKS["ratio"](fleet).findings
    assert finding.what.startswith("1 prefill : 1 decode of m is the wrong ratio")
    assert finding.workers == ("p",)
    assert len(CHECKS["ratio"](fleet).looked_at) == 2


@pytest.mark.parametrize("engine", ["vllm", "tasuki"])
def test_few_requests_say_nothing_of_the_ratio(engine: Engine) -> None:
    """Requests that ended, ran or waited count, wherever the engine counts them."""
    for ended, findings in ((5.0, 0), (20.0, 1)):
        few = [{**WAITS, "waiting": 3.0, "requests": ended * now / 5} for now in range(6)]
        fleet = sides(WAITS, ROOM)
        fleet.workers[0] = worker("p", *few, engine=engine, role="prefill")
        fleet.workers[1].engine = engine
        if engine == "tasuki":
            shown = [{"requests": each.pop("requests")} for each in few]
            fleet.routers = [Router("r", "tasuki", scrapes=scrapes(*shown))]
        assert len(found("ratio", fleet)) == findings, ended
        assert ("12 ended, ran or waited, where 15 are needed" in unseen("ratio", fleet)) == (
            not findings
        )


def long_prompts(draw: random.Random, load: float, prompt_s: float) -> Sequence[dict[str, float]]:
    """What a prefill server shows within 10 s of prompts that come at random."""
    ended_s, at_s, served = 0.0, 0.0, []
    while at_s < 60 * prompt_s + 10:
        at_s += draw.expovariate(load / prompt_s)
        begun_s = max(at_s, ended_s)
        ended_s = begun_s + prompt_s * draw.uniform(0.2, 1.8)
        served.append((at_s, begun_s, ended_s))
    return [
        {
            "running": float(sum(begun <= now < ended for _, begun, ended in served)),
            "waiting": float(sum(came <= now < begun for came, begun, _ in served)),
            "requests": float(sum(ended <= now for *_, ended in served)),
            "ttft_sum": sum(ended - came for came, _, ended in served if ended <= now),
        }
        for now in (60 * prompt_s + 10 * step / 7 for step in range(8))
    ]


@pytest.mark.parametrize(("load", "most", "least"), [(0.6, 3, 0), (1.3, 100, 85)])
def test_a_burst_of_long_prompts_is_no_wrong_ratio(load: float, most: int, least: int) -> None:
    draw = random.Random(7)
    accused = 0
    for _, prompt_s in itertools.product(range(25), (0.5, 1.0, 2.0, 4.0)):
        fleet = sides(ROOM, ROOM)
        moments = [{**each, "kv_used": 0.1} for each in long_prompts(draw, load, prompt_s)]
        fleet.workers[0] = worker("p", *moments, role="prefill")
        fleet.workers[0].scrapes.times_s = [10 * step / 7 for step in range(8)]
        fleet.workers[1] = worker("d", *[ROOM] * 8, role="decode")
        accused += len(found("ratio", fleet))
    assert least <= accused <= most
