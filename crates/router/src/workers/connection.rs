//! A connection to a worker, and the requests of the legs on it.

use std::collections::HashMap;
use std::sync::Arc;

use tasuki_core::WorkerId;
use tasuki_flow::fleet::LegSlot;
use tasuki_flow::{Input, LegId, WorkerKey};
use tasuki_wire::v1;
use tokio::sync::mpsc::UnboundedSender;

use super::link::WorkerLink;

/// Made when a worker joins, gone when it leaves.
pub struct Connection {
    pub serial: u64,
    pub link: Arc<dyn WorkerLink>,
    /// By their name on the connection.
    pub legs: HashMap<String, RoutedLeg>,
    pub exported: Option<v1::Load>,
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
        for leg in self.legs.into_values() {
            let _ = leg.inbox.send(Input::Lost(key));
        }
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
