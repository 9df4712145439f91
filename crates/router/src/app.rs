//! What every handler shares.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderName;

use tasuki_core::{Identity, ModelId};

use crate::api_keys::ApiKeys;
use crate::discovery::Engine;
use crate::error::ApiError;
use crate::gate::Gate;
use crate::health_generate::Probes;
use crate::models::{Model, Models};
use crate::openai::{self, BodyLimits, Generator, ReasoningParser, ToolParser};
use crate::pool::Pool;
use crate::serve::api::ModelLimits;
use crate::traces::Traces;

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
    /// Further names of models of other engines: alias and name.
    pub foreign_aliases: Vec<(String, String)>,
    pub tool_parser: ToolParser,
    pub reasoning_parser: ReasoningParser,
}

/// A model of another engine's workers, which have its text side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignModel {
    pub id: ModelId,
    /// The preferred one first; never empty.
    pub names: Vec<String>,
    /// Prompt and output together, in tokens, as far as known.
    pub max_model_len: Option<u32>,
}

impl ForeignModel {
    /// The adapter of a name in SGLang's form `base:adapter`.
    pub fn adapter<'a>(&self, name: &'a str) -> Option<&'a str> {
        if self.names.iter().any(|known| known == name) {
            return None;
        }
        let adapter = |base: &String| name.strip_prefix(base.as_str())?.strip_prefix(':');
        let adapters = self.names.iter().filter_map(adapter).map(str::trim);
        // Names of models may have colons, too: that of the longest base.
        let adapter = adapters.min_by_key(|adapter| adapter.len());
        adapter.filter(|adapter| !adapter.is_empty())
    }
}

/// A model that SGLang workers serve, and what only they can take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SglangModel {
    pub model: ForeignModel,
    pub identity: Identity,
}

/// Shared by all handlers.
pub struct App {
    pub generator: Arc<dyn Generator>,
    pub models: Models,
    pub settings: HttpSettings,
    pub gate: Gate,
    pub bodies: BodyLimits,
    pub pool: Pool,
    pub probes: Probes,
    pub started_unix_s: u64,
    /// `None`: everybody is let in.
    pub keys: Option<Arc<ApiKeys>>,
    /// Clients' port is on a loopback address, so it has what is for operators too: /metrics,
    /// and SGLang's /flush_cache and /server_info.
    pub is_local: bool,
    /// `None`: requests are not traced.
    pub traces: Option<Traces>,
}

/// How long a client is asked to wait when no worker is there.
const NO_WORKER_RETRY_AFTER_S: u32 = 2;

impl App {
    pub fn new(generator: Arc<dyn Generator>, models: Models, settings: HttpSettings) -> Self {
        Self {
            gate: Gate::new(settings.max_concurrent_requests),
            bodies: BodyLimits::new(settings.max_body_bytes, settings.body_timeout),
            pool: Pool::new(settings.max_concurrent_requests as usize),
            probes: Probes::default(),
            generator,
            models,
            settings,
            started_unix_s: openai::unix_seconds(),
            keys: None,
            is_local: true,
            traces: None,
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

    /// Models of other engines, with their aliases.
    pub fn foreign_models(&self) -> Arc<[ForeignModel]> {
        let known = Arc::clone(&self.generator.catalog().foreign);
        if self.settings.foreign_aliases.is_empty() {
            return known;
        }
        let mut models = known.to_vec();
        for (alias, name) in &self.settings.foreign_aliases {
            let named = models.iter_mut().find(|model| model.names.contains(name));
            named
                .into_iter()
                .for_each(|model| model.names.push(alias.clone()));
        }
        models.into()
    }

    /// Whether requests may be for workers of other engines.
    pub fn serves_foreign(&self) -> bool {
        self.models.is_empty() || !self.generator.catalog().foreign.is_empty()
    }

    /// The model of a request, if workers of another engine serve it.
    ///
    /// # Errors
    /// Models of other engines are served, and it is none of any; or none is known yet.
    pub fn find_foreign(&self, requested: Option<&str>) -> Result<Option<ForeignModel>, ApiError> {
        let models = self.foreign_models();
        if models.is_empty() && self.models.is_empty() {
            return Err(self.no_worker(None));
        }
        let served = |models: &[ForeignModel]| {
            let foreign = models.iter().flat_map(|model| &model.names).cloned();
            let own = self.models.named().map(|(name, _)| name.clone());
            own.chain(foreign).collect::<Vec<_>>().join(", ")
        };
        match requested {
            _ if models.is_empty() => Ok(None),
            Some(name) if self.models.find(Some(name)).is_ok() => Ok(None),
            Some(name) => match models
                .iter()
                .find(|model| model.names.iter().any(|known| known == name))
            {
                Some(model) => Ok(Some(model.clone())),
                None => Err(ApiError::UnknownModel {
                    requested: name.chars().take(MAX_QUOTED_CHARS).collect(),
                    served: served(&models),
                }),
            },
            None if self.models.is_empty() && models.len() == 1 => Ok(models.first().cloned()),
            None => Err(ApiError::invalid(
                "model",
                format!("model is missing. Served here: {}.", served(&models)),
            )),
        }
    }

    /// The model of a request to a path that only our own workers serve.
    ///
    /// # Errors
    /// Workers of another engine serve it, or nobody does; several models, and no name.
    pub fn find_own(
        &self,
        requested: Option<&str>,
        path: &str,
        instead: &str,
    ) -> Result<Arc<Model>, ApiError> {
        let own = self.models.find(requested);
        if own.is_err()
            && let Some(foreign) = self.find_foreign(requested)?
        {
            let name = foreign.names.first().map_or("", String::as_str);
            return Err(ApiError::invalid(
                "model",
                format!(
                    "model is {name}, which vLLM or SGLang workers serve; {path} is for models of \
                     Tasuki's own workers. {instead}"
                ),
            ));
        }
        own.map(|(_, model)| model)
    }

    /// The model of a request to one of SGLang's own paths, which need not name it; `None`: our
    /// own workers serve it.
    ///
    /// # Errors
    /// No worker is known that serves such a path, or none of that name; several models, and no
    /// name.
    pub fn find_sglang(&self, requested: Option<&str>) -> Result<Option<SglangModel>, ApiError> {
        let mut models = self.sglang_models();
        match requested {
            _ if models.is_empty() && self.models.is_empty() => Err(ApiError::Unavailable {
                reason: "/generate is SGLang's, and no SGLang worker is up; vLLM's take \
                         /v1/completions"
                    .to_owned(),
                retry_after_s: NO_WORKER_RETRY_AFTER_S,
            }),
            _ if models.is_empty() => Ok(None),
            Some(name) if self.models.find(Some(name)).is_ok() => Ok(None),
            Some(name) => {
                let named = |found: &SglangModel| found.model.names.iter().any(|n| n == name);
                match models.iter().position(named) {
                    Some(at) => Ok(Some(models.swap_remove(at))),
                    None => Err(ApiError::UnknownModel {
                        requested: name.chars().take(MAX_QUOTED_CHARS).collect(),
                        served: self.native_names(&models),
                    }),
                }
            }
            None if self.models.is_empty() && models.len() == 1 => Ok(models.pop()),
            None => Err(ApiError::invalid(
                "model",
                format!(
                    "model is missing. Served here: {}.",
                    self.native_names(&models)
                ),
            )),
        }
    }

    /// The model of a name in SGLang's form `base:adapter`, if SGLang workers serve the base.
    pub fn find_sglang_adapter(&self, name: &str) -> Option<SglangModel> {
        let mut models = self.sglang_models().into_iter();
        models.find(|found| found.model.adapter(name).is_some())
    }

    fn sglang_models(&self) -> Vec<SglangModel> {
        let catalog = self.generator.catalog();
        let foreign = self.foreign_models();
        let models = foreign.iter().filter_map(|model| {
            Some(SglangModel {
                model: model.clone(),
                identity: catalog.identity(model.id, Engine::Sglang)?,
            })
        });
        models.collect()
    }

    fn native_names(&self, sglang: &[SglangModel]) -> String {
        let own = self.models.named().map(|(name, _)| name.clone());
        let sglang = sglang.iter().flat_map(|found| found.model.names.clone());
        own.chain(sglang).collect::<Vec<_>>().join(", ")
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
        let reason = readiness.err().map_or_else(
            || "none has reported yet".to_owned(),
            |reason| reason.to_string(),
        );
        let is_one = self
            .models
            .named()
            .all(|(name, _)| model.is_none_or(|model| model.names.contains(name)));
        ApiError::Unavailable {
            reason: match model {
                Some(model) if !is_one => format!("for model {}, {reason}", model.names[0]),
                _ => reason,
            },
            retry_after_s: NO_WORKER_RETRY_AFTER_S,
        }
    }
}

/// Of a client's own words in an answer.
pub const MAX_QUOTED_CHARS: usize = 200;
