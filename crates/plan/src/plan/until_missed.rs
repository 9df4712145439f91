//! Ends a run early that has failed. Misses of its first half count here too: with so many the queue
//! is there, and the second half misses as many.

use std::collections::HashMap;
use std::sync::Arc;

use tasuki_sim::{Clients, Request, Time};

use super::screen::Limits;

/// Sends requests until too many of them have missed the objectives.
pub struct UntilMissed<'a> {
    clients: Box<dyn Clients + 'a>,
    limits: Limits,
    /// Requests that may miss the objectives.
    most: usize,
    missed: usize,
    /// When requests in flight end at the latest if they meet both objectives.
    latest: HashMap<usize, Time>,
}

impl<'a> UntilMissed<'a> {
    pub fn new(clients: Box<dyn Clients + 'a>, limits: Limits, most: usize) -> Self {
        Self {
            clients,
            limits,
            most,
            missed: 0,
            latest: HashMap::new(),
        }
    }

    /// Whether more requests missed the objectives than may.
    pub fn has_failed(&self) -> bool {
        self.missed > self.most
    }

    fn sent(&mut self, request: Request) -> Request {
        let after = f64::from(request.output_tokens.saturating_sub(1));
        let most_s = self.limits.ttft_s + self.limits.tpot_s * after;
        let latest = request.due.plus_s(most_s);
        self.latest.insert(request.index, latest);
        request
    }
}

impl Clients for UntilMissed<'_> {
    fn next(&mut self) -> Option<Request> {
        if self.has_failed() {
            return None;
        }
        let request = self.clients.next()?;
        Some(self.sent(request))
    }

    fn held(&mut self, most: usize) -> Vec<Arc<[u64]>> {
        self.clients.held(most)
    }

    fn over(&mut self, index: usize, at: Time) -> Option<Request> {
        let latest = self.latest.remove(&index);
        self.missed += usize::from(latest.is_some_and(|latest| at > latest));
        let request = self.clients.over(index, at)?;
        (!self.has_failed()).then(|| self.sent(request))
    }
}
