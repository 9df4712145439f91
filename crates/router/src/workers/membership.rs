//! Makes the registry's workers those of the deployment, as addresses come and go.
//!
//! ```text
//!            listed                       not listed                  no legs, or the limit
//!  (unknown) ───────▶ member, connected ────────────▶ member, draining ───────▶ (removed)
//!                          ▲                                  │
//!                          └──────────── listed again ────────┘
//! ```

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use tasuki_core::WorkerId;
use tasuki_flow::fleet::DrainReason;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::connect::{Dialling, keep_connected};
use super::foreign::keep_watched;
use super::registry::Registry;
use crate::discovery::{Address, AddressSet};

/// How often a draining worker's legs are counted.
const LEGS_INTERVAL: Duration = Duration::from_millis(20);

/// Keeps a connection to every worker that is listed, until it is dropped.
///
/// A worker whose address is gone drains: its requests go on for `drain_limit`, and what is
/// left then is placed again.
pub async fn follow(
    sets: impl Stream<Item = AddressSet> + Unpin,
    registry: Arc<Registry>,
    dialling: Dialling,
    drain_limit: Duration,
) -> Infallible {
    let mut sets = sets.fuse();
    let mut listed = AddressSet::new();
    // Whether each address is listed, for its task.
    let mut members: HashMap<String, watch::Sender<bool>> = HashMap::new();
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            Some(set) = sets.next() => listed = set,
            Some(_) = tasks.join_next() => members.retain(|_, member| !member.is_closed()),
            else => std::future::pending().await,
        }
        let there: HashSet<&String> = listed.iter().collect(); // they may be tens of thousands
        for (address, member) in &members {
            member.send_if_modified(|is| {
                let now = there.contains(address);
                std::mem::replace(is, now) != now
            });
        }
        for address in &listed {
            if !members.contains_key(address) {
                let member = watch::Sender::new(true);
                let membership = Membership {
                    worker: registry.add(address),
                    address: address.clone(),
                    registry: Arc::clone(&registry),
                };
                tasks.spawn(membership.keep(dialling.clone(), drain_limit, member.subscribe()));
                members.insert(address.clone(), member);
            }
        }
    }
}

/// A worker in the registry. Dropped: it is removed.
struct Membership {
    worker: WorkerId,
    address: String,
    registry: Arc<Registry>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.registry.remove(self.worker);
    }
}

impl Membership {
    /// Keeps the connection until the address is gone and the worker has drained.
    async fn keep(self, dialling: Dialling, drain_limit: Duration, listed: watch::Receiver<bool>) {
        let registry = Arc::clone(&self.registry);
        let connected = async {
            match Address::parse(&self.address) {
                Ok(Address::Tasuki(at)) => {
                    keep_connected(self.worker, at, registry, dialling).await
                }
                Ok(Address::Foreign(at)) => {
                    keep_watched(self.worker, at, registry, dialling.liveness).await
                }
                Err(error) => {
                    let address = &self.address;
                    tracing::error!(address, %error, "a worker's address is not valid");
                    std::future::pending().await
                }
            }
        };
        tokio::select! {
            never = connected => match never {},
            () = self.drained(drain_limit, listed) => {}
        }
    }

    async fn drained(&self, limit: Duration, mut listed: watch::Receiver<bool>) {
        let Self {
            worker,
            address,
            registry,
        } = self;
        loop {
            if listed.wait_for(|&listed| !listed).await.is_err() {
                return;
            }
            let requests = registry.running_legs(*worker);
            tracing::info!(%worker, address, requests, "address gone: the worker drains");
            registry.drain(*worker, DrainReason::Unlisted);
            let idle = async {
                while registry.running_legs(*worker) > 0 {
                    sleep(LEGS_INTERVAL).await;
                }
            };
            tokio::select! {
                drained = timeout(limit, idle) => {
                    let again = registry.running_legs(*worker);
                    match drained {
                        Ok(()) => tracing::info!(%worker, address, "worker leaves"),
                        Err(_) => tracing::warn!(
                            %worker, address, ?limit, again,
                            "worker leaves with requests after --worker-drain-s: they are placed \
                             again"
                        ),
                    }
                    return;
                }
                back = listed.wait_for(|&listed| listed) => {
                    if back.is_err() {
                        return;
                    }
                    tracing::info!(%worker, address, "address is back: the worker stays");
                    registry.undrain(*worker, DrainReason::Unlisted);
                }
            }
        }
    }
}
