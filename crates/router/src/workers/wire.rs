//! Tasuki's own protocol, converted to and from the types of `tasuki_flow`.

use std::time::Duration;

use tasuki_core::{Capabilities, FailureKind, HardwareClass, Identity, KvDomain, Role, StepSample};
use tasuki_flow::fleet::{LoadReport, WorkerInfo};
use tasuki_flow::{
    Finish, Grammar, Handoff, LegEnd, LegEndReason, LegKind, LegSpec, LegTimings, Output, Peer,
    SamplingParams, TokenLogprob, TopLogprob,
};
use tasuki_wire::v1::router_message::Message;
use tasuki_wire::v1::{self, RouterMessage};

use super::cache;
use super::grpc_link::Outgoing;
use super::legs::Report;

/// The protocol of `kv.proto`.
const KV_BACKEND: &str = "tasuki";

/// A duration above this, reported by a worker, is an error of its clock.
const LONGEST_REPORTED_S: f64 = 1e9;

/// What is wrong with a worker's information.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InfoError {
    #[error(
        "the worker speaks protocol version {theirs}, this router {ours}: run one version of both"
    )]
    Protocol { theirs: u32, ours: u32 },
    #[error("the worker's identity has {0} bytes instead of 16")]
    Identity(usize),
}

/// The message as the worker reads it.
pub fn outgoing(message: Outgoing) -> RouterMessage {
    let message = match message {
        Outgoing::Dispatch(request_id, number, spec) => {
            Message::Submit(submit(request_id, number, spec))
        }
        Outgoing::Abort(request_id, choices) => Message::Abort(v1::Abort {
            request_id,
            choices,
        }),
        Outgoing::Retarget(request_id, peer) => Message::Retarget(v1::Retarget {
            request_id,
            peer: Some(peer_to_wire(peer)),
        }),
        Outgoing::SetRole(role, owner, epoch) => Message::SetRole(v1::RoleSetting {
            role: role_to_wire(role).into(),
            owner,
            epoch,
        }),
        Outgoing::ResyncCache => Message::ResyncKv(v1::KvResync {}),
        Outgoing::FlushCache => Message::FlushCache(v1::FlushCache {}),
    };
    RouterMessage {
        message: Some(message),
    }
}

/// A worker's information.
///
/// # Errors
///
/// [`InfoError`]: it speaks another version, or its identity has the wrong length.
pub fn info(info: v1::WorkerInfo) -> Result<WorkerInfo, InfoError> {
    if info.protocol_version != tasuki_wire::PROTOCOL_VERSION {
        return Err(InfoError::Protocol {
            theirs: info.protocol_version,
            ours: tasuki_wire::PROTOCOL_VERSION,
        });
    }
    let identity =
        Identity::from_slice(&info.identity).ok_or(InfoError::Identity(info.identity.len()))?;
    Ok(WorkerInfo {
        role: info.role.as_ref().and_then(role).unwrap_or(Role::Mixed),
        role_epoch: info.role.as_ref().map_or(0, |setting| setting.epoch),
        role_owner: (info.role.as_ref()).map_or_else(String::new, |setting| setting.owner.clone()),
        peer: Peer {
            engine_id: info.engine_id,
            kv_endpoint: info.kv_endpoint,
        },
        model: info.model,
        further_names: Vec::new(),
        adapters: Vec::new(),
        domain: KvDomain {
            backend: KV_BACKEND,
            identity,
        },
        // The types of `tasuki_flow` were made for this protocol: it can do all of it. Workers
        // that were built before it had events send none.
        capabilities: Capabilities {
            reports_cache: info.kv_event_blocks > 0,
            ..Capabilities::default()
        },
        vocab_size: info.vocab_size,
        max_model_len: info.max_model_len,
        // Workers that were built before it send none.
        max_sequences: (info.max_running_sequences > 0).then_some(info.max_running_sequences),
        block_size: info.block_size,
        num_blocks: info.num_blocks,
        chunks: cache::scheme(identity, info.block_size, info.kv_event_blocks),
        hardware: HardwareClass {
            device: info.device,
            identity,
            tensor_parallel: info.tensor_parallel_size,
        },
    })
}

/// A worker's report; outputs and ends are converted as they are taken.
pub fn report(
    report: v1::StepReport,
) -> Report<impl Iterator<Item = (String, Output)>, impl Iterator<Item = (String, LegEnd)>> {
    Report {
        load: report
            .load
            .as_ref()
            .map(|reported| load(reported, report.applied_submits)),
        exported: report.load,
        cache: report.kv.map(cache::events),
        outputs: report.outputs.into_iter().map(output),
        ended: report.ended.into_iter().map(leg_end),
    }
}

fn load(load: &v1::Load, applied_submits: u64) -> LoadReport {
    LoadReport {
        applied_legs: Some(applied_submits),
        waiting_requests: load.waiting_requests,
        running_requests: load.running_requests,
        waiting_prefill_tokens: load.waiting_prefill_tokens,
        free_blocks: load.free_blocks,
        running_sequences: load.running_sequences,
        waiting_sequences: load.waiting_sequences,
        awaited_sequences: load.awaited_sequences,
        running_kv_tokens: load.running_kv_tokens,
        waiting_kv_tokens: load.waiting_kv_tokens,
        is_draining: load.draining,
        last_decode: load.last_decode.map(sample),
        last_prefill: load.last_prefill.map(sample),
    }
}

fn sample(sample: v1::StepSample) -> StepSample {
    StepSample {
        number: sample.number,
        duration_s: sample.duration_s,
        sequences: sample.sequences,
        kv_tokens: sample.kv_tokens,
        prefill_tokens: sample.prefill_tokens,
        prefill_squares: sample.prefill_squares,
    }
}

fn output(output: v1::Output) -> (String, Output) {
    let finish = match output.finish() {
        v1::FinishReason::FinishNone => None,
        v1::FinishReason::FinishStop => Some(Finish::Stop),
        v1::FinishReason::FinishLength => Some(Finish::Length),
    };
    let converted = Output {
        frame: None,
        choice: output.choice,
        position: output.position,
        tokens: output.tokens,
        logprobs: logprobs(output.logprobs),
        finish,
        prompt_logprobs: logprobs(output.prompt_logprobs),
        cached_prompt_tokens: output.cached_prompt_tokens,
        timings: output.timings.as_ref().map(|t| Box::new(timings(t))),
    };
    (output.request_id, converted)
}

fn leg_end(ended: v1::LegEnd) -> (String, LegEnd) {
    use v1::LegEndReason as Wire;
    let reason = match ended.reason() {
        Wire::LegEndFinished => LegEndReason::Finished,
        Wire::LegEndHandedOff => LegEndReason::HandedOff,
        Wire::LegEndAborted => LegEndReason::Aborted,
        Wire::LegEndRefused => LegEndReason::Refused,
        Wire::LegEndReturned => LegEndReason::Returned,
        Wire::LegEndKvLost => LegEndReason::KvLost,
        Wire::LegEndRejected => LegEndReason::Rejected,
        Wire::LegEndFailed | Wire::LegEndUnspecified => LegEndReason::Failed,
    };
    let converted = LegEnd {
        reason,
        failure: failure(ended.failure()).unwrap_or(reason.usual_failure()),
        message: ended.message,
        answer: None,
        ticket: None,
        timings: ended.timings.as_ref().map(|t| Box::new(timings(t))),
    };
    (ended.request_id, converted)
}

/// The kind of failure on the wire; `None` when it is not set.
fn failure(kind: v1::FailureKind) -> Option<FailureKind> {
    use v1::FailureKind as Wire;
    match kind {
        Wire::FailureUnspecified => None,
        Wire::FailureClient => Some(FailureKind::Client),
        Wire::FailureModel => Some(FailureKind::Model),
        Wire::FailureMemory => Some(FailureKind::Memory),
        Wire::FailureDevice => Some(FailureKind::Device),
        Wire::FailureTransport => Some(FailureKind::Transport),
        Wire::FailureOverload => Some(FailureKind::Overload),
    }
}

fn submit(request_id: String, number: u64, spec: LegSpec) -> v1::Submit {
    let leg = match spec.kind {
        LegKind::Colocated => v1::Leg::Colocated,
        LegKind::Prefill => v1::Leg::Prefill,
        LegKind::Decode => v1::Leg::Decode,
    };
    let peer = match spec.handoff {
        Some(Handoff::With(peer)) => Some(peer_to_wire(peer)),
        // Only between workers that hand over by tickets.
        Some(Handoff::IssueTicket | Handoff::Redeem { .. }) | None => None,
    };
    v1::Submit {
        request_id,
        number,
        leg: leg.into(),
        peer,
        prompt_tokens: spec.prompt.to_vec(),
        resumed_tokens: spec.resumed,
        choices: spec.choices,
        sampling: Some(sampling(&spec.sampling)),
        tenant: spec.cache_salt.as_ref().to_owned(),
        waited_s: spec.waited.as_secs_f64(),
    }
}

fn sampling(params: &SamplingParams) -> v1::SamplingParams {
    v1::SamplingParams {
        seed: params.seed,
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        repetition_penalty: params.repetition_penalty,
        logit_bias: params.logit_bias.clone(),
        stop_token_ids: params.stop_token_ids.clone(),
        max_tokens: params.max_tokens,
        min_tokens: params.min_tokens,
        logprobs: params.logprobs,
        prompt_logprobs: params.prompt_logprobs,
        grammar: params.grammar.as_ref().map(grammar),
    }
}

fn grammar(grammar: &Grammar) -> v1::Grammar {
    use v1::grammar::Kind;
    let kind = match grammar {
        Grammar::JsonSchema(schema) => Kind::JsonSchema(schema.clone()),
        Grammar::Regex(pattern) => Kind::Regex(pattern.clone()),
        Grammar::Lark(grammar) => Kind::Lark(grammar.clone()),
    };
    v1::Grammar { kind: Some(kind) }
}

fn peer_to_wire(peer: Peer) -> v1::Peer {
    v1::Peer {
        engine_id: peer.engine_id,
        kv_endpoint: peer.kv_endpoint,
    }
}

fn role_to_wire(role: Role) -> v1::Role {
    match role {
        Role::Prefill => v1::Role::Prefill,
        Role::Decode => v1::Role::Decode,
        Role::Mixed => v1::Role::Mixed,
    }
}

/// The role on the wire; `None` when it is not set.
fn role(setting: &v1::RoleSetting) -> Option<Role> {
    match setting.role() {
        v1::Role::Unspecified => None,
        v1::Role::Prefill => Some(Role::Prefill),
        v1::Role::Decode => Some(Role::Decode),
        v1::Role::Mixed => Some(Role::Mixed),
    }
}

fn logprobs(logprobs: Vec<v1::TokenLogprob>) -> Vec<TokenLogprob> {
    let alternative = |top: v1::TopLogprob| TopLogprob {
        token: top.token,
        logprob: top.logprob,
    };
    let converted = logprobs.into_iter().map(|logprob| TokenLogprob {
        token: logprob.token,
        logprob: logprob.logprob,
        rank: logprob.rank,
        top: logprob.top.into_iter().map(alternative).collect(),
    });
    converted.collect()
}

fn timings(timings: &v1::LegTimings) -> LegTimings {
    LegTimings {
        queue: seconds(timings.queue_s),
        prefill: seconds(timings.prefill_s),
        handshake: seconds(timings.handshake_s),
        transfer: seconds(timings.transfer_s),
        transfer_exposed: seconds(timings.transfer_exposed_s),
        transfer_tail: seconds(timings.transfer_tail_s),
        transfer_post: seconds(timings.transfer_post_s),
        first_decode: seconds(timings.first_decode_s),
        decode: seconds(timings.decode_s),
        transfer_bytes: timings.transfer_bytes,
        transfer_descriptors: timings.transfer_descriptors.into(),
        transport: timings.transport.clone(),
    }
}

/// A worker's number of seconds; what is no duration counts as zero.
fn seconds(value: f64) -> Duration {
    let plausible = (0.0..LONGEST_REPORTED_S).contains(&value);
    if plausible {
        Duration::from_secs_f64(value)
    } else {
        Duration::ZERO
    }
}

#[cfg(test)]
mod tests;
