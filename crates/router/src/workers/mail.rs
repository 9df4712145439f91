//! What the registry passes on to the requests.

use tasuki_wire::v1;

use super::WorkerKey;

/// What a request's task hears of its legs.
#[derive(Debug)]
pub enum Mail {
    Output(WorkerKey, v1::Output),
    Ended(WorkerKey, v1::LegEnd),
    /// The connection ended; the legs there are no more.
    Lost(WorkerKey),
}
