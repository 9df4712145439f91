//! A leg: the part of a request that one worker does, from its dispatch to its end.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Chunks, FailureKind};

use crate::generation::Finish;
use crate::opaque::{Opaque, OpaqueRequest};
use crate::sampling::{SamplingParams, TokenLogprob};
use crate::worker_ref::Peer;

/// Which part of a request a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegKind {
    /// Prefill and decode.
    Colocated,
    /// Compute the KV, hand over.
    Prefill,
    /// Take the KV over, go on from there.
    Decode,
}

impl LegKind {
    /// The word used in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            LegKind::Colocated => "colocated",
            LegKind::Prefill => "prefill",
            LegKind::Decode => "decode",
        }
    }
}

/// What a worker is asked to do.
#[derive(Debug, Clone, PartialEq)]
pub struct LegSpec {
    pub kind: LegKind,
    /// Of a prefill or decode leg.
    pub handoff: Option<Handoff>,
    /// Since a worker first got a leg of the request; a worker's legs stand in line by it.
    pub waited: Duration,
    pub prompt: Arc<[u32]>,
    /// Of the prompt.
    pub chunks: Chunks,
    /// Tokens that earlier attempts produced for the (single) choice: prefilled after the
    /// prompt, counted as output, not reported again.
    pub resumed: Vec<u32>,
    /// Indices; one prefill serves all.
    pub choices: Vec<u32>,
    pub sampling: Arc<SamplingParams>,
    /// Salts the prefix cache.
    pub cache_salt: Arc<str>,
    /// Of a request whose content is not tokens: prompt and sampling are estimates then.
    pub opaque: Option<Arc<OpaqueRequest>>,
    /// Of the shell, for the link: how a worker that traces its work makes it a part of the
    /// request's trace.
    pub trace: Option<Opaque>,
}

impl LegSpec {
    /// That the worker makes of it.
    pub fn sequences(&self) -> u32 {
        let choices = u32::try_from(self.choices.len()).unwrap_or(u32::MAX);
        self.opaque
            .as_ref()
            .map_or(choices, |opaque| opaque.sequences)
    }
}

/// A leg's side of the handoff.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Handoff {
    /// Both legs run at once; this is the other one's worker.
    With(Peer),
    /// A prefill leg: end with a ticket.
    IssueTicket,
    /// A decode leg: the ticket of the prefill leg, unchanged, and that one's engine.
    Redeem { ticket: Ticket, from: Box<str> },
}

/// What a decode worker needs to get the KV of an ended prefill leg. Opaque: only the links
/// to the two workers know what is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket(pub Vec<u8>);

/// A run of tokens of one choice: positions `position` to `position + tokens.len() - 1`.
///
/// A run may repeat or overtake others; it is one input, however long it is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Output {
    pub choice: u32,
    /// Output index of `tokens[0]`; resumed tokens count. Ignored where positions are counted.
    pub position: u32,
    pub tokens: Vec<u32>,
    /// As many as `tokens` when asked for, else empty.
    pub logprobs: Vec<TokenLogprob>,
    /// Of the choice, with its last token.
    pub finish: Option<Finish>,
    /// Once, of the prompt's tokens but the first.
    pub prompt_logprobs: Vec<TokenLogprob>,
    /// With position 0.
    pub cached_prompt_tokens: u32,
    /// Of an opaque request: what `tokens` stand for, one of any value for each token.
    pub frame: Option<Opaque>,
    /// With a first token: queue and prefill, so that nothing waits for the end of the leg.
    pub timings: Option<Box<LegTimings>>,
}

/// The end of a leg: the worker holds nothing of the request any more.
#[derive(Debug, Clone, PartialEq)]
pub struct LegEnd {
    pub reason: LegEndReason,
    /// What is at fault, where the reason is a failure.
    pub failure: FailureKind,
    /// For a person, where the worker rejected the request or failed.
    pub message: String,
    /// Of an opaque request that the worker rejected: its own answer.
    pub answer: Option<Opaque>,
    /// Of a prefill leg that was to issue one, where it has handed off.
    pub ticket: Option<Ticket>,
    pub timings: Option<Box<LegTimings>>,
}

/// Why a leg ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LegEndReason {
    /// Every choice ended here.
    Finished,
    /// Prefill: the peer has the KV.
    HandedOff,
    Aborted,
    /// Decode: no room; another worker may have it, prefill's work is kept.
    Refused,
    /// Decode: preempted; prefill again, what was streamed stands.
    Returned,
    /// Decode: the KV could not be had.
    KvLost,
    /// The request can never run here: the client's error.
    Rejected,
    /// Anything else.
    Failed,
}

impl LegEndReason {
    /// The word used in logs and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            LegEndReason::Finished => "finished",
            LegEndReason::HandedOff => "handed off",
            LegEndReason::Aborted => "aborted",
            LegEndReason::Refused => "refused",
            LegEndReason::Returned => "returned",
            LegEndReason::KvLost => "lost the KV",
            LegEndReason::Rejected => "rejected",
            LegEndReason::Failed => "failed",
        }
    }

    /// What is at fault where the worker does not say.
    pub fn usual_failure(self) -> FailureKind {
        match self {
            LegEndReason::Rejected => FailureKind::Client,
            LegEndReason::Refused => FailureKind::Overload,
            LegEndReason::Returned => FailureKind::Memory,
            LegEndReason::KvLost => FailureKind::Transport,
            _ => FailureKind::Device,
        }
    }

    /// Whether something is at fault.
    pub fn is_failure(self) -> bool {
        use LegEndReason as R;
        !matches!(self, R::Finished | R::HandedOff | R::Aborted)
    }
}

/// Durations by the worker's own clock; zero where a phase did not occur.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LegTimings {
    /// Submitted to first scheduled.
    pub queue: Duration,
    /// First scheduled to first token sampled.
    pub prefill: Duration,
    /// Decode: waiting for the pair's handshake.
    pub handshake: Duration,
    /// Decode: first block posted to last block there.
    pub transfer: Duration,
    /// Decode: the prefill worker's last chunk computed to the request may be scheduled.
    pub transfer_exposed: Duration,
    /// Decode: end of prefill received to last block read.
    pub transfer_tail: Duration,
    /// Decode: handing descriptors to the transport, of all ranks.
    pub transfer_post: Duration,
    /// Decode: may be scheduled to second token.
    pub first_decode: Duration,
    /// Second token to last.
    pub decode: Duration,
    pub transfer_bytes: u64,
    /// Runs of adjacent blocks that were read.
    pub transfer_descriptors: u64,
    /// Decode: what moved the blocks, and by which way; empty where nothing was moved.
    pub transport: String,
}
