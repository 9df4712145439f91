//! A log's requests as a source of simulated requests.

use std::sync::Arc;

use tasuki_core::mix;
use tasuki_sim::{Clients, Request, Time};

use super::logged::Logged;

/// Tokens of a chunk of [`Request::chunks`].
const CHUNK_TOKENS: u32 = 128;

/// Sends a log's requests at their times. Beyond its end the log begins again, with other prompts.
pub struct LogClients<'a> {
    log: &'a Logged,
    next: usize,
    most: usize,
    speed: f64,
}

impl<'a> LogClients<'a> {
    /// `most`: requests in all. `speed`: how many times as fast as they came.
    pub fn new(log: &'a Logged, most: usize, speed: f64) -> Self {
        Self {
            log,
            next: 0,
            most,
            speed,
        }
    }
}

impl Clients for LogClients<'_> {
    fn next(&mut self) -> Option<Request> {
        if self.next >= self.most {
            return None;
        }
        let index = self.next;
        self.next += 1;
        let (round, at) = (
            index / self.log.requests.len(),
            index % self.log.requests.len(),
        );
        let logged = &self.log.requests[at];
        let due_s = self.log.due_s(index);
        let prompt_tokens = logged.record.prompt_tokens.max(1);
        let chunks: Arc<[u64]> = if self.log.shares {
            let round = (round as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let own = (logged.chunks.len() as u64..u64::from(prompt_tokens / CHUNK_TOKENS))
                .map(|chunk| mix(mix(at as u64 ^ (1 << 63)) ^ chunk));
            let shared = logged.chunks.iter().copied();
            shared.chain(own).map(|name| name ^ round).collect()
        } else {
            Arc::default()
        };
        let tenant = match logged.record.tenant {
            0 => String::new(),
            tenant => format!("{tenant:08x}"),
        };
        Some(Request {
            chunks,
            tenant: tenant.into(),
            priority: logged.record.priority,
            ..Request::new(
                index,
                Time::from_s(due_s / self.speed),
                prompt_tokens,
                logged.record.output_tokens,
            )
        })
    }
}
