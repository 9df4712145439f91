"""The line that says what a worker does."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import replace

import pytest
from support.deployment import Deployment
from support.waiting import until

from tasuki.engine.stats import EngineCounters, EngineLoad
from tasuki.kv.config import HandoffCounters
from tasuki.worker.state_log import State, StateLog

LOAD = EngineLoad(
    waiting_requests=0,
    running_requests=0,
    waiting_prefill_tokens=0,
    free_blocks=100,
    total_blocks=100,
    leased_blocks=0,
    quarantined_blocks=0,
    prefill_tokens_per_s=0.0,
    decode_step_s=0.0,
    running_sequences=0,
    running_kv_tokens=0,
    waiting_sequences=0,
    waiting_kv_tokens=0,
    awaited_sequences=0,
    planned_ahead_s=0.0,
    last_decode=None,
    last_prefill=None,
)
IDLE = State(LOAD, EngineCounters(), HandoffCounters())
BUSY = State(
    replace(
        LOAD, running_requests=3, waiting_requests=2, waiting_prefill_tokens=640, free_blocks=75
    ),
    EngineCounters(
        prompt_tokens_computed=300,
        prompt_tokens_cached=100,
        output_tokens=50,
        draft_tokens=20,
        accepted_draft_tokens=15,
    ),
    HandoffCounters(kv_pulled_bytes=40_000_000, kv_pulls=4, leases_granted=7),
)


class Script:
    """What a worker does, as a log of it sees it."""

    def __init__(self, interval_s: float) -> None:
        self.state = IDLE
        self._log = StateLog(interval_s, lambda: self.state)

    def lines(self, caplog: pytest.LogCaptureFixture, *ticks: float) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO, "tasuki.worker.state_log"):
            for tick in ticks:
                self._log.tick(tick)
        return caplog.messages


def test_a_line_tells_what_was_done_since_the_last(caplog: pytest.LogCaptureFixture):
    script = Script(10.0)
    assert script.lines(caplog, 100.0) == []
    script.state = BUSY
    assert script.lines(caplog, 105.0, 109.0, 110.0) == [
        "3 running, 2 waiting (640 prompt tokens), 30 prompt tok/s, 5 output tok/s, "
        "KV 25% of 100 blocks, 25% of prompt tokens cached, 7 handed over, 4 pulls, "
        "4.0 MB/s of KV, 75% of 20 draft tokens accepted"
    ]
    [again] = script.lines(caplog, 115.0, 120.0)
    assert "0 prompt tok/s, 0 output tok/s" in again and "pulls" not in again


def test_there_is_one_line_when_work_has_ended(caplog: pytest.LogCaptureFixture):
    script = Script(10.0)
    script.lines(caplog, 0.0)
    script.state = BUSY
    assert len(script.lines(caplog, 10.0)) == 1
    script.state = replace(BUSY, load=LOAD)
    [end] = script.lines(caplog, 20.0)
    assert end.startswith("idle: 0 running")
    assert script.lines(caplog, 30.0, 40.0) == []


def test_work_between_two_looks_is_told(caplog: pytest.LogCaptureFixture):
    script = Script(10.0)
    script.lines(caplog, 0.0)
    script.state = replace(BUSY, load=LOAD)
    [told] = script.lines(caplog, 10.0)
    assert told.startswith("idle: ") and "30 prompt tok/s" in told


def test_without_an_interval_there_is_none(caplog: pytest.LogCaptureFixture):
    script = Script(0.0)
    script.state = BUSY
    assert script.lines(caplog, 0.0, 10.0, 1000.0) == []


OF_A_WORKER = re.compile(
    r"INFO worker=(\S+) role=(\w+) (?:idle: )?\d+ running, \d+ waiting \(\d+ prompt tokens\), "
    r"(\d+) prompt tok/s, (\d+) output tok/s, KV \d+% of \d+ blocks(.*)"
)


@pytest.mark.system
def test_workers_under_load_say_what_they_do(tiny: Deployment) -> None:
    logs = {name: worker.process for name, worker in tiny.workers.items()}
    before = {name: len(log.output()) for name, log in logs.items()}

    def told(name: str) -> list[re.Match[str]]:
        return list(OF_A_WORKER.finditer(logs[name].output()[before[name] :]))

    prompts = itertools.cycle([token] * 120 for token in range(5, 500))

    # The interval is 10 s, and a line may stand for the end of an earlier test's work.
    def handed_over() -> bool:
        tiny.http.complete(next(prompts), max_tokens=16)
        prefill, decode = (told(name) for name in ("prefill-0", "decode-0"))
        return any(" handed over" in line[5] for line in prefill) and any(
            int(line[4]) > 0 and " pulls, " in line[5] for line in decode
        )

    until(handed_over, "a line of each worker", deadline_s=40)
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        assert {line.group(1, 2) for line in told(name)} == {(name, role)}
