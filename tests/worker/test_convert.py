"""What the router leaves unset means what worker.proto says."""

import math

import pytest

from tasuki.engine.api import Leg, LegEnd, LegEndReason, RequestSpec, SamplingParams
from tasuki.engine.errors import FailureKind
from tasuki.engine.grammar import GrammarSource
from tasuki.v1 import worker_pb2 as pb
from tasuki.worker.convert import (
    RefusedMessageError,
    UnknownLegError,
    add_waiting,
    failed_leg,
    grammar_from_wire,
    leg_end_to_wire,
    peer_from_wire,
    request_from_wire,
)


def test_a_full_request() -> None:
    spec = request_from_wire(
        pb.Submit(
            request_id="r.0",
            leg=pb.LEG_DECODE,
            prompt_tokens=[5, 6],
            resumed_tokens=[7],
            choices=[3],
            tenant="t",
            waited_s=2.5,
            sampling=pb.SamplingParams(
                seed=2**64 - 1,
                max_tokens=9,
                temperature=0.5,
                top_p=0.25,
                repetition_penalty=2,
                logit_bias={4: -1.5},
                stop_token_ids=[2, 2],
                logprobs=0,
            ),
        )
    )
    assert (spec.request_id, spec.leg, spec.tenant) == ("r.0", Leg.DECODE, "t")
    assert spec.waited_s == 2.5
    assert (list(spec.prompt_tokens), list(spec.resumed_tokens)) == ([5, 6], [7])
    assert tuple(spec.choices) == (3,)
    params = spec.sampling
    assert (params.seed, params.max_tokens, params.top_p) == (2**64 - 1, 9, 0.25)
    assert params.logit_bias == {4: -1.5} and params.stop_token_ids == {2}
    assert params.logprobs == 0 and params.prompt_logprobs is None


def test_unset_filters_are_off() -> None:
    spec = request_from_wire(
        pb.Submit(request_id="r", leg=pb.LEG_COLOCATED, sampling=pb.SamplingParams(max_tokens=1))
    )
    assert (spec.sampling.top_p, spec.sampling.repetition_penalty) == (1.0, 1.0)
    assert spec.sampling.logprobs is None and tuple(spec.choices) == (0,)


def test_a_leg_of_a_later_version_is_an_error() -> None:
    with pytest.raises(UnknownLegError):
        request_from_wire(pb.Submit(request_id="r", sampling=pb.SamplingParams(max_tokens=1)))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_a_grammar(kind: str) -> None:
    sampling = pb.SamplingParams(max_tokens=1, grammar=pb.Grammar(**{kind: "x"}))
    assert grammar_from_wire(pb.Submit(sampling=sampling)) == GrammarSource(kind, "x")


def test_no_grammar_and_one_of_a_later_version() -> None:
    assert grammar_from_wire(pb.Submit(sampling=pb.SamplingParams(max_tokens=1))) is None
    later = pb.SamplingParams(max_tokens=1, grammar=pb.Grammar())
    assert grammar_from_wire(pb.Submit(sampling=later)) == GrammarSource("unknown", "")


@pytest.mark.parametrize("reason", LegEndReason)
def test_a_legs_end_says_what_is_at_fault(reason: LegEndReason) -> None:
    sent = leg_end_to_wire(LegEnd("r.0", reason))
    ends_well = reason in (LegEndReason.FINISHED, LegEndReason.HANDED_OFF, LegEndReason.ABORTED)
    assert (sent.failure == pb.FAILURE_UNSPECIFIED) is ends_well


@pytest.mark.parametrize("kind", FailureKind)
def test_a_kind_of_failure_has_one_name_on_the_wire(kind: FailureKind) -> None:
    sent = leg_end_to_wire(LegEnd("r.0", LegEndReason.FAILED, failure=kind))
    assert pb.FailureKind.Name(sent.failure) == f"FAILURE_{kind.name}"


def test_a_leg_that_is_not_here_is_retried() -> None:
    (sent,) = failed_leg("r.0", "in use").step.ended
    assert (sent.request_id, sent.message) == ("r.0", "in use")
    assert sent.failure == pb.FAILURE_TRANSPORT


def test_a_request_has_an_id_and_a_handoff_a_peer() -> None:
    with pytest.raises(RefusedMessageError, match="no id"):
        request_from_wire(pb.Submit(leg=pb.LEG_COLOCATED))
    with pytest.raises(RefusedMessageError, match="'r' names no engine"):
        peer_from_wire("r", pb.Peer(kv_endpoint="127.0.0.1:1"))
    assert peer_from_wire("r", pb.Peer(engine_id="e", kv_endpoint="a:1")) == ("e", "a:1")


@pytest.mark.parametrize("waited_s", [math.nan, -1.0])
def test_a_time_that_cannot_be_counts_as_none(waited_s: float) -> None:
    submit = pb.Submit(request_id="r.0", leg=pb.LEG_PREFILL, prompt_tokens=[1], waited_s=waited_s)
    assert request_from_wire(submit).waited_s == 0.0


def test_legs_that_the_engine_lacks_count_as_those_that_wait() -> None:
    params = SamplingParams(seed=0, max_tokens=1)
    load = pb.Load(waiting_requests=1, waiting_sequences=1, waiting_kv_tokens=100)
    legs = [
        RequestSpec("own", Leg.COLOCATED, [1, 2], params, resumed_tokens=[3], choices=(0, 1)),
        RequestSpec("hand over", Leg.PREFILL, [1] * 7, params),
        RequestSpec("pull", Leg.DECODE, [1] * 20, params),
    ]
    add_waiting(load, legs)
    assert (load.waiting_requests, load.waiting_prefill_tokens) == (4, 10)
    assert (load.waiting_sequences, load.waiting_kv_tokens) == (4, 126)
    assert load.awaited_sequences == 1
