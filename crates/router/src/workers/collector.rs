//! What workers report of themselves, as metrics: read at every scrape.

mod pairs;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use tasuki_core::Health;
use tasuki_flow::fleet::WorkerState;
use tasuki_wire::v1;

use super::Registry;
use super::foreign::Recomputed;

type Labels = [(&'static str, String); 3];

/// Name, help, and where the value is.
type Reading<From, To> = (&'static str, &'static str, fn(&From) -> To);

const GAUGES: [Reading<v1::Load, f64>; 11] = [
    ("waiting", "Requests that are not scheduled yet", |l| {
        f64::from(l.waiting_requests)
    }),
    ("running", "Requests that are scheduled", |l| {
        f64::from(l.running_requests)
    }),
    (
        "waiting_prefill_tokens",
        "Prompt tokens not computed yet",
        |l| l.waiting_prefill_tokens as f64,
    ),
    ("free_blocks", "KV blocks free or evictable", |l| {
        f64::from(l.free_blocks)
    }),
    ("total_blocks", "KV blocks", |l| f64::from(l.total_blocks)),
    (
        "leased_blocks",
        "KV blocks announced and not released",
        |l| f64::from(l.leased_blocks),
    ),
    (
        "quarantined_blocks",
        "KV blocks that an ended request's transfer may still write",
        |l| f64::from(l.quarantined_blocks),
    ),
    (
        "stuck_blocks",
        "KV blocks in quarantine by pulls that made no progress",
        |l| f64::from(l.stuck_blocks),
    ),
    ("prefill_tokens_per_second", "Measured prefill speed", |l| {
        l.prefill_tokens_per_s
    }),
    ("decode_step_seconds", "Measured decode step", |l| {
        l.decode_step_s
    }),
    (
        "planned_ahead_seconds",
        "How long before a decode step's end the next one was planned",
        |l| l.planned_ahead_s,
    ),
];

const COUNTERS: [Reading<v1::Counters, u64>; 16] = [
    ("prompt_tokens_computed", "Prompt tokens computed", |c| {
        c.prompt_tokens_computed
    }),
    ("prompt_tokens_cached", "Prompt tokens found cached", |c| {
        c.prompt_tokens_cached
    }),
    ("output_tokens", "Tokens produced", |c| c.output_tokens),
    ("steps", "Engine steps", |c| c.steps),
    ("preemptions", "Requests preempted", |c| c.preemptions),
    ("kv_pulled_bytes", "KV bytes pulled from peers", |c| {
        c.kv_pulled_bytes
    }),
    ("kv_pulled_blocks", "KV blocks pulled from peers", |c| {
        c.kv_pulled_blocks
    }),
    ("kv_pulls", "Pulls completed", |c| c.kv_pulls),
    ("kv_pull_failures", "Pulls failed", |c| c.kv_pull_failures),
    (
        "kv_pull_timeouts",
        "Handoffs given up because a pull made no progress",
        |c| c.kv_pull_timeouts,
    ),
    ("leases_granted", "Leases on KV given to peers", |c| {
        c.leases_granted
    }),
    ("leases_expired", "Leases that ran out", |c| {
        c.leases_expired
    }),
    (
        "kv_digests",
        "Digests of KV that were compared (--kv-digest)",
        |c| c.kv_digests,
    ),
    (
        "kv_digest_mismatches",
        "Handoffs whose KV was not what was announced",
        |c| c.kv_digest_mismatches,
    ),
    (
        "draft_tokens",
        "Tokens that were drafted and computed (--speculate)",
        |c| c.draft_tokens,
    ),
    (
        "accepted_draft_tokens",
        "Drafted tokens that were right; an answer may end before them",
        |c| c.accepted_draft_tokens,
    ),
];

/// Exports every worker's last report, with the labels `worker` (its number, in the order in
/// which addresses appeared), `role` and `model` (as the worker says). A worker that is away has
/// only its states and its breakers' openings, one whose address is gone has nothing. Exports what
/// waits to be placed and the budget of retries too, which are the registry's.
pub struct WorkerCollector(pub Arc<Registry>);

impl fmt::Debug for WorkerCollector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WorkerCollector").finish()
    }
}

impl Collector for WorkerCollector {
    fn encode(&self, mut encoder: DescriptorEncoder) -> Result<(), fmt::Error> {
        let workers = self.0.read(|worker| {
            let health = worker.state.view.health;
            let load = worker.exported.cloned().map(|load| (load, worker.chunks));
            (labels(worker.state), health, load)
        });
        let engines = self.0.read(|worker| {
            let info = worker.state.info.as_ref()?;
            let number = worker.state.view.id.to_string();
            Some((info.peer.engine_id.clone(), number))
        });
        let engines: HashMap<_, _> = engines.into_iter().flatten().collect();
        let up = |health: &Health| !matches!(health, Health::Suspect | Health::Down);
        let states: [Reading<Health, bool>; 3] = [
            ("up", "Whether the worker is connected and reports", up),
            (
                "draining",
                "Whether the worker finishes what it has and gets no new work",
                |health| *health == Health::Draining,
            ),
            (
                "failing",
                "Whether the worker failed several requests in a row and gets no new work for a pause",
                |health| *health == Health::Failing,
            ),
        ];
        for (name, help, read) in states {
            let name = format!("worker_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            for (labels, health, _) in &workers {
                let value = i64::from(read(health));
                ConstGauge::new(value).encode(family.encode_family(labels)?)?;
            }
        }
        let (requests, sequences, tokens) = self.0.waiting();
        for (what, waiting) in [
            ("requests", requests as u64),
            ("sequences", sequences),
            ("prompt_tokens", tokens),
        ] {
            let name = format!("admission_waiting_{what}");
            let help = format!("Waiting to be placed: {}", what.replace('_', " "));
            let encoder = encoder.encode_descriptor(&name, &help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::try_from(waiting).unwrap_or(i64::MAX)).encode(encoder)?;
        }
        self.encode_budget(&mut encoder)?;
        self.0.encode_roles(&mut encoder)?;
        self.encode_breakers(&mut encoder)?;
        self.encode_recomputed(&mut encoder)?;
        let loads = workers.into_iter();
        let loads = loads.filter_map(|(labels, _, load)| Some((labels, load?)));
        let loads: Vec<_> = loads.collect();
        let (name, kind) = ("worker_prefix_chunks", MetricType::Gauge);
        let help = "Chunks of prompts that the worker is taken to have in its prefix cache";
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for (labels, (_, chunks)) in &loads {
            let chunks = i64::try_from(*chunks).unwrap_or(i64::MAX);
            ConstGauge::new(chunks).encode(family.encode_family(labels)?)?;
        }
        for (name, help, read) in GAUGES {
            let name = format!("worker_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
            for (labels, (load, _)) in &loads {
                ConstGauge::new(read(load)).encode(family.encode_family(labels)?)?;
            }
        }
        for (name, help, read) in COUNTERS {
            let name = format!("worker_{name}");
            let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Counter)?;
            for (labels, (load, _)) in &loads {
                let counters = load.counters.unwrap_or_default();
                ConstCounter::new(read(&counters)).encode(family.encode_family(labels)?)?;
            }
        }
        let loads = loads.iter().map(|(labels, (load, _))| (labels, load));
        pairs::encode(&mut encoder, loads, &engines)
    }
}

impl WorkerCollector {
    fn encode_budget(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let (left, refused) = self.0.retry_budget();
        let help = "Retries after failures and refusals that may be made at once";
        let gauge = encoder.encode_descriptor("retry_budget", help, None, MetricType::Gauge)?;
        ConstGauge::new(left).encode(gauge)?;
        let help = "Retries that had to wait because the budget of retries was used up";
        let counter = encoder.encode_descriptor("retry_waits", help, None, MetricType::Counter)?;
        ConstCounter::new(refused).encode(counter)
    }
}

impl WorkerCollector {
    fn encode_recomputed(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let help = "Prompts of vLLM workers that were computed again because the handoff failed";
        let (name, kind) = ("recomputed_prompts", MetricType::Counter);
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        for how in Recomputed::ALL {
            let labels = [("reason", how.as_str())];
            let count = ConstCounter::new(self.0.recomputed.read(how));
            count.encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }

    fn encode_breakers(&self, encoder: &mut DescriptorEncoder) -> Result<(), fmt::Error> {
        let help = "How often the worker was left alone for failing, by kind of failure";
        let (name, kind) = ("worker_breaker_openings", MetricType::Counter);
        let mut family = encoder.encode_descriptor(name, help, None, kind)?;
        let openings = self.0.read(|worker| {
            let breakers = worker.state.breakers().read();
            let openings = breakers.map(|(kind, _, openings)| (kind, openings));
            (labels(worker.state), openings.collect::<Vec<_>>())
        });
        for ([worker, role, model], openings) in openings {
            for (kind, openings) in openings {
                let kind = ("kind", kind.to_string());
                let labels = [worker.clone(), role.clone(), model.clone(), kind];
                ConstCounter::new(openings).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

fn labels(worker: &WorkerState) -> Labels {
    [
        ("worker", worker.view.id.to_string()),
        (
            "role",
            worker
                .info
                .as_ref()
                .map_or_else(String::new, |_| worker.view.role.to_string()),
        ),
        (
            "model",
            worker
                .info
                .as_ref()
                .map_or_else(String::new, |info| info.model.clone()),
        ),
    ]
}
