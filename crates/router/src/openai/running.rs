//! A request under way.

use std::time::Duration;

use super::delivery::Delivery;
use super::outputs::Outputs;
use super::request_log::RequestLog;
use super::shape::Identity;
use crate::gate::Permit;

/// Everything that its answer needs.
pub struct Running<S> {
    pub shape: S,
    pub identity: Identity,
    pub delivery: Delivery,
    pub outputs: Outputs,
    pub log: RequestLog,
    /// How long a client may leave its stream unread.
    pub patience: Duration,
    pub _permit: Permit,
}

impl<S> Drop for Running<S> {
    fn drop(&mut self) {
        self.log.write(self.outputs.summary().usage);
    }
}

impl<S> Running<S> {
    /// The prompt's ids if they were asked for and belong `here`.
    pub fn prompt_ids(&self, index: usize, here: bool) -> Option<Vec<u32>> {
        (self.delivery.return_token_ids && here).then(|| self.outputs.prompt_tokens(index).to_vec())
    }
}
