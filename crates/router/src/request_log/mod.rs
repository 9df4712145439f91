//! The request log: options, what it asks of the registry, and what each request leaves there.
//!
//! `tasuki_reqlog` owns the format, the queue, and the thread that writes.

mod recording;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tasuki_core::Health;
use tasuki_reqlog::{Class, Dropped, Fleet, Hooks, Keep, OpenError, RequestLog, Router, Worker};

pub use self::recording::Recording;
use crate::metrics::Counters;
use crate::workers::Registry;

/// At the end: for what waits to be written.
pub const CLOSING: Duration = Duration::from_secs(2);

/// Options of the command line.
#[derive(Debug, Clone, Default, Args)]
pub struct RequestLogArgs {
    /// File that gets a line for each request: times, lengths, what prompts share, placement,
    /// outcome; no text. `tasuki simulate` replays it. Not given: none is kept.
    #[arg(long, value_name = "PATH")]
    pub request_log: Option<PathBuf>,

    /// Largest file of --request-log: beyond it becomes PATH.1, that one PATH.2, and so on.
    #[arg(long, value_name = "MB", default_value_t = 64,
          value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub request_log_mb: u32,

    /// Files of --request-log that are kept, the one that is written among them.
    #[arg(long, value_name = "N", default_value_t = 8,
          value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub request_log_files: u32,
}

impl RequestLogArgs {
    /// Starts the log, if there is to be one. `router`: how it decides. `dropped`: by reason.
    ///
    /// # Errors
    ///
    /// The file cannot be opened, or another router writes it.
    pub fn start(
        &self,
        router: Router,
        registry: &Arc<Registry>,
        dropped: &Counters,
    ) -> Result<Option<RequestLog>, OpenError> {
        let Some(path) = &self.request_log else {
            return Ok(None);
        };
        let keep = Keep {
            path: path.clone(),
            bytes: u64::from(self.request_log_mb) << 20,
            files: self.request_log_files,
        };
        let (registry, dropped) = (Arc::clone(registry), dropped.clone());
        let hooks = Hooks {
            fleet: Box::new(move || fleet(&registry)),
            dropped: Box::new(move |why, count| {
                let reason = match why {
                    Dropped::QueueFull => "queue_full",
                    Dropped::WriteFailed => "write_failed",
                };
                dropped.get_or_create(&[("reason", reason)]).inc_by(count);
            }),
        };
        RequestLog::start(keep, router, hooks).map(Some)
    }
}

/// The workers that have connected, now.
fn fleet(registry: &Registry) -> Fleet {
    let hardware = registry.hardware();
    let classes = hardware
        .classes()
        .map(|(class, rates)| Class::new(&class.device, class.tensor_parallel, rates));
    let workers = registry.read(|known| {
        let view = &known.state.view;
        let info = known.state.info.as_ref()?;
        Some(Worker {
            id: view.id.0,
            role: view.role.as_str().to_owned(),
            ready: view.health == Health::Ready,
            machine: view.machine,
            class: view.hardware as u32,
            num_blocks: info.num_blocks,
            block_size_tokens: info.block_size,
            max_model_len_tokens: info.max_model_len,
            reports_cache: info.capabilities.reports_cache,
            model: known.state.model?.0,
        })
    });
    Fleet {
        t: 0.0,
        workers: workers.into_iter().flatten().collect(),
        classes: classes.collect(),
    }
}
