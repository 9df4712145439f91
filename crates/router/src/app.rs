//! What every handler shares.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderName;

use crate::api_keys::ApiKeys;
use crate::error::ApiError;
use crate::gate::Gate;
use crate::models::{Model, Models};
use crate::openai::{self, BodyLimits, Generator, ReasoningParser, ToolParser};
use crate::pool::Pool;
use crate::serve::api::ModelLimits;

/// What the HTTP side was configured with.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    pub max_body_bytes: usize,
    /// From a request's headers to the last byte of its body.
    pub body_timeout: Duration,
    /// Sequences that may be generated at once.
    pub max_concurrent_requests: u32,
    /// From the last byte of a request's body to the end of its answer.
    pub request_timeout: Duration,
    /// Of an answer that is not streamed, and of an echoed prompt.
    pub max_answer_bytes: usize,
    /// A stream that waits for so long sends a comment.
    pub heartbeat: Duration,
    /// Let a request bring its own chat template.
    pub allow_chat_template: bool,
    /// Let a request say how urgent it is.
    pub allow_priority: bool,
    /// The header that names a request's tenant; `None`: the field `user` does.
    pub tenant_header: Option<HeaderName>,
    pub tool_parser: ToolParser,
    pub reasoning_parser: ReasoningParser,
}

/// Shared by all handlers.
pub struct App {
    pub generator: Arc<dyn Generator>,
    pub models: Models,
    pub settings: HttpSettings,
    pub gate: Gate,
    pub bodies: BodyLimits,
    pub pool: Pool,
    pub started_unix_s: u64,
    /// `None`: everybody is let in.
    pub keys: Option<Arc<ApiKeys>>,
}

/// How long a client is asked to wait when no worker is there.
const NO_WORKER_RETRY_AFTER_S: u32 = 2;

impl App {
    pub fn new(generator: Arc<dyn Generator>, models: Models, settings: HttpSettings) -> Self {
        Self {
            gate: Gate::new(settings.max_concurrent_requests),
            bodies: BodyLimits::new(settings.max_body_bytes, settings.body_timeout),
            pool: Pool::new(settings.max_concurrent_requests as usize),
            generator,
            models,
            settings,
            started_unix_s: openai::unix_seconds(),
            keys: None,
        }
    }

    /// What a model's workers agree on.
    ///
    /// # Errors
    /// `Unavailable` while none is known.
    pub fn limits(&self, model: &Model) -> Result<ModelLimits, ApiError> {
        let limits = self.generator.limits(model.id);
        limits.ok_or_else(|| self.no_worker(Some(model)))
    }

    /// Prompt and output together, in tokens, as far as known.
    pub fn max_model_len(&self, model: &Model) -> Option<u32> {
        let limits = self.generator.limits(model.id);
        limits.map_or_else(|| model.text.max_context(), |l| Some(l.max_model_len))
    }

    /// Of the workers, or of the tokenizer while none is known.
    pub fn vocab_size(&self, model: &Model) -> u32 {
        self.generator.limits(model.id).map_or_else(
            || u32::try_from(model.text.vocab_size()).unwrap_or(u32::MAX),
            |limits| limits.vocab_size,
        )
    }

    /// Why no worker can take a request now, to a model or to any.
    pub fn no_worker(&self, model: Option<&Model>) -> ApiError {
        let readiness = self.generator.readiness(model.map(|model| model.id));
        ApiError::Unavailable {
            reason: readiness
                .err()
                .unwrap_or_else(|| "none has reported yet".to_owned()),
            retry_after_s: NO_WORKER_RETRY_AFTER_S,
        }
    }
}

/// Of a client's own words in an answer.
pub const MAX_QUOTED_CHARS: usize = 200;
