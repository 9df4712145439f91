"""Colocated requests: the engine's tokens are those of the sequence alone."""

from __future__ import annotations

import struct

import pytest
from engine_fakes import VOCAB, expected, make_rig, spec

from tasuki.engine.api import FinishReason, LegEndReason
from tasuki.engine.errors import FailureKind


def test_one_request_gives_the_tokens_of_the_sequence_alone():
    rig = make_rig()
    request = spec("a", range(10), max_tokens=20)
    rig.engine.submit(request)
    rig.drain()
    assert (rig.tokens("a"), rig.finish("a")) == expected(request, 0, 64)
    assert rig.ended["a"].reason is LegEndReason.FINISHED
    assert rig.engine.referenced_blocks == 0


def test_prompt_longer_than_the_token_budget_is_prefilled_in_chunks():
    rig = make_rig(max_batched_tokens=4)
    request = spec("a", range(31), max_tokens=3)
    rig.engine.submit(request)
    rig.drain()
    assert rig.tokens("a") == expected(request, 0, 64)[0]
    assert rig.model.largest_batch == 4
    assert rig.engine.counters().prompt_tokens_computed == 31


def test_requests_in_one_batch_do_not_touch_each_other():
    rig = make_rig(num_blocks=256)
    requests = [spec(f"r{i}", range(i, i + 3 + i), max_tokens=5 + i, seed=i) for i in range(8)]
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    for request in requests:
        assert rig.tokens(request.request_id) == expected(request, 0, 64)[0]
    assert rig.model.largest_batch > 8


def test_single_token_prompt():
    rig = make_rig()
    request = spec("a", [5], max_tokens=4)
    rig.engine.submit(request)
    rig.drain()
    assert rig.tokens("a") == expected(request, 0, 64)[0]


def test_second_request_reuses_the_prefix_of_the_first():
    rig = make_rig()
    prompt = list(range(21))
    for name in ("a", "b"):
        rig.engine.submit(spec(name, prompt))
        rig.drain()
    assert rig.tokens("a") == rig.tokens("b")
    assert rig.outputs["a", 0][0].cached_prompt_tokens == 0
    assert [o.cached_prompt_tokens for o in rig.outputs["b", 0]] == [20, *[0] * 7], "told once"
    assert rig.engine.counters().prompt_tokens_cached == 20
    assert rig.engine.counters().prompt_tokens_computed == 22


def test_a_wholly_cached_prompt_still_computes_a_token():
    rig = make_rig()
    request = spec("a", range(20))
    rig.engine.submit(request)
    rig.drain()
    rig.engine.submit(spec("b", range(20)))
    rig.drain()
    assert rig.tokens("b") == expected(request, 0, 64)[0]
    assert rig.outputs["b", 0][0].cached_prompt_tokens == 16


def test_generated_tokens_are_reused_by_the_next_turn():
    rig = make_rig()
    rig.engine.submit(spec("a", range(10), max_tokens=12))
    rig.drain()
    turn = [*range(10), *rig.tokens("a"), 3]
    request = spec("b", turn)
    rig.engine.submit(request)
    rig.drain()
    assert rig.tokens("b") == expected(request, 0, 64)[0]
    assert rig.outputs["b", 0][0].cached_prompt_tokens == 20


def test_tenants_do_not_share_the_cache():
    rig = make_rig()
    for name in ("a", "b"):
        rig.engine.submit(spec(name, range(20), tenant=name))
        rig.drain()
    assert rig.outputs["b", 0][0].cached_prompt_tokens == 0


def test_prefix_caching_can_be_turned_off():
    rig = make_rig(prefix_caching=False)
    for name in ("a", "b"):
        rig.engine.submit(spec(name, range(20)))
        rig.drain()
    assert rig.tokens("a") == rig.tokens("b")
    assert rig.engine.counters().prompt_tokens_cached == 0


@pytest.mark.parametrize("prompt", [8, 9, 11])  # a full last block, and partly filled ones
def test_choices_share_a_prefill_and_then_diverge(prompt: int):
    rig = make_rig(num_blocks=128)
    request = spec("a", range(prompt), choices=(0, 1, 2, 5), temperature=1.0, max_tokens=10)
    rig.engine.submit(request)
    rig.drain()
    told = [rig.tokens("a", choice) for choice in (0, 1, 2, 5)]
    assert told == [expected(request, choice, 64)[0] for choice in (0, 1, 2, 5)]
    assert len({tuple(tokens) for tokens in told}) == 4
    assert rig.engine.counters().prompt_tokens_computed == prompt


def test_resumed_tokens_are_prefilled_and_count_as_output():
    rig = make_rig()
    whole = spec("a", range(9), max_tokens=12, temperature=0.8, frequency_penalty=1.5)
    rig.engine.submit(whole)
    rig.drain()
    tokens = rig.tokens("a")
    again = spec(
        "b",
        range(9),
        max_tokens=12,
        temperature=0.8,
        frequency_penalty=1.5,
        resumed=tokens[:5],
    )
    rig.engine.submit(again)
    rig.drain()
    assert rig.outputs["b", 0][0].position == 5
    assert rig.tokens("b") == tokens[5:]


def test_stop_token_ends_a_choice_and_is_its_last_token():
    rig = make_rig()
    free = expected(spec("a", range(9), max_tokens=12), 0, 64)[0]
    stop = free[5]
    request = spec("a", range(9), max_tokens=12, stop_token_ids=frozenset({stop}))
    rig.engine.submit(request)
    rig.drain()
    assert rig.tokens("a") == free[: free.index(stop) + 1]
    assert rig.finish("a") is FinishReason.STOP


def test_min_tokens_keeps_stop_tokens_out():
    rig = make_rig()
    stops = frozenset(range(VOCAB - 1))
    request = spec("a", range(9), max_tokens=9, min_tokens=4, stop_token_ids=stops)
    rig.engine.submit(request)
    rig.drain()
    tokens = rig.tokens("a")
    assert tokens[:4] == [VOCAB - 1] * 4
    assert tokens == expected(request, 0, 64)[0]


def test_output_ends_at_max_model_len():
    rig = make_rig()
    rig.engine.submit(spec("a", range(40), max_tokens=1000))
    rig.drain()
    assert len(rig.tokens("a")) == 24
    assert rig.finish("a") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (spec("a", range(64)), ["64", "63"]),
        (spec("a", []), ["0 tokens"]),
        (spec("a", [1, VOCAB]), [str(VOCAB)]),
        (spec("a", [1], choices=range(200)), ["200", "128"]),
        (spec("a", [1], resumed=[2, VOCAB]), [str(VOCAB)]),
        (spec("a", [1], resumed=[1, 2, 3], max_tokens=3), ["3"]),
        (spec("a", [1], resumed=[1], choices=(0, 1)), ["2 choices"]),
        (spec("a", [1], logit_bias={VOCAB: 1.0}), [str(VOCAB)]),
        (spec("a", [1], logit_bias={0: float("nan")}), ["token 0", "nan"]),
        (spec("a", [1], temperature=-1.0), ["temperature is -1.0", "from 0.0"]),
        (spec("a", [1], top_p=float("nan")), ["top_p is nan", "to 1.0"]),
        (spec("a", [1], min_p=2.0), ["min_p is 2.0", "to 1.0"]),
        (spec("a", [1], presence_penalty=float("inf")), ["presence_penalty is inf"]),
        (spec("a", [1], repetition_penalty=0.0), ["repetition_penalty is 0.0", "0.01"]),
        (spec("a", [1], logprobs=2**32 - 1), ["logprobs is 4294967295", "20"]),
        (spec("a", [1], prompt_logprobs=21), ["prompt_logprobs is 21", "20"]),
    ],
)
def test_what_can_never_run_is_rejected_with_value_and_limit(request_, words):
    rig = make_rig()
    rig.engine.submit(request_)
    assert rig.engine.has_work()
    rig.step()
    assert rig.ended["a"].reason is LegEndReason.REJECTED
    assert rig.ended["a"].failure is FailureKind.CLIENT
    for word in words:
        assert word in rig.ended["a"].message
    assert not rig.engine.has_work()


def test_limits_hold_as_the_wire_rounds_them():
    rig = make_rig()
    [least] = struct.unpack("f", struct.pack("f", 0.01))
    assert least < 0.01
    rig.engine.submit(spec("a", [1], repetition_penalty=least))
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.FINISHED


def test_an_id_is_in_use_until_its_legs_end_is_told():
    rig = make_rig()
    rig.engine.submit(spec("a", []))  # another router's, rejected
    rig.engine.submit(spec("a", range(10)))
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.REJECTED
    assert rig.engine.referenced_blocks == 0 and not rig.outputs
    rig.ended.clear()
    rig.engine.submit(spec("a", range(10)))
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.FINISHED


def test_a_second_leg_under_a_living_id_is_dropped():
    rig = make_rig()
    request = spec("a", range(10))
    rig.engine.submit(request)
    rig.engine.submit(spec("a", range(20)))
    rig.drain()
    assert rig.tokens("a") == expected(request, 0, 64)[0]


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_step_frees_everything(steps: int):
    rig = make_rig(max_batched_tokens=4)
    rig.engine.submit(spec("a", range(10), choices=(0, 1), temperature=1.0))
    for _ in range(steps):
        rig.step()
    rig.engine.abort("a")
    rig.engine.abort("a")
    rig.engine.abort("never seen")
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.ABORTED
    assert rig.engine.referenced_blocks == 0


@pytest.mark.parametrize("steps", range(6))
def test_aborted_choice_leaves_the_others_alone(steps: int):
    rig = make_rig(max_batched_tokens=4)
    request = spec("a", range(10), choices=(0, 1, 2), temperature=1.0)
    rig.engine.submit(request)
    for _ in range(steps):
        rig.step()
    rig.engine.abort("a", (1,))
    told = len(rig.outputs["a", 1])
    rig.drain()
    assert len(rig.outputs["a", 1]) == told
    for choice in (0, 2):
        assert rig.tokens("a", choice) == expected(request, choice, 64)[0]
    assert rig.ended["a"].reason is LegEndReason.FINISHED


def test_aborting_the_last_choice_ends_the_request():
    rig = make_rig()
    rig.engine.submit(spec("a", range(10), choices=(0, 1)))
    rig.step()
    rig.engine.abort("a", (0,))
    rig.engine.abort("a", (1,))
    rig.drain()
    assert rig.ended["a"].reason is LegEndReason.ABORTED


def test_preempted_requests_end_with_the_same_tokens():
    rig = make_rig(num_blocks=32, max_model_len=64)
    requests = [spec(f"r{i}", range(i, i + 12), max_tokens=40, seed=i) for i in range(6)]
    for request in requests:
        rig.engine.submit(request)
    rig.drain()
    assert rig.engine.counters().preemptions > 0
    for request in requests:
        assert rig.tokens(request.request_id) == expected(request, 0, 64)[0]
    assert rig.engine.referenced_blocks == 0


def test_choices_that_need_more_than_the_pool_finish_one_after_another():
    rig = make_rig(num_blocks=32, max_model_len=64)
    request = spec("a", range(10), choices=range(8), temperature=1.0, max_tokens=54)
    rig.engine.submit(request)
    rig.drain()
    for choice in range(8):
        assert rig.tokens("a", choice) == expected(request, choice, 64)[0]


def test_logits_that_are_no_numbers_fail_their_request_alone():
    rig = make_rig(poison=40)
    good = spec("good", range(12), max_tokens=20, logit_bias={40: -100.0})
    rig.engine.submit(good)
    rig.engine.submit(spec("bad", [*range(12), 40, *range(12)]))
    rig.drain()
    assert rig.ended["bad"].reason is LegEndReason.FAILED
    assert "finite" in rig.ended["bad"].message
    assert rig.tokens("good") == expected(good, 0, 64)[0]
    assert rig.pool.isfinite().all()
    rig.engine.submit(spec("bad2", [*range(12), 40, *range(12)]))
    rig.drain()
    assert rig.ended["bad2"].reason is LegEndReason.FAILED
    assert rig.pool.isfinite().all()


def test_logprobs_are_those_of_the_models_own_distribution():
    rig = make_rig()
    request = spec("a", range(9), max_tokens=5, temperature=0.7, logprobs=3, logit_bias={2: 5.0})
    rig.engine.submit(request)
    rig.drain()
    for output in rig.outputs["a", 0]:
        assert output.logprobs is not None
        [entry] = output.logprobs
        assert entry.token == output.tokens[0]
        assert len(entry.top) == 3
        assert entry.top[0][1] >= entry.top[1][1] >= entry.top[2][1]
        better = sum(value > entry.logprob for _, value in entry.top)
        assert better == min(3, entry.rank - 1)


@pytest.mark.parametrize("budget", [5, 200])
def test_prompt_logprobs_cover_the_prompt_but_its_first_token(budget: int):
    rig = make_rig(max_batched_tokens=budget)
    prompt = [*range(20), 3, 1, 4]
    for name in ("a", "b"):  # the second finds a warm cache and must not use it
        rig.engine.submit(spec(name, prompt, prompt_logprobs=2, choices=(0, 1)))
        rig.drain()
        first = rig.outputs[name, 0][0]
        assert first.prompt_logprobs is not None
        assert [entry.token for entry in first.prompt_logprobs] == prompt[1:]
        assert all(len(entry.top) == 2 for entry in first.prompt_logprobs)
        others = [o for key in ((name, 0), (name, 1)) for o in rig.outputs[key]][1:]
        assert all(output.prompt_logprobs is None for output in others)
    a, b = (rig.outputs[name, 0][0].prompt_logprobs for name in ("a", "b"))
    assert a == b


def test_timings_and_load_tell_what_happened():
    rig = make_rig()
    rig.engine.submit(spec("a", range(30), max_tokens=20))
    load = rig.engine.load()
    assert (load.waiting_requests, load.running_requests) == (1, 0)
    assert (load.waiting_prefill_tokens, load.waiting_sequences) == (30, 1)
    assert load.waiting_kv_tokens == 30
    rig.step()
    load = rig.engine.load()
    assert (load.waiting_requests, load.running_requests) == (0, 1)
    assert load.waiting_prefill_tokens == 14
    assert (load.waiting_sequences, load.waiting_kv_tokens) == (1, 30)
    rig.step()
    load = rig.engine.load()
    assert (load.running_sequences, load.running_kv_tokens) == (1, 30)
    assert (load.waiting_sequences, load.waiting_kv_tokens) == (0, 0)
    rig.drain()
    load = rig.engine.load()
    assert (load.waiting_requests, load.running_requests) == (0, 0)
    assert load.free_blocks == load.total_blocks == 64
    assert load.prefill_tokens_per_s > 0
    assert load.decode_step_s > 0
    assert load.last_prefill is not None and load.last_decode is not None
    first, last = load.last_prefill, load.last_decode
    assert (first.sequences, first.prefill_tokens, first.prefill_squares) == (0, 14, 900 - 256)
    assert (last.sequences, last.kv_tokens, last.prefill_tokens) == (1, 49, 0)
    assert last.number > first.number
    assert last.duration_s > 0
    timings = rig.ended["a"].timings
    assert min(timings.prefill_s, timings.first_decode_s, timings.decode_s) > 0


def test_the_phases_of_a_request_follow_one_another(monkeypatch: pytest.MonkeyPatch):
    rig = make_rig()
    now_s = [0.0]
    monkeypatch.setattr(rig.engine, "_clock", lambda: now_s[0])
    rig.engine.submit(spec("a", range(12), max_tokens=5))
    ended_s = {}
    while "a" not in rig.ended:
        now_s[0] += 2.0
        for output in rig.step().outputs:
            ended_s[output.position] = now_s[0]
    timings = rig.ended["a"].timings
    assert timings.queue_s == 2.0
    assert timings.queue_s + timings.prefill_s == ended_s[0]
    assert timings.first_decode_s == ended_s[1] - ended_s[0]
    assert timings.decode_s == ended_s[4] - ended_s[1] > 0
