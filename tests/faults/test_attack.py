"""Sixteen honest streams go on while the router is attacked in every way at once.

A longer and harder attack, with its figures:

    TASUKI_ATTACK_CONNECTIONS=400 TASUKI_ATTACK_CROWDS=20 \\
        python -m pytest tests/faults/test_attack.py -s --timeout 1800
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import attack
from support.client import Answer, request_body
from support.crowd import Crowd
from support.deployment import Deployment, Options
from support.processes import environment
from support.reference import Reference
from support.waiting import until

pytestmark = pytest.mark.faults

CONNECTIONS = int(os.environ.get("TASUKI_ATTACK_CONNECTIONS", "120"))  # of each way to hold them
CROWDS = int(os.environ.get("TASUKI_ATTACK_CROWDS", "2"))  # of sixteen streams, under attack
LIMIT_S = 2  # of idle connections and of bodies, in place of 30
STOP_REQUESTS = 60
# Before stop strings were shared by a request's choices, these 60 requests took 530 MB.
STOP_GROWTH_BYTES = 100e6
# On two cores that the attackers, the router and two workers share.
MOST_TOKEN_TIME_RATIO = 8.0


@pytest.fixture(scope="module")
def system(tiny_model: Path, deploy_for_module: Callable[[Options], Deployment]) -> Deployment:
    limits = ("--idle-timeout-s", str(LIMIT_S), "--body-timeout-s", str(LIMIT_S))
    room = ("--max-concurrent-requests", str(STOP_REQUESTS * 64))
    worker = ("--kv-memory", "50000000")
    return deploy_for_module(
        Options(tiny_model, prefill=1, decode=1, worker=worker, router=(*limits, *room))
    )


@dataclass
class Attackers:
    """A running attack; `counts` are there once it has ended."""

    process: subprocess.Popen[str]
    counts: dict[str, int]


@contextmanager
def attacked(system: Deployment) -> Iterator[Attackers]:
    command = [sys.executable, attack.__file__, system.url, system.model]
    process = subprocess.Popen(
        [*command, "--seconds", "1800", "--connections", str(CONNECTIONS)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    attackers = Attackers(process, {})
    try:
        yield attackers
        process.terminate()
        output, _ = process.communicate(timeout=60)
        attackers.counts.update(json.loads(output))
    finally:
        process.kill()
        process.wait(60)


def token_time_s(answers: list[Answer]) -> float:
    """Mean time between two tokens of a stream, of the median stream."""
    times = [(a.arrivals_s[-1] - a.arrivals_s[0]) / (len(a.arrivals_s) - 1) for a in answers]
    return statistics.median(times)


def longest_gap_s(answers: list[Answer]) -> float:
    """The longest time without a token, of the median stream."""
    gaps = (zip(a.arrivals_s, a.arrivals_s[1:], strict=False) for a in answers)
    return statistics.median(max(b - a for a, b in each) for each in gaps)


def test_stop_strings_of_many_choices_cost_little_memory(system: Deployment) -> None:
    """60 requests of 16 KB, with 16 stop strings for each of 64 choices, at once.

    The first test of the module: memory that the attack leaves free would hide a growth.
    """
    stops = [chr(ord("a") + i) * 1000 for i in range(16)]
    assert system.router is not None
    release = threading.Event()

    def hold() -> int:
        path, body = request_body("x", n=64, max_tokens=4000, stop=stops, stream=True)
        body["model"] = system.model
        with system.http.http.stream("POST", path, json=body) as response:
            release.wait(120)
            return response.status_code

    before = system.router.anonymous_bytes()
    threads = [threading.Thread(target=hold, daemon=True) for _ in range(STOP_REQUESTS)]
    for thread in threads:
        thread.start()
    until(
        lambda: system.metrics().sum("tasuki_requests_in_flight") == STOP_REQUESTS,
        lambda: f"{STOP_REQUESTS} requests in flight\n{system.logs()}",
        deadline_s=60,
    )
    grown = system.router.anonymous_bytes() - before
    release.set()
    for thread in threads:
        thread.join(120)
    print(f"the router has grown by {grown / 1e6:.0f} MB")
    assert grown < STOP_GROWTH_BYTES
    system.wait_idle(deadline_s=120)


def test_honest_streams_go_on_undisturbed(system: Deployment, sixteen: list[Reference]) -> None:
    Crowd(system, sixteen).start().finish()  # warms up
    quiet = Crowd(system, sixteen).start().finish()
    with attacked(system) as attackers:
        # Not before the limits have struck for the first time: all ways are under way.
        until(lambda: http_errors(system, "408") >= CONNECTIONS, "slow bodies ended", deadline_s=60)
        disturbed = [Crowd(system, sixteen).start().finish() for _ in range(CROWDS)]
    under_attack = [answer for crowd in disturbed for answer in crowd]
    ratio = token_time_s(under_attack) / token_time_s(quiet)
    longest = longest_gap_s(under_attack) / longest_gap_s(quiet)
    counts = attackers.counts
    print(f"under attack / quiet: token time {ratio:.2f}, longest gap {longest:.2f}; {counts}")
    for way in ("slow_body.408", "slow_header.closed", "idle.closed"):
        assert counts.get(way, 0) >= CONNECTIONS, (way, counts)
    for way in ("echo.400", "oversize.413", "flood.200", "amplify.200"):
        assert counts.get(way, 0) > 0, (way, counts)
    assert not [way for way in counts if ".5" in way and not way.endswith(".503")], counts
    assert ratio < MOST_TOKEN_TIME_RATIO
    system.check_idle()


def http_errors(system: Deployment, status: str) -> float:
    """Answers of this status; a counter that never counted is not there."""
    found = system.metrics().find("tasuki_http_errors_total", code=status)
    return sum(sample.value for sample in found)
