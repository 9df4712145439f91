//! A client's request for a model of another engine: checked as far as it is ours, placed like
//! any other, its answer passed on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use tasuki_core::{FailureKind, Identity, Indivisible};
use tasuki_flow::{Opaque, OpaqueRequest, SamplingParams};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::answer::{AnswerBody, Answering, Next};
use super::engines;
use super::estimate::{self, Estimate};
use super::object::Object;
use super::request::{Answer, ForeignRequest, Shared, WINDOW_BYTES};
use super::resume::Resumption;
use crate::access_log::{self, RequestLog};
use crate::alarm::Deadline;
use crate::api_keys::{Caller, CallerPermit};
use crate::app::{App, ForeignModel};
use crate::error::ApiError;
use crate::openai::tenant;
use crate::serve::api::{Arrival, Generation, ServeError};
use crate::traces::Trace;

/// Of a client's headers, what workers get: others are between it and the router.
const PASSED_HEADERS: [&str; 5] = [
    "authorization",
    "traceparent",
    "tracestate",
    "baggage",
    "x-data-parallel-rank",
];

/// What only the router says to workers: with it a client could make them read another
/// request's KV, or connect to any host.
pub const OURS: [&str; 8] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
];
/// Where vLLM takes further arguments of a request from, `kv_transfer_params` among them.
pub const EXTRA_ARGUMENTS: &str = "vllm_xargs";

/// A request, received.
pub struct Incoming {
    pub path: &'static str,
    pub parts: Parts,
    pub caller_permit: Option<CallerPermit>,
    pub body: Object,
    pub model: ForeignModel,
    /// Only workers of this identity can take it.
    pub bound_to: Option<Identity>,
    pub started: Instant,
    pub received: Instant,
    pub deadline: Deadline,
    pub trace: Option<Trace>,
}

/// Serves it.
///
/// # Errors
/// Whatever prevents an answer from beginning, but for a worker's own refusal: that is a
/// response.
pub async fn serve(app: Arc<App>, incoming: Incoming) -> Result<Response, ApiError> {
    let extra: Object = incoming.body.read(EXTRA_ARGUMENTS).unwrap_or_default();
    for name in OURS {
        let place = match (incoming.body.has(name), extra.has(name)) {
            (false, false) => continue,
            (true, _) => name.to_owned(),
            (false, true) => format!("{EXTRA_ARGUMENTS}.{name}"),
        };
        let message = format!("{place} is set by the router; leave it out.");
        return Err(ApiError::invalid(&place, message));
    }
    let estimate = Estimate::of(incoming.path, &incoming.body)?;
    let stream = estimate::switch(&incoming.body, "stream")?;
    let generation = generation(&app, &incoming, estimate, stream)?;
    let sequences = generation
        .opaque
        .as_ref()
        .map_or(1, |opaque| opaque.sequences);
    let permit = app.gate.enter(sequences as usize)?;
    let id = generation.request_id.clone();
    let names = incoming.model.names.into_iter();
    let arrival = Arrival {
        received: incoming.received,
        trace: incoming.trace,
    };
    let log = RequestLog {
        request_id: id.clone(),
        model: names.take(1).collect(),
        endpoint: incoming.path,
        tenant: Arc::clone(&generation.tenant),
        started: incoming.started,
        end: access_log::End::default(),
        trace: arrival.trace.clone(),
    };
    let answering = Answering {
        app: Arc::clone(&app),
        resumption: Resumption::of(incoming.path, &incoming.body),
        generating: app.generator.generate(generation.clone(), arrival),
        generation,
        log,
        deadline: incoming.deadline,
        usage: None,
        tokens: 0,
        timings: None,
        _permit: permit,
        _caller_permit: incoming.caller_permit,
    };
    let answer = match stream {
        true => streamed(answering, app.settings.heartbeat).await,
        false => whole(answering).await,
    };
    let mut response = match answer {
        Ok(response) => response,
        Err(error) => return Ok(access_log::logged(Err(error))),
    };
    let id = HeaderValue::from_str(&id).expect("an id is ASCII");
    response.headers_mut().insert("x-request-id", id);
    Ok(access_log::logged(Ok(response)))
}

fn generation(
    app: &App,
    incoming: &Incoming,
    estimate: Estimate,
    stream: bool,
) -> Result<Generation, ApiError> {
    let Incoming { body, parts, .. } = incoming;
    let user: Option<String> = body.read("user");
    let tenant = match &app.settings.tenant_header {
        Some(header) => tenant::of_header(&parts.headers, header)?,
        None => match parts.extensions.get::<Caller>() {
            Some(caller) => caller.tenant(),
            None => tenant::of_field(user.as_deref())?,
        },
    };
    // The worker reads it too, by its own rules.
    let priority = body
        .read("priority")
        .filter(|_| app.settings.allow_priority);
    let mut prompt = estimate.prompt;
    let mut indivisible = estimate.indivisible;
    if let Some(longest) = incoming.model.max_model_len {
        prompt.truncate(longest as usize);
        // Prefill, asked for one token, would take it, and decode refuse it.
        if estimate.asked_tokens.is_some_and(|asked| asked > longest) {
            indivisible = indivisible.or(Some(Indivisible::BeyondContext));
        }
    }
    let mut headers = passed(&parts.headers, app.keys.is_some());
    if let Some(trace) = &incoming.trace {
        trace.hand_on(&mut headers);
    }
    let mut body = body.clone();
    let asked: Option<String> = body.read("model");
    let aliases = app.settings.foreign_aliases.iter();
    if let Some((_, name)) = { aliases }.find(|(alias, _)| Some(alias) == asked.as_ref()) {
        body.set("model", name);
    }
    let asked: Option<String> = body.read("model");
    let adapter = { asked.as_deref() }.and_then(|asked| incoming.model.adapter(asked));
    let catalog = app.generator.catalog();
    // SGLang's requests may name adapters within the model's name, or beside it.
    let beside = estimate::lora_path(&body)?;
    if beside.is_empty() {
        body.remove("lora_path"); // names none, and no worker need know the field
    }
    let bound_to = match incoming.bound_to {
        None => engines::bound_to(&body, &catalog, &incoming.model)?,
        given => given,
    };
    let mut adapters = match adapter {
        Some(adapter) => vec![adapter.to_owned()],
        None if beside.is_empty() => asked.into_iter().collect(),
        None => beside,
    };
    adapters.retain(|adapter| !catalog.bases.contains(adapter));
    let mut cache_salt: String = body.read("cache_salt").unwrap_or_default();
    for adapter in &adapters {
        // Its KV is not that of the base.
        cache_salt = format!("{cache_salt}\0{adapter}");
    }
    let request = ForeignRequest {
        path: incoming.path,
        headers,
        stream,
        body,
        rooms: estimate.is_batch.then_some(estimate.sequences),
        window: Arc::new(Semaphore::new(WINDOW_BYTES)),
        shared: Shared::default(),
    };
    Ok(Generation {
        model: incoming.model.id,
        request_id: format!("req-{:032x}", rand::random::<u128>()),
        prompt: prompt.into(),
        n: 1,
        sampling: SamplingParams {
            max_tokens: estimate.max_tokens,
            ..SamplingParams::default()
        },
        cache_salt,
        tenant,
        priority: tenant::priority(priority, true)?,
        opaque: Some(OpaqueRequest {
            content: Opaque::new(request),
            sequences: estimate.sequences,
            adapters: adapters.into_iter().map(Arc::from).collect(),
            bound_to,
            indivisible,
            resumes: false,
        }),
    })
}

/// `keys`: `authorization` has a key of the router's, which workers must not see.
fn passed(headers: &HeaderMap, keys: bool) -> HeaderMap {
    let names = PASSED_HEADERS.into_iter();
    let names = names.filter(|name| !keys || *name != "authorization");
    let passed = names.flat_map(|name| {
        let values = headers.get_all(name).into_iter();
        values.map(move |value| (header::HeaderName::from_static(name), value.clone()))
    });
    passed.collect()
}

async fn whole(mut answering: Answering) -> Result<Response, ApiError> {
    let mut response = None;
    loop {
        match answering.next().await {
            Next::Part(frame) => {
                let answer = frame.get::<Answer>();
                response = response.or(answer.map(response_of));
            }
            Next::Done => break,
            Next::Failed(error) => return answering.refusal(error),
        }
    }
    response.ok_or_else(|| ended_early().into())
}

async fn streamed(mut answering: Answering, heartbeat: Duration) -> Result<Response, ApiError> {
    // Until the first part the status can still tell of an error. A longer wait needs the
    // headers: proxies cut connections that stay silent.
    let first = timeout(heartbeat, answering.next()).await.ok();
    let content_type = match &first {
        Some(Next::Failed(_)) => {
            let Some(Next::Failed(error)) = first else {
                unreachable!("it was just seen");
            };
            return answering.refusal(error);
        }
        Some(Next::Done) => return Err(ended_early().into()),
        Some(Next::Part(frame)) => {
            let head = frame.get::<Answer>().and_then(|answer| answer.head.clone());
            head.and_then(|head| head.content_type)
        }
        None => None,
    };
    let usual = HeaderValue::from_static("text/event-stream; charset=utf-8");
    let headers = [
        (header::CONTENT_TYPE, content_type.unwrap_or(usual)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    answering.log.end.begin(StatusCode::OK);
    let body = Body::new(AnswerBody::new(answering, first, heartbeat));
    Ok((headers, [("x-accel-buffering", "no")], body).into_response())
}

/// A worker's answer as it is: status, content type, body.
pub fn response_of(answer: &Answer) -> Response {
    let head = answer.head.as_ref();
    let status = head.map_or(StatusCode::OK, |head| head.status);
    let json = || HeaderValue::from_static("application/json");
    let content_type = head.and_then(|head| head.content_type.clone());
    let headers = [(header::CONTENT_TYPE, content_type.unwrap_or_else(json))];
    (status, headers, Bytes::clone(&answer.bytes)).into_response()
}

fn ended_early() -> ServeError {
    ServeError::Failed {
        kind: FailureKind::Device,
        message: "The generation ended without an answer.".to_owned(),
    }
}
