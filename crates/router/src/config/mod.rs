//! The command line of `tasuki router`; every setting is defined here, once.

mod parts;
#[cfg(test)]
mod tests;
mod values;
mod words;

use std::path::PathBuf;

use axum::http::HeaderName;
use clap::{ArgGroup, CommandFactory, Parser};

pub use self::words::{AccessLog, KvLoss, Policy, Roles};

use self::values::{Listen, NamedFolder, listen};
use self::values::{alias, milliseconds, model, positive_seconds, seconds, share};
use crate::discovery::{Source, address};
use crate::models::{Names, NamesError, name_models};
use crate::openai::{ReasoningParser, ToolParser};
use crate::request_log::RequestLogArgs;
use crate::tls::TlsArgs;
use crate::tls::fleet::FleetArgs;
use crate::traces::TraceArgs;

/// OpenAI-compatible HTTP in front of Tasuki workers.
#[derive(Debug, Clone, Parser)]
#[command(name = "tasuki router", version, about)]
#[command(group = ArgGroup::new("workers").required(true).multiple(true))]
pub struct RouterArgs {
    /// Address to bind.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to bind; 0 lets the system choose.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,

    /// Folder of a model (tokenizer, chat template, config), and its name; several are allowed. A
    /// hub id or smollm2-135m is fetched.
    /// A worker serves the model of the name that it was given (--served-name); where there is
    /// one model, every worker does. Default of the name: the folder's. vLLM and SGLang workers
    /// need none: they bring their models.
    #[arg(long, value_name = "[NAME=]PATH", value_parser = model)]
    pub model: Vec<NamedFolder>,

    /// Further name of a model; several are allowed.
    #[arg(long, value_name = "ALIAS=NAME", value_parser = alias)]
    pub alias: Vec<(String, String)>,

    /// Name under which requests know a single model; several are allowed. Default: its name.
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub served_model_name: Vec<String>,

    /// A worker's gRPC address, HOST:PORT; give one option per worker. Workers of other engines
    /// are URLs: vllm://HOST:PORT, sglang://HOST:PORT, with ?role=prefill or ?role=decode if
    /// split, and &bootstrap_port=N for SGLang (8998).
    #[arg(long, value_name = "ADDRESS", num_args = 1.., group = "workers", value_parser = address)]
    pub worker: Vec<String>,

    /// Where workers' addresses are found while the router runs; several are allowed. file:PATH
    /// has one on each line, # begins a comment, and is read again every second. dns:HOST:PORT
    /// has those of a name's A and AAAA records. kubernetes:[NAMESPACE/]SERVICE[:PORTNAME] has
    /// the endpoints of a Service. Workers whose address is new join, those whose address is
    /// gone drain and leave.
    #[arg(long, value_name = "SOURCE", num_args = 1.., group = "workers")]
    pub discover: Vec<Source>,

    /// How often the names of --discover dns: are resolved.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = positive_seconds)]
    pub dns_interval_s: f64,

    /// How long the requests of a worker go on whose address is gone. What still runs then is
    /// placed on other workers.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = seconds)]
    pub worker_drain_s: f64,

    /// Address of a listener that serves /metrics alone, over plain http. The main port has /metrics
    /// too where --host is a loopback address, and only there. Port 0 lets the system choose.
    #[arg(long, value_name = "HOST:PORT", value_parser = listen)]
    pub metrics_listen: Option<Listen>,

    /// Port of the admin API, on 127.0.0.1 only: lists workers, drains them, sets their role.
    /// /dashboard is a page that shows them. Not served if not given; 0 lets the system choose.
    #[arg(long, value_name = "PORT")]
    pub admin_port: Option<u16>,

    /// What to do when the KV is lost on its way to the decode worker.
    #[arg(long, value_enum, default_value_t = KvLoss::Recompute)]
    pub on_kv_loss: KvLoss,

    /// How workers are chosen for a request. Every policy follows capabilities, limits and roles.
    #[arg(long, value_enum, default_value_t = Policy::Cost)]
    pub policy: Policy,

    /// Never place a leg on a worker of another role.
    #[arg(long)]
    pub strict_roles: bool,

    /// Whether workers' roles follow the load. It matters most with --strict-roles, for without
    /// it the cost of each request decides, whatever the roles. Of several routers one moves
    /// roles, and another one if that ends.
    #[arg(long, value_enum, default_value_t = Roles::Fixed)]
    pub roles: Roles,

    /// How much a role counts: what a request costs more on a worker of another role, as a
    /// share of its time on that worker if it is idle. 0: roles do not matter.
    #[arg(long, value_name = "SHARE", default_value_t = 0.05, value_parser = share)]
    pub role_preference: f64,

    /// How long a request that was accepted or waits for room goes without any worker.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    pub recover_s: f64,

    /// A stream without a token for so long, although its worker reports, goes on at another
    /// worker. 0: it waits for ever.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub stall_timeout_s: f64,

    /// Connections that may be open at once. Further ones are answered with 503, or if they
    /// send a GET, and closed.
    #[arg(long, value_name = "N", default_value_t = 4096,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_connections: u32,

    /// A connection on which no request's headers are complete for so long is closed, whether
    /// it is idle or sends them slowly. Set it above the idle limit of a proxy in front.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = positive_seconds)]
    pub idle_timeout_s: f64,

    /// Largest request body; 413 beyond.
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20)]
    pub max_body_bytes: usize,

    /// A request whose body is not complete so long after its headers gets 408.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = positive_seconds)]
    pub body_timeout_s: f64,

    /// From the end of a request's body to the end of its answer: 504 beyond, or an error
    /// event where a stream has begun. No limit of inactivity: long answers take long.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0, value_parser = positive_seconds)]
    pub request_timeout_s: f64,

    /// Sequences (a request's prompts times its `n`) that may be generated at once; 503 beyond.
    /// A request counts once its body is complete.
    #[arg(long, value_name = "N", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_concurrent_requests: u32,

    /// Largest answer that is not streamed, estimated from choices, tokens and logprobs; 400
    /// beyond. It limits echoed prompts with their logprobs in streams too, and streams of /generate, whose
    /// events each have all so far.
    #[arg(long, value_name = "BYTES", default_value_t = 16 << 20,
          value_parser = clap::value_parser!(u32).range(1 << 16..=128 << 20))]
    pub max_answer_bytes: u32,

    /// A stream that has nothing to send for so long sends a comment, and before it its
    /// headers: proxies cut connections that are silent.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = positive_seconds)]
    pub heartbeat_s: f64,

    /// A client that reads nothing of its answer for so long loses its connection, and a
    /// streamed answer is given up.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = positive_seconds)]
    pub client_stall_s: f64,

    /// A request whose first token is expected later is refused, with 503 or 429. Not given: no
    /// objective. A prompt that takes long by itself may take twice as long as that.
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub ttft_target_ms: Option<f64>,

    /// Mean time per token after the first that requests should keep to: one that would make
    /// it longer waits. Prompts rather go to workers whose decode steps are far below it. Not given: no objective.
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub tpot_target_ms: Option<f64>,

    /// Sequences that may wait to be placed [default: --max-concurrent-requests]. Beyond, the
    /// last in order is refused: requests are placed by priority, and within it in equal shares
    /// of the tenants.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub max_queued_sequences: Option<u32>,

    /// Prompt tokens that may wait to be placed.
    #[arg(long, value_name = "N", default_value_t = 4_000_000,
          value_parser = clap::value_parser!(u32).range(1..))]
    pub max_queued_tokens: u32,

    /// How long a request may wait to be placed.
    #[arg(long, value_name = "SECONDS", default_value_t = 1800.0, value_parser = positive_seconds)]
    pub max_queued_s: f64,

    /// Place requests at once, however much the workers have to do: they wait there, in the
    /// order in which they came.
    #[arg(long, conflicts_with_all = ["ttft_target_ms", "tpot_target_ms"])]
    pub no_admission: bool,

    #[command(flatten)]
    pub tls: TlsArgs,

    #[command(flatten)]
    pub fleet: FleetArgs,

    /// File of API keys that clients must have one of: lines of NAME SHA256 [max-requests=N], as
    /// `tasuki api-key NAME` prints them. It is read again when it changes. A key's name is its
    /// tenant.
    #[arg(long, value_name = "PATH")]
    pub api_keys_file: Option<PathBuf>,

    /// Environment variable that has an API key, in plain text; its tenant is `environment`.
    #[arg(long, value_name = "NAME")]
    pub api_key_env: Option<String>,

    /// Header that names a request's tenant, set by a gateway in front. Not given: the field
    /// `user` names it.
    #[arg(long, value_name = "NAME")]
    pub tenant_header: Option<HeaderName>,

    /// Accept the field `priority` in requests: of those that wait, less goes first.
    #[arg(long)]
    pub allow_request_priority: bool,

    /// Accept the field `chat_template` in requests. Such a template can use up the router's
    /// memory: only where all clients are trusted.
    #[arg(long)]
    pub allow_request_chat_template: bool,

    /// How the models write tool calls.
    #[arg(long, value_enum, default_value_t = ToolParser::Auto)]
    pub tool_parser: ToolParser,

    /// How the models mark reasoning, the thoughts before an answer.
    #[arg(long, value_enum, default_value_t = ReasoningParser::Auto)]
    pub reasoning_parser: ReasoningParser,

    /// SIGTERM turns readiness (/ready, /health) off; so much later no new requests are taken.
    /// Load balancers notice meanwhile. SIGINT does not wait.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = seconds)]
    pub readiness_grace_s: f64,

    /// How long running requests may go on once no new ones are taken.
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    pub drain_s: f64,

    /// Log filter: error, warn, info, debug, trace, or directives such as info,h2=warn.
    #[arg(
        long,
        value_name = "FILTER",
        default_value = values::LOG,
        env = "TASUKI_LOG",
        value_parser = values::log
    )]
    pub log: String,

    /// One line per request at its end, on stderr: tokens, phases, workers, and the costs that
    /// their choice compared. Its target in --log is `access`; its level is info.
    #[arg(long, value_enum, default_value_t = AccessLog::Text)]
    pub access_log: AccessLog,

    #[command(flatten)]
    pub request_log: RequestLogArgs,

    #[command(flatten)]
    pub traces: TraceArgs,
}

impl RouterArgs {
    /// The models by name.
    ///
    /// # Errors
    ///
    /// Names that do not fit together.
    pub fn models(&self) -> Result<Names, NamesError> {
        let given = self
            .model
            .iter()
            .map(|NamedFolder(name, path)| (name.clone(), path.clone()));
        name_models(
            &given.collect::<Vec<_>>(),
            &self.served_model_name,
            &self.alias,
            self.may_have_foreign(),
        )
    }

    /// Reads the command line.
    ///
    /// # Errors
    ///
    /// What is wrong with it, for a person.
    pub fn parse_from_words<W: Into<std::ffi::OsString> + Clone>(
        words: impl IntoIterator<Item = W>,
    ) -> Result<Self, clap::Error> {
        let args = Self::try_parse_from(words)?;
        if args.model.is_empty() && !args.may_have_foreign() {
            return Err(Self::command().error(
                clap::error::ErrorKind::MissingRequiredArgument,
                "--model is missing: only vLLM and SGLang workers (vllm://HOST:PORT, \
                 sglang://HOST:PORT) bring their models",
            ));
        }
        Ok(args)
    }

    /// Whether some worker is, or may come to be, of another engine.
    fn may_have_foreign(&self) -> bool {
        self.worker.iter().any(|name| name.contains("://"))
            || self.discover.iter().any(|source| match source {
                Source::File(_) => true,
                Source::Dns(name) => name.contains("://"),
                Source::Kubernetes(_) => false,
            })
    }
}
