//! `GET /health_generate`, SGLang's own path: whether a worker of a model can generate.
//!
//! A token that a worker of the model decoded a moment ago answers it. Otherwise a short generation
//! goes the way of any request, and all probes of the model that come meanwhile wait for that one.
//! However many probes come, they cost a model one short generation a second.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{Request, header};
use serde::Deserialize;
use serde_json::{Value, json};
use tasuki_core::ModelId;
use tokio::time::{sleep, timeout};

use crate::app::App;
use crate::error::ApiError;
use crate::openai;

/// With two a request has a decode leg, where it is split.
const TOKENS: u32 = 2;
/// Of the generation, so that it waits behind no client's queue.
const TENANT: &str = "health_generate";
/// Probes within this time get the same answer.
const AGE: Duration = Duration::from_secs(1);
/// For the tokens to come; SGLang's own limit.
const LIMIT: Duration = Duration::from_secs(20);
/// How often to look for tokens of other requests, where the generation found no place.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const RETRY_AFTER_S: u32 = 2;

/// The last answer for a model, and when it was found. Locked while a generation runs.
type Last = Arc<tokio::sync::Mutex<Option<(Instant, Result<(), ApiError>)>>>;

/// What probes have found.
#[derive(Debug)]
pub struct Probes {
    age: Duration,
    limit: Duration,
    last: Mutex<HashMap<ModelId, Last>>,
}

impl Default for Probes {
    fn default() -> Self {
        Self::new(AGE, LIMIT)
    }
}

/// The parameters of the path.
#[derive(Debug, Deserialize)]
pub struct Asked {
    model: Option<String>,
}

/// The handler.
pub async fn health_generate(
    State(app): State<Arc<App>>,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(Asked { model }) =
        asked.map_err(|error| ApiError::invalid("model", error.to_string()))?;
    app.gate.check_ready()?;
    let model = model.as_deref();
    let id = match app.find_foreign(model)? {
        Some(foreign) => foreign.id,
        None => app.models.find(model)?.1.id,
    };
    let readiness = app.generator.readiness(Some(id));
    readiness.map_err(|reason| unavailable(reason.to_string()))?;
    app.probes.answer(&app, id, model).await?;
    Ok(Json(json!({"status": "ok"})))
}

impl Probes {
    /// `age`: how long an answer counts. `limit`: how long tokens may take.
    pub fn new(age: Duration, limit: Duration) -> Self {
        Self {
            age,
            limit,
            last: Mutex::default(),
        }
    }

    async fn answer(
        &self,
        app: &Arc<App>,
        id: ModelId,
        model: Option<&str>,
    ) -> Result<(), ApiError> {
        let decoded = app.generator.last_decoded(id);
        if decoded.is_some_and(|at| at.elapsed() < self.age) {
            return Ok(());
        }
        let last = {
            let mut all = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(all.entry(id).or_default())
        };
        let mut last = last.lock_owned().await;
        if let Some((found, answer)) = &*last
            && found.elapsed() < self.age
        {
            return answer.clone();
        }
        // A task, so that a probe that hangs up leaves its generation to the next one.
        let (app, model) = (Arc::clone(app), model.map(str::to_owned));
        let generation = tokio::spawn(async move {
            let answer = app.probes.generates(&app, id, model.as_deref()).await;
            *last = Some((Instant::now(), answer.clone()));
            answer
        });
        let panicked = |_| Err(unavailable("a generation panicked".to_owned()));
        generation.await.unwrap_or_else(panicked)
    }

    /// Whether a generation succeeds, or others do where there is no place for it.
    async fn generates(
        &self,
        app: &Arc<App>,
        id: ModelId,
        model: Option<&str>,
    ) -> Result<(), ApiError> {
        let began = Instant::now();
        let error = match timeout(self.limit, generate(app, model)).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error,
            Err(_) => unavailable(format!(
                "a generation of {TOKENS} tokens was not finished after {:?}",
                self.limit
            )),
        };
        let decodes = || {
            let decoded = app.generator.last_decoded(id);
            decoded.is_some_and(|at| at >= began)
        };
        while !decodes() {
            if !is_overload(&error) || began.elapsed() >= self.limit {
                return Err(failure(error));
            }
            sleep(LOOK_AGAIN).await;
        }
        Ok(())
    }
}

/// A short completion, like that of a client.
async fn generate(app: &Arc<App>, model: Option<&str>) -> Result<(), ApiError> {
    let mut body =
        json!({"prompt": "Hello", "max_tokens": TOKENS, "temperature": 0, "user": TENANT});
    if let Some(model) = model {
        body["model"] = model.into();
    }
    let mut request =
        Request::post("/v1/completions").header(header::CONTENT_TYPE, "application/json");
    if let Some(header) = &app.settings.tenant_header {
        request = request.header(header, TENANT);
    }
    let request = request
        .body(Body::from(body.to_string()))
        .expect("the path and the header are valid");
    let response = openai::completions(State(Arc::clone(app)), request).await?;
    let status = response.status();
    if status.is_success() {
        return Ok(());
    }
    let error = response.extensions().get::<ApiError>().cloned();
    Err(error.unwrap_or_else(|| ApiError::Failed(format!("the worker answers {status}"))))
}

/// Whether the generation found no place because of others.
fn is_overload(error: &ApiError) -> bool {
    matches!(
        error,
        ApiError::Busy { .. } | ApiError::Crowded { .. } | ApiError::Overloaded { .. }
    )
}

/// What a probe is told of it.
fn failure(error: ApiError) -> ApiError {
    match error {
        ApiError::Unavailable { .. } | ApiError::Draining => error,
        other => unavailable(format!("a generation of {TOKENS} tokens failed: {other}")),
    }
}

fn unavailable(reason: String) -> ApiError {
    ApiError::Unavailable {
        reason,
        retry_after_s: RETRY_AFTER_S,
    }
}
