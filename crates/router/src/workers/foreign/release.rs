//! KV that a vLLM prefill worker holds for a request that the decode worker refused.

use std::sync::Arc;
use std::time::Duration;

use tasuki_flow::Handoff;
use tokio::time::timeout;

use super::client::MOST_ANSWER_BYTES;
use super::leg::Leg;
use super::vllm;
use crate::foreign::request::ForeignRequest;

/// What the decode worker may take to get the KV.
const LIMIT: Duration = Duration::from_secs(30);

impl Leg<'_> {
    /// Has the decode worker take the KV for one token: prefill holds it until then, or until its
    /// own timeout.
    pub fn release(&self, request: &ForeignRequest) {
        let Some(Handoff::Redeem { ticket, .. }) = &self.spec.handoff else {
            return;
        };
        let body = vllm::release_body(&self.with_model(request), request.path, ticket);
        let (site, message) = (Arc::clone(self.site), self.message(request, &body));
        tokio::spawn(timeout(LIMIT, async move {
            let answer = site.connections.ask(&message).await?;
            answer.whole(MOST_ANSWER_BYTES).await
        }));
    }
}
