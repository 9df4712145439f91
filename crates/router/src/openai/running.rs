//! A request under way.

use std::time::Duration;

use super::deadline::Deadline;
use super::delivery::Delivery;
use super::outputs::{Output, Outputs};
use super::shape::Identity;
use crate::access_log::{Ended, RequestLog};
use crate::api_keys::CallerPermit;
use crate::error::ApiError;
use crate::gate::Permit;

/// A request and the words for its answer.
pub struct Running<W> {
    pub wording: W,
    pub run: Run,
}

/// Everything that an answer needs but its words.
pub struct Run {
    pub identity: Identity,
    pub delivery: Delivery,
    pub outputs: Outputs,
    pub log: RequestLog,
    pub deadline: Deadline,
    /// A stream that has nothing to say for so long says at least that.
    pub heartbeat: Duration,
    pub _permit: Permit,
    pub _caller_permit: Option<CallerPermit>,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.log.write(|| Ended {
            usage: self.outputs.summary().usage,
            timings: self.outputs.known_timings(),
            finishes: self.outputs.finishes(),
        });
    }
}

impl Run {
    /// The next piece of any choice; `None` when all have ended. After an error nothing
    /// follows.
    pub async fn next(&mut self) -> Option<Result<Output, ApiError>> {
        match self.deadline.limit(self.outputs.next()).await {
            Ok(next) => next.map(|next| next.map_err(ApiError::from)),
            Err(late) => Some(Err(late)),
        }
    }

    /// The prompt's ids if they were asked for and belong `here`.
    pub fn prompt_ids(&self, index: usize, here: bool) -> Option<Vec<u32>> {
        (self.delivery.return_token_ids && here).then(|| self.outputs.prompt_tokens(index).to_vec())
    }
}
