//! Who a worker of another engine is, and what it has to do, by what it answers.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::StatusCode;
use serde::Deserialize;
use tasuki_core::{
    Capabilities, ChunkScheme, FirstToken, HandoffKind, HardwareClass, Identity, KvDomain,
};
use tasuki_core::{Payload, Positions, Role, RoleUse};
use tasuki_flow::Peer;
use tasuki_flow::fleet::WorkerInfo;

use super::client::{Client, HttpError};
use super::prometheus::Samples;
use super::ranks::{self, Ranks};
use super::scrape::{Scrape, UNKNOWN_BLOCKS, USUAL_BLOCK_TOKENS, scrape};
use super::sglang::SERVER_INFO;
use crate::discovery::{Engine, ForeignAddress};

/// What a worker's context is taken for until it tells.
pub const UNKNOWN_CONTEXT: u32 = u32::MAX;

/// Why a worker is not taken.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("{path}: {source}")]
    Http {
        path: &'static str,
        source: HttpError,
    },
    #[error("{path} answers {status}")]
    Status {
        path: &'static str,
        status: StatusCode,
    },
    #[error("{path} is not what {engine} answers: {source}; is it an {engine} worker?")]
    NotJson {
        path: &'static str,
        engine: Engine,
        source: serde_json::Error,
    },
    #[error("/v1/models names no model")]
    NoModel,
    #[error(
        "its address says role {ours}, and the worker was started with --disaggregation-mode \
         {theirs}: make them the same"
    )]
    OtherRole { ours: &'static str, theirs: String },
    #[error(
        "its address says bootstrap_port={ours}, and the worker was started with \
         --disaggregation-bootstrap-port {theirs}: make them the same"
    )]
    OtherPort { ours: u16, theirs: u16 },
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u32>,
    /// Of an adapter.
    parent: Option<String>,
}

/// What a worker says that it serves.
pub struct Names {
    pub model: String,
    pub further: Vec<String>,
    pub adapters: Vec<String>,
    max_model_len: Option<u32>,
}

/// Of SGLang's [`SERVER_INFO`]: the mode and port with which the address must agree.
#[derive(Deserialize)]
struct ServerInfo {
    disaggregation_mode: Option<String>,
    disaggregation_bootstrap_port: Option<u16>,
    dp_size: Option<u32>,
    enable_dp_attention: Option<bool>,
}

/// A worker that is ready.
pub struct Found {
    pub info: WorkerInfo,
    pub scrape: Scrape,
    /// Data-parallel ranks; `None`: it does not tell, as vLLM.
    pub ranks: Option<Ranks>,
}

/// Asks a worker of one engine.
pub struct Probe<'a> {
    pub client: &'a Client,
    pub address: &'a ForeignAddress,
    pub limit: Duration,
}

impl Probe<'_> {
    /// Who the worker is, as soon as it is ready.
    pub async fn find(&self) -> Result<Found, ProbeError> {
        self.get("/health").await?;
        let names = self.names().await?;
        let ranks = match self.address.engine {
            Engine::Sglang => self.check_sglang().await?,
            Engine::Vllm => None,
        };
        let scrape = self.scrape().await;
        Ok(Found {
            info: info(self.address, names, &scrape, ranks),
            scrape,
            ranks,
        })
    }

    /// What it serves now: adapters come and go.
    pub async fn names(&self) -> Result<Names, ProbeError> {
        let path = "/v1/models";
        let models: Models = self.json(path, &self.get(path).await?)?;
        names(models.data).ok_or(ProbeError::NoModel)
    }

    /// Whether it is well.
    pub async fn health(&self) -> Result<(), ProbeError> {
        self.get("/health").await.map(drop)
    }

    /// What its metrics say; nothing if it has none.
    pub async fn scrape(&self) -> Scrape {
        let page = self.get("/metrics").await.unwrap_or_default();
        let text = String::from_utf8_lossy(&page);
        scrape(self.address.engine, &Samples::new(&text))
    }

    /// Its data-parallel ranks.
    async fn check_sglang(&self) -> Result<Option<Ranks>, ProbeError> {
        let [path, older] = SERVER_INFO;
        let page = match self.get(path).await {
            Err(ProbeError::Status { status, .. }) if status == StatusCode::NOT_FOUND => {
                self.get(older).await?
            }
            page => page?,
        };
        let info: ServerInfo = self.json(path, &page)?;
        let ours = match self.address.role {
            Role::Mixed => "null",
            role => role.as_str(),
        };
        if let Some(theirs) = info.disaggregation_mode.filter(|theirs| theirs != ours) {
            return Err(ProbeError::OtherRole { ours, theirs });
        }
        let ours = self.address.bootstrap_port;
        match info.disaggregation_bootstrap_port {
            Some(theirs) if self.address.role == Role::Prefill && theirs != ours => {
                Err(ProbeError::OtherPort { ours, theirs })
            }
            _ => Ok(info.dp_size.map(|count| Ranks {
                count,
                are_replicas: info.enable_dp_attention == Some(false),
            })),
        }
    }

    fn json<T: for<'de> Deserialize<'de>>(
        &self,
        path: &'static str,
        bytes: &[u8],
    ) -> Result<T, ProbeError> {
        serde_json::from_slice(bytes).map_err(|source| ProbeError::NotJson {
            path,
            engine: self.address.engine,
            source,
        })
    }

    async fn get(&self, path: &'static str) -> Result<Bytes, ProbeError> {
        let answer = self.client.get(&self.address.authority, path, self.limit);
        let (status, body) = answer
            .await
            .map_err(|source| ProbeError::Http { path, source })?;
        match status {
            StatusCode::OK => Ok(body),
            status => Err(ProbeError::Status { path, status }),
        }
    }
}

impl ProbeError {
    /// Whether nothing listens there: the process is gone.
    pub fn is_gone(&self) -> bool {
        matches!(
            self,
            Self::Http {
                source: HttpError::Connect(_) | HttpError::Broken(_),
                ..
            }
        )
    }

    /// Whether an operator has to change something.
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Http { .. } | Self::Status { .. })
    }
}

/// Workers of one engine and model give one answer, and can exchange KV.
fn identity(engine: Engine, model: &str) -> Identity {
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (engine, model, salt).hash(&mut hasher);
        hasher.finish()
    };
    let both = u128::from(half(0)) << 64 | u128::from(half(1));
    Identity(both.to_be_bytes())
}

fn names(mut models: Vec<Model>) -> Option<Names> {
    let base = models.iter().position(|model| model.parent.is_none());
    let base = match models.is_empty() {
        true => return None,
        false => models.remove(base.unwrap_or(0)),
    };
    models.retain(|model| model.id != base.id);
    let (adapters, further): (Vec<_>, Vec<_>) =
        models.into_iter().partition(|model| model.parent.is_some());
    let ids = |models: Vec<Model>| {
        let mut ids: Vec<String> = models.into_iter().map(|model| model.id).collect();
        ids.sort(); // in any order they are the same
        ids
    };
    Some(Names {
        model: base.id,
        further: ids(further),
        adapters: ids(adapters),
        max_model_len: base.max_model_len,
    })
}

fn info(
    address: &ForeignAddress,
    names: Names,
    scrape: &Scrape,
    ranks: Option<Ranks>,
) -> WorkerInfo {
    let identity = identity(address.engine, &names.model);
    let endpoint = match address.engine {
        Engine::Vllm => address.authority.clone(),
        Engine::Sglang => {
            let to_name = ranks.and_then(Ranks::to_name);
            ranks::endpoint(address.host(), address.bootstrap_port, to_name)
        }
    };
    WorkerInfo {
        peer: Peer {
            engine_id: address.authority.clone(),
            kv_endpoint: endpoint,
        },
        role: address.role,
        role_epoch: 0,
        role_owner: String::new(),
        model: names.model,
        further_names: names.further,
        adapters: names.adapters,
        domain: KvDomain {
            backend: address.engine.as_str(),
            identity,
        },
        capabilities: capabilities(address, scrape.load.is_some()),
        vocab_size: 0,
        max_model_len: names.max_model_len.unwrap_or(UNKNOWN_CONTEXT),
        // What is beyond its limit waits there.
        max_sequences: None,
        block_size: scrape.block_tokens,
        num_blocks: scrape.total_blocks.unwrap_or(UNKNOWN_BLOCKS),
        // Of stand-ins for tokens, whatever its own blocks are.
        chunks: ChunkScheme::of_blocks(identity, USUAL_BLOCK_TOKENS),
        hardware: HardwareClass {
            device: address.engine.to_string(),
            identity,
            tensor_parallel: 0,
        },
    }
}

/// A worker without a role serves alone: whether it could hand over is not known.
fn capabilities(address: &ForeignAddress, reports_load: bool) -> Capabilities {
    let (handoff, splits_choices) = match (address.role, address.engine) {
        (Role::Mixed, _) => (HandoffKind::None, false),
        (_, Engine::Vllm) => (HandoffKind::Ticket, false),
        (_, Engine::Sglang) => (HandoffKind::Concurrent, true),
    };
    Capabilities {
        handoff,
        first_token: FirstToken::Decode,
        positions: Positions::Counted,
        resumes: false,
        retargets: false,
        splits_choices,
        // SGLang's workers are started for one half and cannot do the other. Those of vLLM can,
        // but what they were configured for is known, and what they cost is not.
        role_use: match address.engine {
            Engine::Vllm => RoleUse::First,
            Engine::Sglang => RoleUse::Only,
        },
        payload: Payload::Opaque,
        reports_load,
        reports_cache: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_tell_engines_and_models_apart() {
        let known = identity(Engine::Vllm, "m");
        assert_eq!(known, identity(Engine::Vllm, "m"));
        assert_ne!(known, identity(Engine::Vllm, "n"));
        assert_ne!(known, identity(Engine::Sglang, "m"));
    }
}
