"""Between the messages of worker.proto and the engine's plain data. Nothing is decided here."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tasuki.engine.api import (
    FinishReason,
    Leg,
    LegEnd,
    LegEndReason,
    LegTimings,
    Output,
    RequestSpec,
    SamplingParams,
)
from tasuki.engine.errors import FailureKind
from tasuki.engine.grammar import GrammarSource
from tasuki.engine.stats import EngineCounters, EngineLoad, StepSample
from tasuki.errors import TasukiError
from tasuki.kv.handoff import Handoffs
from tasuki.kv.pairs import PairCounters
from tasuki.kv.wire import logprob_to_wire
from tasuki.v1 import worker_pb2 as pb

_ROLE = {
    "prefill": pb.ROLE_PREFILL,
    "decode": pb.ROLE_DECODE,
    "mixed": pb.ROLE_MIXED,
}
ROLES = frozenset(_ROLE.values())
"""Those that a worker can have."""

_LEG = {
    pb.LEG_COLOCATED: Leg.COLOCATED,
    pb.LEG_PREFILL: Leg.PREFILL,
    pb.LEG_DECODE: Leg.DECODE,
}
_FINISH = {
    None: pb.FINISH_NONE,
    FinishReason.STOP: pb.FINISH_STOP,
    FinishReason.LENGTH: pb.FINISH_LENGTH,
}
_LEG_END = {
    LegEndReason.FINISHED: pb.LEG_END_FINISHED,
    LegEndReason.HANDED_OFF: pb.LEG_END_HANDED_OFF,
    LegEndReason.ABORTED: pb.LEG_END_ABORTED,
    LegEndReason.REFUSED: pb.LEG_END_REFUSED,
    LegEndReason.RETURNED: pb.LEG_END_RETURNED,
    LegEndReason.KV_LOST: pb.LEG_END_KV_LOST,
    LegEndReason.REJECTED: pb.LEG_END_REJECTED,
    LegEndReason.FAILED: pb.LEG_END_FAILED,
}
_FAILURE = {
    None: pb.FAILURE_UNSPECIFIED,
    FailureKind.CLIENT: pb.FAILURE_CLIENT,
    FailureKind.MODEL: pb.FAILURE_MODEL,
    FailureKind.MEMORY: pb.FAILURE_MEMORY,
    FailureKind.DEVICE: pb.FAILURE_DEVICE,
    FailureKind.TRANSPORT: pb.FAILURE_TRANSPORT,
    FailureKind.OVERLOAD: pb.FAILURE_OVERLOAD,
}


def role_at_start(role: str) -> pb.RoleSetting:
    """The role that a worker was started with, as routers read it."""
    return pb.RoleSetting(role=_ROLE[role], owner="start")


class RefusedMessageError(TasukiError):
    """A router's message about a request asks for what cannot be."""


class UnknownLegError(RefusedMessageError):
    """A router of a later version asked for a leg that this worker does not know."""


def peer_from_wire(request_id: str, peer: pb.Peer) -> tuple[str, str]:
    """Engine id and KV endpoint of the other worker of a handoff.

    Raises:
        RefusedMessageError: None is named.
    """
    if not peer.engine_id:
        raise RefusedMessageError(
            f"request {request_id!r} names no engine as its peer:"
            " run router and worker of one version"
        )
    return peer.engine_id, peer.kv_endpoint


def request_from_wire(submit: pb.Submit) -> RequestSpec:
    """A `Submit` as the engine takes it.

    Raises:
        RefusedMessageError: The request has no id.
        UnknownLegError: The leg is not one of this version's.
    """
    if not submit.request_id:
        raise RefusedMessageError("a request has no id: run router and worker of one version")
    if submit.leg not in _LEG:
        raise UnknownLegError(
            f"leg {submit.leg} of request {submit.request_id!r} is unknown to this worker:"
            " run router and worker of one version"
        )
    params = submit.sampling
    return RequestSpec(
        request_id=submit.request_id,
        leg=_LEG[submit.leg],
        prompt_tokens=list(submit.prompt_tokens),
        resumed_tokens=list(submit.resumed_tokens),
        choices=tuple(submit.choices) or (0,),
        tenant=submit.tenant,
        waited_s=max(0.0, submit.waited_s),  # 0 for NaN
        sampling=SamplingParams(
            seed=params.seed,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p or 1.0,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty or 1.0,
            logit_bias=dict(params.logit_bias),
            stop_token_ids=frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            logprobs=params.logprobs if params.HasField("logprobs") else None,
            prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        ),
    )


def grammar_from_wire(submit: pb.Submit) -> GrammarSource | None:
    """The grammar that a `Submit` names, if any; of a later version's kind, it has none."""
    if not submit.sampling.HasField("grammar"):
        return None
    grammar = submit.sampling.grammar
    kind = grammar.WhichOneof("kind")
    return (
        GrammarSource("unknown", "")
        if kind is None
        else GrammarSource(kind, getattr(grammar, kind))
    )


def output_to_wire(output: Output) -> pb.Output:
    """An engine output as the router reads it."""
    stopped = output.finish is FinishReason.STOP
    return pb.Output(
        request_id=output.request_id,
        choice=output.choice,
        position=output.position,
        tokens=output.tokens,
        logprobs=[logprob_to_wire(entry) for entry in output.logprobs or ()],
        finish=_FINISH[output.finish],
        stop_token_id=output.tokens[-1] if stopped else 0,
        prompt_logprobs=[logprob_to_wire(entry) for entry in output.prompt_logprobs or ()],
        cached_prompt_tokens=output.cached_prompt_tokens,
        timings=None if output.timings is None else _timings_to_wire(output.timings),
    )


def leg_end_to_wire(ended: LegEnd) -> pb.LegEnd:
    """The end of a leg as the router reads it."""
    return pb.LegEnd(
        request_id=ended.request_id,
        reason=_LEG_END[ended.reason],
        message=ended.message,
        timings=_timings_to_wire(ended.timings),
        failure=_FAILURE[ended.failure],
    )


def failed_leg(request_id: str, message: str) -> pb.WorkerMessage:
    """A leg that the engine does not have, because router and worker differ about it, is over."""
    ended = LegEnd(request_id, LegEndReason.FAILED, message)
    return pb.WorkerMessage(step=pb.StepReport(ended=[leg_end_to_wire(ended)]))


def load_to_wire(engine: EngineLoad, counters: EngineCounters, handoffs: Handoffs) -> pb.Load:
    """How busy a worker is, as the router reads it."""
    kv = handoffs.counters

    def blocks(pages: int) -> int:
        return math.ceil(pages / engine.pages_per_block)

    return pb.Load(
        waiting_requests=engine.waiting_requests,
        running_requests=engine.running_requests,
        waiting_prefill_tokens=engine.waiting_prefill_tokens,
        free_blocks=int(engine.free_blocks / engine.pages_per_block),
        total_blocks=int(engine.total_blocks / engine.pages_per_block),
        leased_blocks=blocks(handoffs.leased_blocks),
        quarantined_blocks=blocks(engine.quarantined_blocks),
        stuck_blocks=blocks(kv.stuck_blocks),
        prefill_tokens_per_s=engine.prefill_tokens_per_s,
        decode_step_s=engine.decode_step_s,
        running_sequences=engine.running_sequences,
        running_kv_tokens=engine.running_kv_tokens,
        waiting_sequences=engine.waiting_sequences,
        waiting_kv_tokens=engine.waiting_kv_tokens,
        awaited_sequences=engine.awaited_sequences,
        planned_ahead_s=engine.planned_ahead_s,
        last_decode=_sample_to_wire(engine.last_decode),
        last_prefill=_sample_to_wire(engine.last_prefill),
        counters=pb.Counters(
            prompt_tokens_computed=counters.prompt_tokens_computed,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            output_tokens=counters.output_tokens,
            steps=counters.steps,
            preemptions=counters.preemptions,
            kv_pulled_bytes=kv.kv_pulled_bytes,
            kv_pulled_blocks=kv.kv_pulled_blocks,
            kv_pulls=kv.kv_pulls,
            kv_pull_failures=kv.kv_pull_failures,
            kv_pull_timeouts=kv.kv_pull_timeouts,
            kv_digests=kv.kv_digests,
            kv_digest_mismatches=kv.kv_digest_mismatches,
            draft_tokens=counters.draft_tokens,
            accepted_draft_tokens=counters.accepted_draft_tokens,
            leases_granted=kv.leases_granted,
            leases_expired=kv.leases_expired,
        ),
        kv_pairs=[_pair_to_wire(engine_id, pair) for engine_id, pair in kv.pairs],
    )


def add_waiting(load: pb.Load, legs: Iterable[RequestSpec]) -> None:
    """Count legs that the engine does not have yet as it counts those that wait."""
    for spec in legs:
        tokens, choices = len(spec.prompt_tokens) + len(spec.resumed_tokens), len(spec.choices)
        load.waiting_requests += 1
        if spec.leg is Leg.DECODE:
            load.awaited_sequences += choices
        else:
            load.waiting_prefill_tokens += tokens
        if spec.leg is not Leg.PREFILL:
            load.waiting_sequences += choices
            load.waiting_kv_tokens += choices * tokens


def _pair_to_wire(engine_id: str, pair: PairCounters) -> pb.KvPair:
    return pb.KvPair(
        engine_id=engine_id,
        transport=pair.name,
        bytes=pair.bytes,
        pulls=pair.pulls,
        descriptors=pair.descriptors,
        post_s=pair.post_s,
        wire_s=pair.wire_s,
        exposed_s=pair.exposed_s,
        reconnects=pair.reconnects,
        failures=[pb.KvFailure(cause=cause, count=n) for cause, n in pair.failures.items()],
    )


def _sample_to_wire(sample: StepSample | None) -> pb.StepSample | None:
    if sample is None:
        return None
    return pb.StepSample(
        number=sample.number,
        duration_s=sample.duration_s,
        sequences=sample.sequences,
        kv_tokens=sample.kv_tokens,
        prefill_tokens=sample.prefill_tokens,
        prefill_squares=sample.prefill_squares,
    )


def _timings_to_wire(timings: LegTimings) -> pb.LegTimings:
    return pb.LegTimings(**{name: getattr(timings, name) for name in LegTimings.__slots__})
