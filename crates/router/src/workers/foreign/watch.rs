//! Keeps watch over one worker of another engine: finds it, lets it join, looks at its health
//! and load, starts its legs, notices its loss, and begins again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tasuki_core::{Role, WorkerId};
use tasuki_flow::fleet::{JoinError, LoadReport, Silence, WorkerInfo};
use tasuki_flow::{LegEnd, LegSpec, Output, Peer, WorkerKey};
use tasuki_wire::v1;
use tokio::sync::{Notify, oneshot};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::client::Client;
use super::exchange::Connections;
use super::identify::{Found, Probe, ProbeError};
use super::leg::{self, Site};
use super::recomputed::{KvLoads, KvSources, Recomputed};
use super::scrape::Scrape;
use crate::discovery::ForeignAddress;
use crate::workers::connect::Liveness;
use crate::workers::connection::Joined;
use crate::workers::legs::Report;
use crate::workers::link::{NewLeg, WorkerLink};
use crate::workers::local_leg::{LocalLeg, Reports};
use crate::workers::registry::Registry;

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often health and metrics are read.
const LOOK: Duration = Duration::from_millis(500);
/// So often is what it serves read: there may be thousands of adapters.
const LOOKS_FOR_NAMES: u32 = 10;

/// Why a worker does not join, or is given up.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error(transparent)]
    Probe(#[from] ProbeError),
    #[error(transparent)]
    Join(#[from] JoinError),
    #[error("it was started again")]
    Restarted,
    #[error("not well for {0:?}")]
    Silent(Duration),
    #[error("the registry has let go of it")]
    Removed,
}

/// Starts legs in the tasks of their requests.
struct ForeignLink {
    site: Arc<Site>,
    /// Closed when the registry lets go of the worker.
    _held: oneshot::Sender<Infallible>,
}

impl WorkerLink for ForeignLink {
    fn dispatch(&self, leg: NewLeg<'_>, spec: LegSpec) -> Option<LocalLeg> {
        let registry = Arc::clone(&self.site.registry);
        let reports = Reports::new(registry, leg.id, leg.slot, leg.name);
        let work = leg::run(Arc::clone(&self.site), spec, reports.clone());
        Some(LocalLeg::new(reports, Box::pin(work)))
    }

    /// A leg is aborted, or is gone, with its request's task.
    fn abort(&self, _name: &str, _choices: Vec<u32>) {}

    fn retarget(&self, name: &str, _peer: Peer) {
        debug_assert!(false, "leg {name}: these workers do not retarget");
    }

    /// Its role is in its address.
    fn set_role(&self, _role: Role, _owner: &str, _epoch: u64) {}

    /// Its cache is estimated from what was placed there.
    fn resync_cache(&self) {}

    /// SGLang's are asked by their own path (`foreign/native.rs`).
    fn flush_cache(&self) -> bool {
        false
    }
}

/// Runs until it is dropped, and the worker's legs with it.
pub async fn keep_watched(
    worker: WorkerId,
    address: ForeignAddress,
    registry: Arc<Registry>,
    liveness: Liveness,
) -> Infallible {
    let client = Client::new(liveness.connect);
    let authority = address.authority.clone();
    let mut watch = Watch {
        worker,
        address,
        registry,
        liveness,
        client,
        key: None,
    };
    let mut pause = FIRST_PAUSE;
    let mut logged = String::new();
    loop {
        let began = Instant::now();
        let Err(error) = watch.find_and_watch().await;
        watch.registry.on_unreachable(worker);
        if watch.leave() {
            // One that joins and is lost at once, again and again, is no faster for it.
            if began.elapsed() >= LONGEST_PAUSE {
                pause = FIRST_PAUSE;
            }
            logged.clear();
            tracing::warn!(%worker, address = authority, %error, "worker lost");
        } else if logged != error.to_string() {
            let refused = match &error {
                WatchError::Probe(error) => error.is_refusal(),
                error => matches!(error, WatchError::Join(_)),
            };
            if refused {
                tracing::warn!(%worker, address = authority, %error, "worker refused");
            } else {
                tracing::info!(%worker, address = authority, %error, "worker not reached yet");
            }
            logged = error.to_string();
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

struct Watch {
    worker: WorkerId,
    address: ForeignAddress,
    registry: Arc<Registry>,
    liveness: Liveness,
    client: Client,
    key: Option<WorkerKey>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Watch {
    /// Whether there was a connection to leave.
    fn leave(&mut self) -> bool {
        let key = self.key.take();
        if let Some(key) = key {
            self.registry.leave(key);
        }
        key.is_some()
    }

    fn probe(&self) -> Probe<'_> {
        Probe {
            client: &self.client,
            address: &self.address,
            limit: self.liveness.ping_timeout,
        }
    }

    /// What takes long is done without: the worker is well, and must not look silent.
    fn quick_probe(&self) -> Probe<'_> {
        Probe {
            limit: self.liveness.suspect_after / 2,
            ..self.probe()
        }
    }

    async fn find_and_watch(&mut self) -> Result<Infallible, WatchError> {
        let Found {
            info,
            scrape,
            ranks,
        } = self.probe().find().await?;
        let names = std::iter::once(&info.model).chain(&info.further_names);
        let names: Vec<String> = names.chain(&info.adapters).cloned().collect();
        let (held, let_go) = oneshot::channel();
        let model = info.model.clone();
        let role = info.role;
        let site = Arc::new(Site {
            worker: self.worker,
            address: self.address.clone(),
            names,
            connections: Connections::new(self.address.authority.clone(), self.liveness.connect),
            registry: Arc::clone(&self.registry),
            doubts: Notify::new(),
            stalled: self.liveness.stalled,
            loads: KvLoads::default(),
            ranks,
        });
        let link = Arc::new(ForeignLink {
            site: Arc::clone(&site),
            _held: held,
        });
        let now = Instant::now();
        let joined = self.registry.join(self.worker, info.clone(), link, now)?;
        self.key = Some(joined.key);
        tracing::info!(
            worker = %self.worker,
            engine = %self.address.engine,
            %role,
            model,
            address = self.address.authority,
            reports_load = scrape.load.is_some(),
            "worker joins",
        );
        self.take(&joined, &site, &scrape, Vec::new());
        tokio::select! {
            biased;
            error = self.look(&joined, &site, scrape.started, info) => error,
            _ = let_go => Err(WatchError::Removed),
        }
    }

    /// Looks at health and load again and again.
    async fn look(
        &self,
        joined: &Joined,
        site: &Site,
        started: Option<f64>,
        mut info: WorkerInfo,
    ) -> Result<Infallible, WatchError> {
        let quick = (self.liveness.suspect_after / 4).max(Duration::from_millis(10));
        let mut ticks = interval(LOOK.min(quick));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut looks = 0u32;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                () = site.doubts.notified() => {}
            }
            site.connections.close_idle(tokio::time::Instant::now());
            looks = looks.wrapping_add(1);
            let mut health = std::pin::pin!(async {
                self.observe(joined, site, started).await?;
                match looks % LOOKS_FOR_NAMES {
                    0 => self.read_names(joined, &mut info).await,
                    _ => Ok(()),
                }
            });
            // A worker that does not answer is suspected while it is asked.
            loop {
                tokio::select! {
                    observed = &mut health => break observed?,
                    () = sleep(quick) => self.check_silence(joined.key)?,
                }
            }
            self.check_silence(joined.key)?;
        }
    }

    async fn observe(
        &self,
        joined: &Joined,
        site: &Site,
        started: Option<f64>,
    ) -> Result<(), WatchError> {
        match self.probe().health().await {
            Ok(()) => {}
            Err(error) if error.is_gone() => return Err(error.into()),
            Err(error) => {
                tracing::debug!(worker = %self.worker, %error, "not well");
                return Ok(());
            }
        }
        self.report(joined, None, None);
        let ended = site.loads.take_ended();
        let scrape = self.quick_probe().scrape().await;
        if let (Some(before), Some(now)) = (started, scrape.started)
            && (now - before).abs() > 1.0
        {
            return Err(WatchError::Restarted);
        }
        self.take(joined, site, &scrape, ended);
        Ok(())
    }

    /// Adapters are loaded and unloaded while it serves. A worker that does not tell has those
    /// that it had.
    async fn read_names(&self, joined: &Joined, info: &mut WorkerInfo) -> Result<(), WatchError> {
        let mut names = match self.quick_probe().names().await {
            Ok(names) => names,
            Err(error) => {
                tracing::debug!(worker = %self.worker, %error, "its models are not known anew");
                return Ok(());
            }
        };
        if names.model != info.model {
            let known = names.further.iter_mut().find(|name| **name == info.model);
            std::mem::swap(known.ok_or(WatchError::Restarted)?, &mut names.model);
            names.further.sort();
        }
        if (&names.further, &names.adapters) == (&info.further_names, &info.adapters) {
            return Ok(());
        }
        (info.further_names, info.adapters) = (names.further, names.adapters);
        tracing::info!(
            worker = %self.worker,
            address = self.address.authority,
            adapters = info.adapters.len(),
            "the worker's adapters have changed",
        );
        let known = self.registry.on_info(joined.key, info.clone());
        known.then_some(()).ok_or(WatchError::Removed)
    }

    fn take(&self, joined: &Joined, site: &Site, scrape: &Scrape, ended: Vec<KvSources>) {
        let missed = site.loads.scraped(scrape.sources, ended);
        for _ in 0..missed {
            self.registry.recomputed.count(Recomputed::NotLoaded);
        }
        if missed > 0 {
            tracing::warn!(
                worker = %self.worker,
                address = self.address.authority,
                role = "decode",
                requests = missed,
                "the worker computed prompts whose KV it was to pull: start both workers with \
                 --kv-transfer-config, and see its log for failed transfers"
            );
        }
        let exported = scrape.load.map(|load| exported(&load, scrape));
        self.report(joined, scrape.load, exported);
    }

    fn report(&self, joined: &Joined, load: Option<LoadReport>, exported: Option<v1::Load>) {
        let report = Report {
            load,
            exported,
            cache: None,
            outputs: std::iter::empty::<(String, Output)>(),
            ended: std::iter::empty::<(String, LegEnd)>(),
        };
        self.registry.on_report(joined, report, Instant::now());
    }

    fn check_silence(&self, key: WorkerKey) -> Result<(), WatchError> {
        let Liveness {
            suspect_after,
            lost_after,
            ..
        } = self.liveness;
        let now = Instant::now();
        match self
            .registry
            .check_silence(key, now, suspect_after, lost_after)
        {
            Silence::Fine | Silence::Suspect => Ok(()),
            Silence::Lost => Err(WatchError::Silent(lost_after)),
        }
    }
}

/// For metrics, as our own workers report it.
fn exported(load: &LoadReport, scrape: &Scrape) -> v1::Load {
    v1::Load {
        waiting_requests: load.waiting_requests,
        running_requests: load.running_requests,
        free_blocks: load.free_blocks,
        total_blocks: scrape.total_blocks.unwrap_or(load.free_blocks),
        ..v1::Load::default()
    }
}
