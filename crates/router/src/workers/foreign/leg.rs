//! One leg on a worker of another engine: a request to it, and its answer passed on.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode};
use futures::FutureExt;
use tasuki_core::{FailureKind, WorkerId};
use tasuki_flow::{
    Finish, Handoff, LegEnd, LegEndReason, LegKind, LegSpec, Opaque, Output, Ticket,
};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::client::{HttpError, MOST_ANSWER_BYTES};
use super::exchange::{Connections, Exchange};
use super::forward::first_error;
use super::ranks::{self, Ranks};
use super::recomputed::{KvLoads, Recomputed};
use super::sglang::{self, Meeting};
use super::vllm::{self, NoTicket};
use crate::discovery::{Engine, ForeignAddress};
use crate::error::ApiError;
use crate::foreign::estimate;
use crate::foreign::object::Object;
use crate::foreign::request::{Answer, ForeignRequest, Head};
use crate::workers::local_leg::Reports;
use crate::workers::registry::Registry;

/// Of a worker's error that is logged.
pub const MOST_LOGGED: usize = 300;

/// A worker while it is connected: what all its legs share.
pub struct Site {
    pub worker: WorkerId,
    pub address: ForeignAddress,
    /// By which it knows its model, the preferred one first.
    pub names: Vec<String>,
    pub connections: Connections,
    pub registry: Arc<Registry>,
    /// Its health is to be looked at now.
    pub doubts: Notify,
    /// How long a stream that has begun may bring nothing, and an error's body may take.
    pub stalled: Option<Duration>,
    pub loads: KvLoads,
    /// Of data parallelism; `None`: it does not tell.
    pub ranks: Option<Ranks>,
}

/// Why a leg did not end well.
#[derive(Debug)]
pub struct Failure {
    pub reason: LegEndReason,
    pub kind: FailureKind,
    pub message: String,
    /// Of a rejected request: the worker's own, an [`Answer`].
    pub answer: Option<Opaque>,
}

impl Failure {
    pub fn new(reason: LegEndReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            kind: reason.usual_failure(),
            message: message.into(),
            answer: None,
        }
    }

    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(LegEndReason::Failed, message)
    }

    /// The client gets this error, at once.
    pub fn rejected(error: &ApiError) -> Self {
        let answer = Answer {
            head: Some(Head {
                status: error.status(),
                content_type: None,
            }),
            bytes: serde_json::to_vec(&error.body()).unwrap_or_default().into(),
            usage: None,
            room: None,
        };
        Self {
            answer: Some(Opaque::new(answer)),
            ..Self::new(LegEndReason::Rejected, error.log_reason())
        }
    }
}

impl From<HttpError> for Failure {
    fn from(error: HttpError) -> Self {
        Self::failed(error.to_string())
    }
}

impl From<Failure> for LegEnd {
    fn from(failure: Failure) -> Self {
        Self {
            reason: failure.reason,
            failure: failure.kind,
            message: failure.message,
            answer: failure.answer,
            ticket: None,
            timings: None,
        }
    }
}

fn ended(reason: LegEndReason, ticket: Option<Ticket>) -> LegEnd {
    LegEnd {
        reason,
        failure: reason.usual_failure(),
        message: String::new(),
        answer: None,
        ticket,
        timings: None,
    }
}

/// Runs a leg to its end, and reports it. Dropped: the connection to the worker closes, which
/// ends its work.
pub async fn run(site: Arc<Site>, spec: LegSpec, reports: Reports) {
    let leg = Leg {
        site: &site,
        name: reports.name(),
        spec: &spec,
        reports: &reports,
    };
    let served = AssertUnwindSafe(leg.serve()).catch_unwind().await;
    let served = served.unwrap_or_else(|_| {
        tracing::error!(request_id = reports.name(), "the work of a leg panicked");
        Err(Failure::failed("the router failed on its answer"))
    });
    match served {
        Ok((output, end)) => {
            if let Some(output) = output {
                reports.output(output);
            }
            reports.end(end);
        }
        Err(failure) => {
            if failure.reason == LegEndReason::Failed {
                site.doubts.notify_one();
            }
            reports.end(failure.into());
        }
    }
}

/// A leg, and where it runs.
pub struct Leg<'a> {
    pub site: &'a Arc<Site>,
    pub name: &'a str,
    pub spec: &'a LegSpec,
    pub reports: &'a Reports,
}

impl Leg<'_> {
    async fn serve(&self) -> Result<(Option<Output>, LegEnd), Failure> {
        let content = self.spec.opaque.as_ref().map(|opaque| &opaque.content);
        let request = content.and_then(|content| content.get::<ForeignRequest>());
        let request = request.ok_or_else(|| Failure::failed("a request without its content"))?;
        let loaded = self.site.loads.now();
        let body = self.body(request)?;
        let answer = self.send(request, &body).await;
        if let Err(failure) = &answer
            && failure.reason == LegEndReason::Rejected
        {
            self.release(request);
        }
        let answer = answer?;
        if self.spec.kind == LegKind::Prefill {
            let end = self.hand_off(request, answer).await?;
            return Ok((None, end));
        }
        let told = match self.spec.handoff {
            Some(Handoff::With(_)) if sglang::wants_prompt_logprobs(&request.body) => {
                request.shared.receive(self.name).await
            }
            _ => None,
        };
        if request.stream {
            self.forward(request, answer, told).await?;
        } else {
            self.forward_whole(answer, told).await?;
        }
        if let Some(Handoff::Redeem { .. }) = self.spec.handoff {
            self.site.loads.redeemed(loaded);
        }
        let finish = Output {
            finish: Some(Finish::Stop),
            ..Output::default()
        };
        Ok((Some(finish), ended(LegEndReason::Finished, None)))
    }

    /// The client's body, with what the engine needs for this leg.
    fn body(&self, request: &ForeignRequest) -> Result<Object, Failure> {
        let ForeignAddress {
            engine,
            bootstrap_port,
            ..
        } = self.site.address;
        let client = self.with_model(request);
        let rank = match engine {
            Engine::Sglang => ranks::named(request, self.site.ranks)?,
            Engine::Vllm => None,
        };
        let meet = |host, port, to_name: Option<u32>| {
            let meeting = Meeting {
                host,
                port,
                attempt: self.name,
                rooms: request.rooms,
            };
            let mut body = sglang::body(&client, meeting);
            let chosen = || to_name.map(|count| sglang::rank(self.name, count));
            if let Some(of_prefill) = rank.or_else(chosen) {
                ranks::set_of_prefill(&mut body, of_prefill);
                let own = (self.spec.kind == LegKind::Prefill).then_some(of_prefill);
                if let Some(own) = own.or(rank) {
                    ranks::set(&mut body, own);
                }
            }
            body
        };
        match (engine, &self.spec.handoff, self.spec.kind) {
            (_, None, _) => Ok(client.clone()),
            (Engine::Vllm, Some(Handoff::IssueTicket), _) => {
                Ok(vllm::prefill_body(&client, request.path))
            }
            (Engine::Vllm, Some(Handoff::Redeem { ticket, .. }), _) => {
                Ok(vllm::decode_body(&client, ticket))
            }
            (Engine::Sglang, Some(Handoff::With(_)), LegKind::Prefill) => {
                let to_name = self.site.ranks.and_then(Ranks::to_name);
                Ok(meet(self.site.address.host(), bootstrap_port, to_name))
            }
            (Engine::Sglang, Some(Handoff::With(peer)), _) => {
                let endpoint = ranks::read_endpoint(&peer.kv_endpoint);
                let (host, port, to_name) =
                    endpoint.ok_or_else(|| Failure::failed("no bootstrap port"))?;
                Ok(meet(host, port, to_name))
            }
            _ => Err(Failure::failed("a handoff of another engine")),
        }
    }

    /// Workers know their model by their own names, not by the router's aliases. SGLang knows
    /// adapters by a field of their own.
    pub fn with_model(&self, request: &ForeignRequest) -> Object {
        let mut body = request.body.clone();
        let asked: Option<String> = body.read("model");
        // An adapter is another model than its base, also one that no worker has any more.
        let known = asked.as_ref().is_some_and(|asked| {
            let is_base = || self.site.registry.catalog().bases.contains(asked);
            self.site.names.contains(asked) || !is_base()
        });
        if !known && request.path.starts_with("/v1/") {
            let own = self.site.names.first();
            own.into_iter().for_each(|own| body.set("model", own));
        } else if self.site.address.engine == Engine::Sglang
            && let Some(adapter) = asked
            && { self.spec.opaque.iter() }.any(|o| o.adapters.iter().any(|one| **one == *adapter))
            && estimate::lora_path(&body).is_ok_and(|beside| beside.is_empty())
        {
            body.set("lora_path", &adapter);
        }
        body
    }

    /// The leg's request with this body.
    pub fn message(&self, request: &ForeignRequest, body: &Object) -> Vec<u8> {
        let body = body.to_json();
        let mut message = format!(
            "POST {} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n\
             accept-encoding: identity\r\ncontent-length: {}\r\nx-request-id: {}\r\n",
            request.path,
            self.site.address.authority,
            body.len(),
            self.name
        )
        .into_bytes();
        let of_leg = self.spec.trace.as_ref().and_then(Opaque::get::<HeaderMap>);
        let of_client = request.headers.iter();
        let of_client =
            of_client.filter(|(name, _)| !of_leg.is_some_and(|h| h.contains_key(*name)));
        for (name, value) in of_client.chain(of_leg.into_iter().flatten()) {
            add_header(&mut message, name.as_str(), value);
        }
        message.extend_from_slice(b"\r\n");
        message.extend_from_slice(&body);
        message
    }

    /// The answer, if it is one of success.
    async fn send(&self, request: &ForeignRequest, body: &Object) -> Result<Exchange<'_>, Failure> {
        let message = self.message(request, body);
        let answer = self.site.connections.ask(&message).await?;
        if let Some(coding) = answer.coding() {
            return Err(Failure::failed(format!(
                "its answer has the Content-Encoding {coding}, which the router does not read: switch \
                 compression off in the worker, or in the proxy before it"
            )));
        }
        match answer.status() {
            status if status.is_success() => Ok(answer),
            status => Err(self.refused(status, answer).await),
        }
    }

    /// What an answer other than success means. What the client did wrong goes to the client
    /// as the worker says it.
    async fn refused(&self, status: StatusCode, answer: Exchange<'_>) -> Failure {
        let content_type = answer.content_type();
        let whole = answer.whole(MOST_ANSWER_BYTES);
        let whole = match self.site.stalled {
            Some(limit) => timeout(limit, whole)
                .await
                .unwrap_or(Err(HttpError::Late(limit))),
            None => whole.await,
        };
        let said = match &whole {
            Ok(bytes) => {
                String::from_utf8_lossy(&bytes[..bytes.len().min(MOST_LOGGED)]).into_owned()
            }
            Err(error) => format!("its body does not come: {error}"),
        };
        let message = format!("{status}: {said}");
        match (status.as_u16(), whole) {
            (429 | 503, _) => Failure::new(LegEndReason::Refused, message),
            (400..=499, Ok(bytes)) => Failure {
                answer: Some(Opaque::new(Answer {
                    head: Some(Head {
                        status,
                        content_type,
                    }),
                    bytes,
                    usage: None,
                    room: None,
                })),
                ..Failure::new(LegEndReason::Rejected, message)
            },
            _ => self.broke(message),
        }
    }

    /// A failure before the first output: of a decode leg it is likely that of the KV's way.
    pub fn broke(&self, message: String) -> Failure {
        match (self.spec.kind, &self.spec.handoff) {
            (LegKind::Decode, Some(_)) => Failure::new(LegEndReason::KvLost, message),
            _ => Failure::failed(message),
        }
    }

    /// The end of a prefill leg.
    async fn hand_off(
        &self,
        request: &ForeignRequest,
        answer: Exchange<'_>,
    ) -> Result<LegEnd, Failure> {
        let answer = answer.whole(MOST_ANSWER_BYTES).await?;
        if self.site.address.engine == Engine::Sglang {
            if let Some((_, data)) = first_error(&answer).filter(|_| request.stream) {
                return Err(Failure::failed(data));
            }
            if sglang::wants_prompt_logprobs(&request.body) {
                let told = sglang::prompt_logprobs(&answer, request.stream);
                request.shared.send(self.name, told);
            }
            return Ok(ended(LegEndReason::HandedOff, None));
        }
        let ticket = vllm::ticket(&answer);
        if let Err(error) = &ticket {
            let (worker, address) = (self.site.worker, &self.site.address.authority);
            let reason = match error {
                NoTicket::Missing => Recomputed::NoTicket,
                NoTicket::Incomplete(_) => Recomputed::IncompleteTicket,
            };
            self.site.registry.recomputed.count(reason);
            tracing::warn!(
                request_id = self.name,
                %worker,
                address,
                role = "prefill",
                "the worker prefilled, but {error}. The prompt is computed again, by one worker"
            );
        }
        Ok(ended(LegEndReason::HandedOff, ticket.ok()))
    }
}

fn add_header(message: &mut Vec<u8>, name: &str, value: &HeaderValue) {
    for part in [name.as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
        message.extend_from_slice(part);
    }
}
