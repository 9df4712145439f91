//! A connection to a worker, and the requests of the legs on it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tasuki_core::WorkerId;
use tasuki_flow::fleet::LegSlot;
use tasuki_flow::{Input, LegEnd, LegId, Output, WorkerKey};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;

use super::link::WorkerLink;

/// Made when a worker joins, gone when it leaves.
pub struct Connection {
    pub serial: u64,
    pub link: Arc<dyn WorkerLink>,
    pub legs: Arc<RoutedLegs>,
    pub exported: Option<v1::Load>,
}

/// What a worker's own task holds of its connection.
#[derive(Clone)]
pub struct Joined {
    pub key: WorkerKey,
    pub legs: Arc<RoutedLegs>,
}

/// The legs on a connection by their names there. A lock of their own: what a worker reports finds
/// its requests beside all others. Who has the registry's lock may take it, not the reverse.
#[derive(Default)]
pub struct RoutedLegs(Mutex<HashMap<String, RoutedLeg>>);

/// What a request is to be told of a leg.
pub struct Routed {
    pub slot: LegSlot,
    pub inbox: UnboundedSender<Input>,
    pub input: Input,
}

/// A leg, and the request that its messages go to.
pub struct RoutedLeg {
    pub attempt: u32,
    pub slot: LegSlot,
    pub inbox: UnboundedSender<Input>,
}

impl Connection {
    pub fn key(&self, worker: WorkerId) -> WorkerKey {
        WorkerKey {
            worker,
            connection: self.serial,
        }
    }

    /// Tells the requests of all legs that the connection is over.
    pub fn lose_legs(self, worker: WorkerId) {
        let key = self.key(worker);
        for (_, leg) in self.legs.lock().drain() {
            let _ = leg.inbox.send(Input::Lost(key));
        }
    }
}

impl RoutedLegs {
    /// To whom a report's parts go, in their order. Legs that ended are no more on the connection.
    pub fn route<Name: AsRef<str>>(
        &self,
        key: WorkerKey,
        outputs: impl Iterator<Item = (Name, Output)>,
        ended: impl Iterator<Item = (Name, LegEnd)>,
    ) -> Vec<Routed> {
        let mut routed = Vec::with_capacity(outputs.size_hint().0);
        let mut legs = self.lock();
        for (name, output) in outputs {
            if let Some(leg) = legs.get(name.as_ref()) {
                routed.push(Routed {
                    slot: leg.slot,
                    inbox: leg.inbox.clone(),
                    input: Input::Output(leg.id(key), output),
                });
            }
        }
        for (name, end) in ended {
            if let Some(leg) = legs.remove(name.as_ref()) {
                routed.push(Routed {
                    slot: leg.slot,
                    input: Input::Ended(leg.id(key), end),
                    inbox: leg.inbox,
                });
            }
        }
        routed
    }

    /// A panic elsewhere leaves them usable: every change is complete in itself.
    pub fn lock(&self) -> MutexGuard<'_, HashMap<String, RoutedLeg>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RoutedLeg {
    pub fn id(&self, worker: WorkerKey) -> LegId {
        LegId {
            worker,
            attempt: self.attempt,
        }
    }
}
