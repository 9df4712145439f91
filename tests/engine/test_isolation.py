"""A request that makes a step raise fails alone; a broken worker says so."""

from __future__ import annotations

import pytest
from engine_fakes import VOCAB, expected, make_rig, spec

from tasuki.engine.api import LegEndReason
from tasuki.engine.errors import DeviceMemoryError, FailureKind, NotFiniteError, kind_of


@pytest.mark.parametrize("choices", [(0,), (0, 1)])
@pytest.mark.parametrize("budget", [4, 64])
def test_a_request_that_raises_fails_alone(budget: int, choices: tuple[int, ...]):
    rig = make_rig(max_batched_tokens=budget)
    ban = {40: -100.0}
    good = [
        spec("a", range(13), max_tokens=20, logit_bias=ban, logprobs=1, choices=(0, 1)),
        spec("b", range(9), max_tokens=20, temperature=1.0, logit_bias=ban),
    ]
    for request in good:
        rig.engine.submit(request)
    rig.step()
    rig.model.cursed = {40}
    rig.engine.submit(spec("bad", [*range(5), 40, *range(5)], choices=choices))
    rig.drain()
    assert rig.ended["bad"].reason is LegEndReason.FAILED
    assert rig.ended["bad"].failure is FailureKind.DEVICE
    assert "cursed" in rig.ended["bad"].message
    for request in good:
        for choice in request.choices:
            assert rig.tokens(request.request_id, choice) == expected(request, choice, 64)[0]
    assert all(len(output.logprobs) == 1 for output in rig.outputs["a", 1])
    assert rig.engine.referenced_blocks == 0


def test_when_every_request_raises_the_error_goes_on():
    rig = make_rig(max_batched_tokens=64)
    rig.model.cursed = set(range(VOCAB))
    for name in ("a", "b"):
        rig.engine.submit(spec(name, range(5)))
    with pytest.raises(RuntimeError, match="cursed"):
        rig.drain()


def test_a_worker_whose_logits_are_never_finite_ends():
    rig = make_rig(poison=40)
    with pytest.raises(NotFiniteError, match="last 10 requests"):
        for index in range(20):
            rig.engine.submit(spec(f"r{index}", [*range(5), 40]))
            rig.drain()
    assert len(rig.ended) == 9


def test_requests_that_are_not_finite_among_others_end_no_worker():
    rig = make_rig(poison=40)
    for index in range(30):
        bad = index % 9 != 0
        ban = {40: -100.0}
        request = spec(f"r{index}", [*range(5), 40 if bad else 7], max_tokens=2, logit_bias=ban)
        rig.engine.submit(request)
        rig.drain()
    reasons = [end.reason for end in rig.ended.values()]
    assert reasons.count(LegEndReason.FAILED) == 26
    kinds = {end.failure for end in rig.ended.values() if end.reason is LegEndReason.FAILED}
    assert kinds == {FailureKind.MODEL}
    assert reasons.count(LegEndReason.FINISHED) == 4


def test_a_worker_that_only_raises_does_not_go_on_for_ever():
    rig = make_rig()
    rig.model.cursed = set(range(VOCAB))
    with pytest.raises(RuntimeError, match="cursed"):
        for index in range(20):
            rig.engine.submit(spec(f"r{index}", range(5)))
            rig.drain()
    assert len(rig.ended) > 3


def test_an_error_of_a_step_has_a_kind():
    assert kind_of(DeviceMemoryError("a step of 3 rows")) is FailureKind.MEMORY
    assert kind_of(NotFiniteError("nothing but NaN")) is FailureKind.MODEL
    assert kind_of(RuntimeError("CUDA error: an illegal memory access")) is FailureKind.DEVICE
