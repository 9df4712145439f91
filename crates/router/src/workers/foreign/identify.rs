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
use tasuki_flow::fleet::{LoadReport, WorkerInfo};

use super::client::{Client, HttpError};
use super::prometheus::{Samples, label};
use super::recomputed::KvSources;
use crate::discovery::{Engine, ForeignAddress};

/// Of a worker that does not tell: room is its own matter then.
const UNKNOWN_BLOCKS: u32 = 1 << 20;
const USUAL_BLOCK_TOKENS: u32 = 16;
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

/// A worker's load by its metrics.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scrape {
    /// `None`: it has no metrics of that.
    pub load: Option<LoadReport>,
    pub total_blocks: Option<u32>,
    pub block_tokens: u32,
    /// When its process began, in seconds.
    pub started: Option<f64>,
    pub sources: Option<KvSources>,
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

/// Of SGLang's `/get_server_info`: the mode and port with which the address must agree.
#[derive(Deserialize)]
struct ServerInfo {
    disaggregation_mode: Option<String>,
    disaggregation_bootstrap_port: Option<u16>,
    dp_size: Option<u32>,
}

/// A worker that is ready.
pub struct Found {
    pub info: WorkerInfo,
    pub scrape: Scrape,
    /// Data-parallel ranks; `None`: it does not tell, as vLLM.
    pub ranks: Option<u32>,
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
        let path = "/v1/models";
        let models: Models = self.json(path, &self.get(path).await?)?;
        let ranks = match self.address.engine {
            Engine::Sglang => self.check_sglang().await?,
            Engine::Vllm => None,
        };
        let scrape = self.scrape().await;
        let info = info(self.address, &models.data, &scrape).ok_or(ProbeError::NoModel)?;
        Ok(Found {
            info,
            scrape,
            ranks,
        })
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
    async fn check_sglang(&self) -> Result<Option<u32>, ProbeError> {
        let path = "/get_server_info";
        let info: ServerInfo = self.json(path, &self.get(path).await?)?;
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
            _ => Ok(info.dp_size),
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

fn info(address: &ForeignAddress, models: &[Model], scrape: &Scrape) -> Option<WorkerInfo> {
    let base = models.iter().find(|model| model.parent.is_none());
    let base = base.or(models.first())?;
    let others = models.iter().filter(|model| model.id != base.id);
    let (adapters, others): (Vec<_>, Vec<_>) = others.partition(|model| model.parent.is_some());
    let ids = |models: Vec<&Model>| models.into_iter().map(|model| model.id.clone()).collect();
    let identity = identity(address.engine, &base.id);
    let endpoint = match address.engine {
        Engine::Vllm => address.authority.clone(),
        Engine::Sglang => format!("{}:{}", address.host(), address.bootstrap_port),
    };
    Some(WorkerInfo {
        peer: Peer {
            engine_id: address.authority.clone(),
            kv_endpoint: endpoint,
        },
        role: address.role,
        role_epoch: 0,
        role_owner: String::new(),
        model: base.id.clone(),
        further_names: ids(others),
        adapters: ids(adapters),
        domain: KvDomain {
            backend: address.engine.as_str(),
            identity,
        },
        capabilities: capabilities(address, scrape.load.is_some()),
        vocab_size: 0,
        max_model_len: base.max_model_len.unwrap_or(UNKNOWN_CONTEXT),
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
    })
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

fn scrape(engine: Engine, samples: &Samples<'_>) -> Scrape {
    let pool = match engine {
        Engine::Vllm => vllm_pool(samples),
        Engine::Sglang => {
            let tokens = samples.sum(&["sglang:max_total_num_tokens"]);
            tokens.map(|tokens| (tokens as u32 / USUAL_BLOCK_TOKENS, USUAL_BLOCK_TOKENS))
        }
    };
    let [running, waiting, usage] = match engine {
        Engine::Vllm => [
            &["vllm:num_requests_running"][..],
            &["vllm:num_requests_waiting"],
            &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
        ],
        Engine::Sglang => [
            &["sglang:num_running_reqs"][..],
            &["sglang:num_queue_reqs"],
            &["sglang:token_usage"],
        ],
    };
    let (blocks, block_tokens) = pool.unwrap_or((UNKNOWN_BLOCKS, USUAL_BLOCK_TOKENS));
    let load = samples.sum(running).map(|running| {
        let waiting = samples.sum(waiting).unwrap_or(0.0) as u32;
        // A share of the pool; of several ranks the mean.
        let name = usage.iter().find(|name| samples.sum(&[name]).is_some());
        let shares: Vec<f64> = name
            .map(|name| samples.values(name).collect())
            .unwrap_or_default();
        let used = shares.iter().sum::<f64>() / shares.len().max(1) as f64;
        let used = (f64::from(blocks) * used.clamp(0.0, 1.0)) as u32;
        LoadReport {
            waiting_requests: waiting,
            running_requests: running as u32,
            running_sequences: running as u32,
            waiting_sequences: waiting,
            free_blocks: blocks - used,
            running_kv_tokens: u64::from(used) * u64::from(block_tokens),
            ..LoadReport::default()
        }
    });
    // Of all ranks.
    let from = |source: &str| {
        let series = samples.series("vllm:prompt_tokens_by_source_total");
        let found = series.filter(|(labels, _)| label(labels, "source") == Some(source));
        found
            .map(|(_, value)| value)
            .reduce(|sum, value| sum + value)
    };
    let sources = from("external_kv_transfer").zip(from("local_compute"));
    Scrape {
        load,
        total_blocks: pool.map(|(blocks, _)| blocks),
        block_tokens,
        started: samples.sum(&["process_start_time_seconds"]),
        sources: sources.map(|(transferred, computed)| KvSources {
            transferred,
            computed,
        }),
    }
}

/// Blocks of all ranks, and the tokens of each.
fn vllm_pool(samples: &Samples<'_>) -> Option<(u32, u32)> {
    let mut pool = None;
    for (labels, _) in samples.series("vllm:cache_config_info") {
        let number = |name| label(labels, name)?.parse::<u32>().ok();
        let (blocks, tokens) = number("num_gpu_blocks").zip(number("block_size"))?;
        let (sum, _) = pool.unwrap_or((0, 0));
        pool = Some((u32::saturating_add(sum, blocks), tokens.max(1)));
    }
    pool
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_and_pool_are_read_from_metrics() {
        let text = "vllm:num_requests_running{engine=\"0\"} 2.0\n\
            vllm:num_requests_waiting{engine=\"0\"} 1.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\n\
            vllm:cache_config_info{block_size=\"128\",num_gpu_blocks=\"200\"} 1.0\n\
            vllm:prompt_tokens_by_source_total{source=\"local_compute\"} 9.0\n\
            vllm:prompt_tokens_by_source_total{source=\"external_kv_transfer\"} 50.0\n";
        let found = scrape(Engine::Vllm, &Samples::new(text));
        let load = found.load.expect("a load");
        assert_eq!((load.running_requests, load.waiting_requests), (2, 1));
        assert_eq!((load.free_blocks, load.running_kv_tokens), (150, 50 * 128));
        assert_eq!((found.total_blocks, found.block_tokens), (Some(200), 128));
        let sources = found.sources.expect("sources");
        assert_eq!((sources.transferred, sources.computed), (50.0, 9.0));
        let of = |engine: u8, tokens: u8| {
            let by_source = "vllm:prompt_tokens_by_source_total";
            format!(
                "{by_source}{{engine=\"{engine}\",source=\"local_compute\"}} {tokens}.0\n\
                 {by_source}{{engine=\"{engine}\",source=\"external_kv_transfer\"}} 2.0\n"
            )
        };
        let ranks = scrape(Engine::Vllm, &Samples::new(&(of(0, 3) + &of(1, 4))));
        let sources = ranks.sources.expect("sources");
        assert_eq!((sources.transferred, sources.computed), (4.0, 7.0));
        let text = "sglang:num_running_reqs{m=\"x\"} 3.0\nsglang:num_queue_reqs{m=\"x\"} 0.0\n\
            sglang:token_usage{m=\"x\"} 0.5\nsglang:max_total_num_tokens{m=\"x\"} 3200.0\n";
        let load = scrape(Engine::Sglang, &Samples::new(text))
            .load
            .expect("a load");
        assert_eq!((load.running_requests, load.free_blocks), (3, 100));
        let none = scrape(Engine::Vllm, &Samples::new("# nothing\n"));
        assert!(none.load.is_none() && none.sources.is_none() && none.total_blocks.is_none());
    }

    #[test]
    fn identities_tell_engines_and_models_apart() {
        let known = identity(Engine::Vllm, "m");
        assert_eq!(known, identity(Engine::Vllm, "m"));
        assert_ne!(known, identity(Engine::Vllm, "n"));
        assert_ne!(known, identity(Engine::Sglang, "m"));
    }
}
