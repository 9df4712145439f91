//! What every handler shares.

use std::sync::Arc;
use std::time::Duration;

use tasuki_text::ModelText;

use crate::error::ApiError;
use crate::gate::Gate;
use crate::openai::{self, BodyLimits, Generator, TextLimit};
use crate::pool::Pool;
use crate::serve::api::ModelLimits;

/// What the HTTP side was configured with.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    /// The model's names, the preferred one first; never empty.
    pub model_names: Vec<String>,
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
}

/// Shared by all handlers.
pub struct App {
    pub generator: Arc<dyn Generator>,
    pub text: Arc<ModelText>,
    pub settings: HttpSettings,
    pub gate: Gate,
    pub text_limit: TextLimit,
    pub bodies: BodyLimits,
    pub pool: Pool,
    pub started_unix_s: u64,
}

/// How long a client is asked to wait when no worker is there.
const NO_WORKER_RETRY_AFTER_S: u32 = 2;

impl App {
    pub fn new(
        generator: Arc<dyn Generator>,
        text: Arc<ModelText>,
        settings: HttpSettings,
    ) -> Self {
        Self {
            gate: Gate::new(settings.max_concurrent_requests),
            text_limit: TextLimit::new(&text),
            bodies: BodyLimits::new(settings.max_body_bytes, settings.body_timeout),
            pool: Pool::new(settings.max_concurrent_requests as usize),
            generator,
            text,
            settings,
            started_unix_s: openai::unix_seconds(),
        }
    }

    /// The name under which a request gets its answer; the preferred one if it
    /// gave none.
    ///
    /// # Errors
    /// A name that is not served.
    pub fn model_name(&self, requested: Option<&str>) -> Result<String, ApiError> {
        let names = &self.settings.model_names;
        match requested {
            None => Ok(names[0].clone()),
            Some(name) if names.iter().any(|served| served == name) => Ok(name.to_owned()),
            Some(name) => Err(ApiError::UnknownModel {
                requested: name.chars().take(MAX_QUOTED_CHARS).collect(),
                served: names.join(", "),
            }),
        }
    }

    /// What the workers agree on.
    ///
    /// # Errors
    /// `Unavailable` while none is known.
    pub fn limits(&self) -> Result<ModelLimits, ApiError> {
        self.generator.limits().ok_or_else(|| self.no_worker())
    }

    /// Prompt and output together, in tokens, as far as known.
    pub fn max_model_len(&self) -> Option<u32> {
        let limits = self.generator.limits();
        limits.map_or_else(|| self.text.max_context(), |l| Some(l.max_model_len))
    }

    /// Of the workers, or of the tokenizer while none is known.
    pub fn vocab_size(&self) -> u32 {
        self.generator.limits().map_or_else(
            || u32::try_from(self.text.vocab_size()).unwrap_or(u32::MAX),
            |limits| limits.vocab_size,
        )
    }

    /// Why nobody can take a request now.
    pub fn no_worker(&self) -> ApiError {
        ApiError::Unavailable {
            reason: self
                .generator
                .readiness()
                .err()
                .unwrap_or_else(|| "none has reported yet".to_owned()),
            retry_after_s: NO_WORKER_RETRY_AFTER_S,
        }
    }
}

/// Of a client's own words in an answer.
pub const MAX_QUOTED_CHARS: usize = 200;
