//! The endpoints of a Kubernetes Service, as its EndpointSlices list them.
//!
//! ```text
//!             list complete                     a change
//!  connect ─────────────────▶ watched, a set ─────────────▶ watched, another set
//!     ▲                             │ error, or the relist is due
//!     └──── pause after an error ───┘ the last set stays
//! ```
//!
//! Every connection begins with a full list, and one is made every few minutes, so a deletion
//! that was missed is not missed for long. Conditions of endpoints do not count: `ready=false`
//! may mean that a node's kubelet is silent while its workers serve, and a worker that ends says
//! so on its own stream.

mod slices;
#[cfg(test)]
pub mod testing;
#[cfg(test)]
mod tests;

use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use rand::Rng;
use tokio::time::{Instant, sleep, timeout_at};

use self::slices::Slices;
use super::source::Service;
use super::{AddressSet, Discovery};
use crate::tls::fleet::causes;

/// Of each slice, the Service that it belongs to.
const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// How the API server is asked.
#[derive(Debug, Clone, Copy)]
struct Timing {
    /// A full list at least as often.
    relist: Duration,
    first_pause: Duration,
    longest_pause: Duration,
}

const TIMING: Timing = Timing {
    relist: Duration::from_secs(300),
    first_pause: Duration::from_millis(200),
    longest_pause: Duration::from_secs(10),
};

/// Why there is no news of the Service.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error("the API server's address and credentials: {}", with_causes(.0))]
    Client(#[from] kube::Error),
    #[error("{}", with_causes(.0))]
    Watch(#[from] watcher::Error),
    #[error("the watch ended")]
    Ended,
}

type Connect = dyn Fn() -> BoxFuture<'static, Result<Client, kube::Error>> + Send;
type Watch = BoxStream<'static, Result<Event<EndpointSlice>, watcher::Error>>;

/// A Service's endpoints.
pub struct EndpointSlices {
    service: Service,
    timing: Timing,
    connect: Box<Connect>,
    watch: Option<Watch>,
    relist_at: Instant,
    pause: Duration,
    slices: Slices,
    last: Option<AddressSet>,
    logged: String,
}

impl EndpointSlices {
    /// With the credentials of `KUBECONFIG`, or of the pod that the router runs in.
    pub fn new(service: Service) -> Self {
        Self::asked(service, TIMING, Box::new(|| Client::try_default().boxed()))
    }

    fn asked(service: Service, timing: Timing, connect: Box<Connect>) -> Self {
        Self {
            slices: Slices::new(service.port.clone()),
            service,
            timing,
            connect,
            watch: None,
            relist_at: Instant::now(),
            pause: timing.first_pause,
            last: None,
            logged: String::new(),
        }
    }

    async fn next(&mut self) -> AddressSet {
        loop {
            match self.event().await {
                Ok(is_complete) => {
                    if is_complete && let Some(set) = self.changed() {
                        return set;
                    }
                }
                Err(error) => {
                    self.log(&error.to_string());
                    self.watch = None;
                    // Routers that lost one API server do not come back together.
                    let share = rand::rng().random_range(0.5..1.0);
                    sleep(self.pause.mul_f64(share)).await;
                    self.pause = (self.pause * 2).min(self.timing.longest_pause);
                }
            }
        }
    }

    /// Waits for what the API server says next. True: what is known is complete.
    async fn event(&mut self) -> Result<bool, WatchError> {
        if self.watch.is_none() {
            self.watch = Some(self.open().await?);
            self.relist_at = Instant::now() + self.timing.relist;
        }
        let Some(watch) = &mut self.watch else {
            return Err(WatchError::Ended);
        };
        let Ok(event) = timeout_at(self.relist_at, watch.next()).await else {
            self.watch = None;
            return Ok(false);
        };
        let event = event.ok_or(WatchError::Ended)??;
        let is_list = matches!(event, Event::InitDone);
        let is_complete = self.slices.apply(event);
        if is_list {
            self.pause = self.timing.first_pause;
            self.logged.clear();
        }
        if is_complete && let Some(problem) = self.slices.problem() {
            self.log(&problem);
        }
        Ok(is_complete)
    }

    async fn open(&mut self) -> Result<Watch, WatchError> {
        let client = (self.connect)().await?;
        let own = client.default_namespace().to_owned();
        let namespace = self.service.namespace.as_deref().unwrap_or(&own);
        let api: Api<EndpointSlice> = Api::namespaced(client, namespace);
        let of_service = format!("{SERVICE_LABEL}={}", self.service.name);
        Ok(watcher(api, watcher::Config::default().labels(&of_service)).boxed())
    }

    /// The set, if it is another one than before.
    fn changed(&mut self) -> Option<AddressSet> {
        let set = self.slices.addresses();
        if self.last.as_ref() == Some(&set) {
            return None;
        }
        self.last = Some(set.clone());
        Some(set)
    }

    /// Each fault once.
    fn log(&mut self, error: &str) {
        if self.logged != error {
            let (service, kept) = (&self.service, self.last.as_ref().map_or(0, Vec::len));
            tracing::warn!(
                kept,
                "--discover kubernetes:{service}: {error}; the last addresses stay. Check that \
                 the API server is in reach, and that a Role lets the router get, list and watch \
                 endpointslices in the namespace"
            );
            self.logged = error.to_owned();
        }
    }
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    for cause in causes(error).map(ToString::to_string) {
        // Some errors repeat their cause.
        if !text.contains(&cause) {
            let separator = if text.is_empty() { "" } else { ": " };
            text = format!("{text}{separator}{cause}");
        }
    }
    text
}

impl Discovery for EndpointSlices {
    fn watch(self: Box<Self>) -> BoxStream<'static, AddressSet> {
        let changes = stream::unfold(self, |mut slices| async move {
            let set = slices.next().await;
            Some((set, slices))
        });
        changes.boxed()
    }
}
