//! What both generating endpoints do around their own fields: read the body, prepare it
//! on the pool, admit the request by its number of sequences, run it.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::Request;
use axum::response::Response;
use serde::Deserialize;
use tasuki_flow::SamplingParams;

use super::body::{self, Received};
use super::constraint::Constraint;
use super::delivery::Delivery;
use super::sampling::{ModelSampling, sampling_params};
use super::tenant;
use super::types::CommonFields;
use super::validate;
use crate::access_log::{self, RequestLog};
use crate::alarm::Deadline;
use crate::api_keys::Caller;
use crate::app::{App, ForeignModel, SglangModel};
use crate::error::ApiError;
use crate::foreign::object::Object;
use crate::foreign::{self, Incoming};
use crate::models::Model;
use crate::openai::answer::outputs::{Job, Outputs};
use crate::openai::answer::wording::{AnswerInfo, Wording, unix_seconds};
use crate::openai::answer::{Run, RunningAnswer, size};
use crate::pool::Purpose;
use crate::serve::api::{Arrival, Generation, ModelLimits};
use crate::traces::{PhaseName, Trace};

/// A request that is ready to run.
pub struct Prepared<W> {
    pub wording: W,
    pub info: AnswerInfo,
    pub delivery: Delivery,
    pub jobs: Vec<Job>,
    /// The field that bounds the output.
    pub max_tokens_field: &'static str,
    pub model: Arc<Model>,
}

/// A body that is only split into its fields takes some 10 us for so many bytes: less than its
/// way to the pool and back.
const QUICKLY_PARSED_BYTES: usize = 32 << 10;

/// An endpoint that generates.
pub struct Endpoint<W> {
    pub path: &'static str,
    /// Whether another engine's workers serve a request, and as what.
    pub find_foreign: fn(&App, &[u8]) -> Result<Option<ForForeign>, ApiError>,
    /// Reads the endpoint's own fields.
    pub prepare: fn(&App, &[u8]) -> Result<Prepared<W>, ApiError>,
}

/// A request that workers of another engine serve.
pub struct ForForeign {
    pub model: ForeignModel,
    /// Only workers of this identity; `None`: of the model.
    pub bound_to: Option<tasuki_core::Identity>,
    pub body: Object,
}

impl ForForeign {
    fn of_sglang(found: SglangModel, body: Object) -> Self {
        Self {
            model: found.model,
            bound_to: Some(found.identity),
            body,
        }
    }
}

/// The fields that all endpoints share, checked.
pub struct Common {
    pub info: AnswerInfo,
    pub delivery: Delivery,
    /// Its grammar is for `bind` to set.
    pub sampling: SamplingParams,
    /// What the answer must look like.
    pub constraint: Option<Constraint>,
    /// The client chose the seed.
    seeded: bool,
    pub limits: ModelLimits,
    pub cache_salt: String,
    tenant: Arc<str>,
    priority: i32,
    pub model: Arc<Model>,
}

/// Serves one generating request.
///
/// A permit is taken only when the whole body is there and the number of sequences is
/// known: a slow client holds nothing but its connection.
///
/// # Errors
/// Whatever prevents an answer from beginning.
pub async fn serve<W: Wording>(
    app: Arc<App>,
    request: Request,
    endpoint: Endpoint<W>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    app.gate.check_open()?;
    let (parts, body) = request.into_parts();
    let caller = parts.extensions.get::<Caller>().cloned();
    let trace = parts.extensions.get::<Trace>().cloned();
    let caller_permit = caller.as_ref().map(Caller::enter).transpose()?;
    let body = app.bodies.read(&parts.headers, body).await?;
    let received = Instant::now();
    let mut deadline = Deadline::after(received, app.settings.request_timeout);
    let tokenize = trace
        .as_ref()
        .map(|t| t.begin(PhaseName::Tokenize, received));
    if app.serves_foreign() {
        let find = endpoint.find_foreign;
        let found = match body.bytes.len() {
            ..=QUICKLY_PARSED_BYTES => find(&app, &body.bytes)?,
            bytes => {
                let purpose = Purpose::Prompt { bytes };
                let found = deadline.limit(work_up(&app, purpose, body.clone(), find));
                found.await??
            }
        };
        if let Some(found) = found {
            drop(body); // others may have its room
            if let Some(tokenize) = tokenize {
                tokenize.end();
            }
            let incoming = Incoming {
                path: endpoint.path,
                caller_permit,
                parts,
                body: found.body,
                model: found.model,
                bound_to: found.bound_to,
                started,
                received,
                deadline,
                trace,
            };
            return foreign::serve(app, incoming).await;
        }
    }
    let purpose = Purpose::Prompt {
        bytes: body.bytes.len(),
    };
    let prepared = deadline.limit(work_up(&app, purpose, body, endpoint.prepare));
    let mut prepared = prepared.await??;
    if let Some(tokenize) = tokenize {
        tokenize.end();
    }
    let tenant = match &app.settings.tenant_header {
        Some(header) => Some(tenant::of_header(&parts.headers, header)?),
        None => caller.as_ref().map(Caller::tenant),
    };
    if let Some(tenant) = tenant {
        for job in &mut prepared.jobs {
            job.generation.tenant = Arc::clone(&tenant);
        }
    }
    size::check(&prepared, app.settings.max_answer_bytes)?;
    let permit = app
        .gate
        .enter(prepared.jobs.len() * prepared.delivery.n as usize)?;
    // All jobs of a request are of one tenant.
    let log_tenant = prepared.jobs.first();
    let log_tenant = log_tenant.map_or_else(|| "".into(), |job| Arc::clone(&job.generation.tenant));
    let outputs = Outputs::start(
        app.generator.as_ref(),
        &prepared.model.text,
        &prepared.delivery,
        prepared.jobs,
        &Arrival {
            received,
            trace: trace.clone(),
        },
    );
    let log = RequestLog {
        request_id: prepared.info.id.clone(),
        model: prepared.info.model.clone(),
        endpoint: endpoint.path,
        tenant: log_tenant,
        started,
        end: access_log::End::default(),
        trace,
    };
    let run = Run {
        info: prepared.info,
        delivery: prepared.delivery,
        outputs,
        log,
        deadline,
        heartbeat: app.settings.heartbeat,
        _permit: permit,
        _caller_permit: caller_permit,
    };
    let wording = prepared.wording;
    let answer = RunningAnswer { wording, run }.answer().await;
    Ok(access_log::logged(answer))
}

/// A body, and the model that it names, if it does.
pub fn named(bytes: &[u8]) -> Result<(Object, Option<String>), ApiError> {
    #[derive(Deserialize)]
    struct Named {
        model: Option<String>,
    }
    let body: Object = body::parse(bytes)?;
    let model = match body.read("model") {
        Some(name) => name,
        // Not a string: what parses it says so.
        None if body.has("model") => body::parse::<Named>(bytes)?.model,
        None => None,
    };
    Ok((body, model))
}

/// For the endpoints that vLLM and SGLang both have.
///
/// # Errors
/// No such model is served.
pub fn find_foreign(app: &App, bytes: &[u8]) -> Result<Option<ForForeign>, ApiError> {
    let (body, name) = named(bytes)?;
    let model = match app.find_foreign(name.as_deref()) {
        Err(unknown @ ApiError::UnknownModel { .. }) => {
            let found = name.and_then(|name| app.find_sglang_adapter(&name));
            let found = found.ok_or(unknown)?;
            return Ok(Some(ForForeign::of_sglang(found, body)));
        }
        known => known?,
    };
    Ok(model.map(|model| ForForeign {
        model,
        bound_to: None,
        body,
    }))
}

/// For the endpoints that only SGLang has.
///
/// # Errors
/// Neither our workers nor SGLang's serve such a model.
pub fn find_sglang(app: &App, bytes: &[u8]) -> Result<Option<ForForeign>, ApiError> {
    let (body, name) = named(bytes)?;
    let found = app.find_sglang(name.as_deref())?;
    Ok(found.map(|found| ForForeign::of_sglang(found, body)))
}

/// Runs `work` on a body, on the pool.
///
/// # Errors
/// Those of `work`, and of a pool that is full.
pub async fn work_up<T: Send + 'static>(
    app: &Arc<App>,
    purpose: Purpose,
    body: Received,
    work: fn(&App, &[u8]) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let owned = Arc::clone(app);
    let work = move || work(&owned, &body.bytes);
    app.pool.run(purpose, work).await
}

impl Common {
    /// Checks the shared fields. `max_tokens` and logprobs are still to be set.
    ///
    /// # Errors
    /// An unknown model, no worker to know the limits of, bad values.
    pub fn new<W: Wording>(app: &App, fields: &CommonFields) -> Result<Self, ApiError> {
        let (name, model) = app.models.find(fields.model.as_deref())?;
        let limits = app.limits(&model)?;
        let sampling = sampling_params(
            fields,
            ModelSampling {
                defaults: model.text.generation_defaults(),
                eos_token_ids: model.text.eos_token_ids(),
                vocab_size: limits.vocab_size,
            },
            rand::random,
        )?;
        let cache_salt = validate::cache_salt("cache_salt", fields.cache_salt.as_deref())?;
        let mut delivery = Delivery::new(fields, sampling.min_tokens)?;
        delivery.stop_token_ids = sampling.stop_token_ids.as_slice().into();
        Ok(Self {
            info: AnswerInfo {
                id: format!("{}{:032x}", W::ID_PREFIX, rand::random::<u128>()),
                created: unix_seconds(),
                model: name,
            },
            delivery,
            sampling,
            constraint: Constraint::of(fields)?,
            seeded: fields.seed.is_some(),
            limits,
            cache_salt,
            tenant: tenant::of_field(fields.user.as_deref())?,
            priority: tenant::priority(fields.priority, app.settings.allow_priority)?,
            model,
        })
    }

    /// Lets answers follow the constraint and nothing else.
    ///
    /// # Errors
    /// `Invalid` where workers cannot follow it.
    pub fn bind(&mut self) -> Result<(), ApiError> {
        let constraint = self.constraint.as_ref();
        let grammar = constraint.map(|constraint| constraint.check(&self.model.grammars));
        self.sampling.grammar = grammar.transpose()?;
        Ok(())
    }

    /// The generation of one prompt. `index` tells the prompts of a request
    /// apart, where there are several.
    ///
    /// # Errors
    /// An empty prompt, or a `min_tokens` that cannot be reached.
    pub fn generation(
        &self,
        index: Option<usize>,
        param: &str,
        prompt: Vec<u32>,
        max_tokens: u32,
    ) -> Result<Generation, ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::invalid(
                param,
                format!("{param} has 0 tokens; at least 1 is needed."),
            ));
        }
        let min_tokens = self.sampling.min_tokens;
        if min_tokens > max_tokens {
            return Err(ApiError::invalid(
                "min_tokens",
                format!("min_tokens is {min_tokens}; max_tokens is {max_tokens}."),
            ));
        }
        // Equal prompts of one request differ as those of two requests would.
        let seed = match index {
            Some(1..) if !self.seeded => rand::random(),
            _ => self.sampling.seed,
        };
        let id = &self.info.id;
        Ok(Generation {
            model: self.model.id,
            request_id: index.map_or_else(|| id.clone(), |index| format!("{id}-{index}")),
            prompt: prompt.into(),
            n: self.delivery.n,
            sampling: SamplingParams {
                max_tokens,
                seed,
                ..self.sampling.clone()
            },
            cache_salt: self.cache_salt.clone(),
            tenant: Arc::clone(&self.tenant),
            priority: self.priority,
            opaque: None,
        })
    }
}
