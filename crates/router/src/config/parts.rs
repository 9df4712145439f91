//! The command line as the parts of the router need it.

use std::time::Duration;

use clap::ValueEnum;
use tasuki_flow::AdmissionConfig;

use super::RouterArgs;
use crate::app::HttpSettings;
use crate::connections::ConnectionLimits;
use crate::discovery::Sources;
use crate::models::ModelSpec;
use crate::serve;
use crate::tls::fleet::WorkerTransport;

impl RouterArgs {
    /// What the HTTP side needs to know.
    pub fn http(&self) -> HttpSettings {
        HttpSettings {
            max_body_bytes: self.max_body_bytes,
            body_timeout: Duration::from_secs_f64(self.body_timeout_s),
            max_concurrent_requests: self.max_concurrent_requests,
            request_timeout: Duration::from_secs_f64(self.request_timeout_s),
            max_answer_bytes: self.max_answer_bytes as usize,
            heartbeat: Duration::from_secs_f64(self.heartbeat_s),
            allow_chat_template: self.allow_request_chat_template,
            allow_priority: self.allow_request_priority,
            tenant_header: self.tenant_header.clone(),
            foreign_aliases: Vec::new(),
            tool_parser: self.tool_parser,
            reasoning_parser: self.reasoning_parser,
        }
    }

    /// What the connections need to know.
    pub fn connections(&self) -> ConnectionLimits {
        ConnectionLimits {
            max_connections: self.max_connections as usize,
            idle: Duration::from_secs_f64(self.idle_timeout_s),
            client_stall: Duration::from_secs_f64(self.client_stall_s),
        }
    }

    /// What the serving layer needs to know, with workers on plain connections.
    pub fn serving(&self, models: &[ModelSpec]) -> serve::Config {
        serve::Config {
            models: models.iter().map(ModelSpec::worker_names).collect(),
            workers: Sources {
                list: self.worker.clone(),
                discover: self.discover.clone(),
                dns_interval: Duration::from_secs_f64(self.dns_interval_s),
            },
            transport: WorkerTransport::Plain,
            worker_drain: Duration::from_secs_f64(self.worker_drain_s),
            on_kv_loss: self.on_kv_loss.into(),
            policy: self.policy.into(),
            strict_roles: self.strict_roles,
            roles: self.roles.into(),
            role_preference: self.role_preference,
            recover: Duration::from_secs_f64(self.recover_s),
            stalled: (self.stall_timeout_s > 0.0)
                .then(|| Duration::from_secs_f64(self.stall_timeout_s)),
            admission: self.admission(),
        }
    }

    fn admission(&self) -> AdmissionConfig {
        let objective = |ms: Option<f64>| ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
        AdmissionConfig {
            off: self.no_admission,
            ttft: objective(self.ttft_target_ms),
            tpot: objective(self.tpot_target_ms),
            max_sequences: self
                .max_queued_sequences
                .unwrap_or(self.max_concurrent_requests)
                .into(),
            max_tokens: u64::from(self.max_queued_tokens),
            max_wait: Duration::from_secs_f64(self.max_queued_s),
            recover: Duration::from_secs_f64(self.recover_s),
            ..AdmissionConfig::default()
        }
    }

    /// What the request log says of how this router decides.
    pub fn logged(&self) -> tasuki_reqlog::Router {
        let policy = self.policy.to_possible_value();
        tasuki_reqlog::Router {
            policy: policy.map_or_else(String::new, |value| value.get_name().to_owned()),
            strict_roles: self.strict_roles,
            role_preference: self.role_preference,
            admission: !self.no_admission,
            ttft_target_ms: self.ttft_target_ms,
            tpot_target_ms: self.tpot_target_ms,
        }
    }

    pub fn readiness_grace(&self) -> Duration {
        Duration::from_secs_f64(self.readiness_grace_s)
    }

    pub fn drain(&self) -> Duration {
        Duration::from_secs_f64(self.drain_s)
    }
}
