"""A split request: KV really moves, exactly once, and only what decode lacks."""

from __future__ import annotations

import random
from statistics import median

import pytest
from support.deployment import Deployment
from support.models import VOCAB_SIZE

BLOCK = 16
# Layers, K and V, KV heads, head size, tokens, bytes of float32.
BLOCK_BYTES = 3 * 2 * 2 * 16 * BLOCK * 4
PER_REQUEST = (
    "prompt_tokens_computed",
    "kv_pulled_blocks",
    "kv_pulled_bytes",
    "output_tokens",
    "leases_granted",
)


def counters(deployment: Deployment, role: str) -> dict[str, float]:
    metrics = deployment.metrics()
    return {name: metrics.sum(f"tasuki_worker_{name}_total", role=role) for name in PER_REQUEST}


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in before}


def random_prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(f"no other test's {seed}")  # whose prefixes the workers would know
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 300, 1000])
def test_every_prompt_block_moves_once(tiny: Deployment, length: int) -> None:
    tiny.wait_quiet()
    before = {role: counters(tiny, role) for role in ("prefill", "decode")}
    tiny.http.complete(random_prompt(length, length), max_tokens=20)
    tiny.wait_quiet()
    prefill = grown(before["prefill"], counters(tiny, "prefill"))
    decode = grown(before["decode"], counters(tiny, "decode"))
    blocks = -(-length // BLOCK)
    assert prefill["prompt_tokens_computed"] == length
    assert prefill["kv_pulled_blocks"] == 0
    assert decode["prompt_tokens_computed"] == 0
    assert decode["kv_pulled_blocks"] == blocks
    assert decode["kv_pulled_bytes"] == blocks * BLOCK_BYTES


def test_prefix_that_decode_holds_is_not_moved(tiny: Deployment) -> None:
    prompt = random_prompt(99, 20 * BLOCK + 5)
    first = tiny.http.complete(prompt, max_tokens=8)
    tiny.wait_quiet()
    before = counters(tiny, "decode")
    second = tiny.http.complete(prompt, max_tokens=8)
    tiny.wait_quiet()
    assert second.tokens == first.tokens
    assert second.usage is not None
    assert second.usage["prompt_tokens_details"]["cached_tokens"] >= 20 * BLOCK
    assert grown(before, counters(tiny, "decode"))["kv_pulled_blocks"] == 1


def test_n_choices_need_one_prefill_and_one_pull(tiny: Deployment) -> None:
    tiny.wait_quiet()
    before = {role: counters(tiny, role) for role in ("prefill", "decode")}
    body = {"model": tiny.model, "prompt": random_prompt(7, 100), "n": 4, "max_tokens": 12}
    body |= {"seed": 5, "ignore_eos": True, "return_token_ids": True}
    document = tiny.http.post("/v1/completions", body)
    tiny.wait_quiet()
    choices = [tuple(choice["token_ids"]) for choice in document["choices"]]
    assert [len(choice) for choice in choices] == [12] * 4
    assert len(set(choices)) > 1, "choices have random numbers of their own"
    again = tiny.http.post("/v1/completions", body)
    assert [tuple(choice["token_ids"]) for choice in again["choices"]] == choices
    prefill = grown(before["prefill"], counters(tiny, "prefill"))
    assert prefill["prompt_tokens_computed"] <= 100 + 100 % BLOCK
    assert counters(tiny, "decode")["kv_pulled_blocks"] - before["decode"]["kv_pulled_blocks"] <= 8


def test_one_token_is_not_split(tiny: Deployment) -> None:
    tiny.wait_quiet()
    before = counters(tiny, "decode")
    answer = tiny.http.complete(random_prompt(13, 200), max_tokens=1)
    tiny.wait_quiet()
    assert len(answer.tokens) == 1
    assert set(grown(before, counters(tiny, "decode")).values()) == {0}


def test_timings_account_for_a_split_request(tiny: Deployment) -> None:
    answer = tiny.http.stream(random_prompt(21, 400), max_tokens=30)
    timings = answer.timings
    assert timings is not None
    assert timings["transfer_bytes"] == 25 * BLOCK_BYTES
    assert 1 <= timings["transfer_descriptors"] <= 25
    assert 0 < timings["transfer_post_ms"] <= timings["transfer_ms"]
    assert timings["transport"].startswith("nixl/UCX"), timings
    assert timings["replacements"] == 0
    assert timings["prefill_worker"] != timings["decode_worker"]
    for phase in ("queue", "prefill", "first_token", "transfer", "decode", "total"):
        assert timings[f"{phase}_ms"] >= 0, phase
    assert timings["prefill_ms"] > 0 and timings["transfer_ms"] > 0 and timings["decode_ms"] > 0
    assert timings["first_token_ms"] <= timings["total_ms"]
    phases = timings["queue_ms"] + timings["prefill_ms"]
    assert phases <= timings["first_token_ms"] + 5, timings
    assert "127.0.0.1" not in str(timings)


def test_phases_of_a_split_request_add_up(tiny: Deployment) -> None:
    """From receipt to last token every moment belongs to one phase.

    `messages` is computed as what the other phases leave of the time between the first two
    tokens. So the sum alone does not show that `first_decode` is too short.
    """
    phases = ("first_token", "transfer_exposed", "first_decode", "messages", "decode")
    steps = 200
    answers = [
        tiny.http.stream(random_prompt(30 + number, 400), max_tokens=steps) for number in range(5)
    ]
    timings = [answer.timings for answer in answers if answer.timings]
    assert len(timings) == len(answers)
    # Medians, because a busy machine delays single answers.
    excess = median(
        sum(each[f"{phase}_ms"] for phase in phases) - each["total_ms"] for each in timings
    )
    total = median(each["total_ms"] for each in timings)
    assert abs(excess) < 0.03 * total + 15, timings
    step = median(each["decode_ms"] for each in timings) / (steps - 2)
    assert median(each["first_decode_ms"] for each in timings) > step / 4, timings


def test_server_timing_header(tiny: Deployment) -> None:
    body = {"model": tiny.model, "prompt": "bast gong", "max_tokens": 5, "ignore_eos": True}
    response = tiny.http.http.post("/v1/completions", json=body)
    entries = dict(
        entry.strip().split(";dur=") for entry in response.headers["server-timing"].split(",")
    )
    assert {"queue", "prefill", "first_token", "transfer", "decode", "total"} <= entries.keys()
    assert float(entries["total"]) > 0
    assert "timings" not in response.json()
