//! What one request leaves in the request log, gathered by its task.

use std::time::{Duration, Instant};

use tasuki_core::Chunks;
use tasuki_flow::{Generation, LegId, LegKind};
use tasuki_reqlog::{Ended, Handoff, Outcome, Record, RequestLog};

use crate::serve::api::{Event, Timings, outcome_of};

/// Written when it is dropped: the client has left until something else is known.
pub struct Recording {
    log: RequestLog,
    received: Instant,
    record: Record,
    chunks: Chunks,
    /// Of each choice: tokens so far, and when the last came.
    choices: Vec<(u32, Instant)>,
    last: Option<Instant>,
}

impl Recording {
    pub fn new(
        log: &RequestLog,
        generation: &Generation,
        chunks: &Chunks,
        received: Instant,
    ) -> Self {
        Self {
            record: Record {
                arrived_s: log.time_s(received),
                // Of a request that is not tokens, an estimate.
                prompt_tokens: generation.prompt.len() as u32,
                tenant: log.tenant(&generation.tenant),
                priority: generation.priority,
                model: generation.model.0,
                more_choices: generation.n.saturating_sub(1),
                outcome: Outcome::Cancelled,
                ..Record::default()
            },
            log: log.clone(),
            received,
            chunks: chunks.clone(),
            choices: Vec::new(),
            last: None,
        }
    }

    /// Admission has let it in.
    pub fn admitted(&mut self, now: Instant) {
        self.record.admitted_ms = Some(ms(now - self.received));
    }

    /// A leg goes to a worker.
    pub fn dispatch(&mut self, leg: LegId, kind: LegKind) {
        let worker = leg.worker.worker.0;
        let (prefill, decode) = self.record.workers.unwrap_or((worker, worker));
        self.record.workers = Some(match kind {
            LegKind::Colocated => (worker, worker),
            LegKind::Prefill => (worker, decode),
            LegKind::Decode => (prefill, worker),
        });
    }

    pub fn retry(&mut self) {
        self.record.retries += 1;
    }

    /// Takes note of what the client is about to get.
    pub fn observe(&mut self, event: &Event, now: Instant) {
        match event {
            Event::PromptLogprobs(_) => {}
            Event::Tokens { choice, tokens, .. } => self.tokens(*choice, tokens.len() as u32, now),
            Event::Frame { tokens, .. } => self.tokens(0, *tokens, now),
            Event::Done(timings) => self.done(timings),
            Event::Failed(error) => self.record.outcome = outcome_of(error),
        }
    }

    /// The client lost its request, for it read too slowly.
    pub fn too_slow(&mut self) {
        self.record.outcome = Outcome::TooSlow;
    }

    fn tokens(&mut self, choice: u32, count: u32, now: Instant) {
        if count == 0 {
            return;
        }
        let since_ms = ms(now - self.received);
        self.record.first_token_ms.get_or_insert(since_ms);
        self.last = Some(now);
        let choice = choice as usize;
        if self.choices.len() <= choice {
            self.choices.resize(choice + 1, (0, now));
        }
        let (known, last) = self.choices[choice];
        self.choices[choice] = (known + count, now);
        if known + count >= 2 {
            self.record.second_token_ms.get_or_insert(since_ms);
        }
        if known > 0 {
            let longest = self.record.longest_gap_ms.get_or_insert(0.0);
            *longest = longest.max(ms(now - last));
        }
    }

    fn done(&mut self, timings: &Timings) {
        let record = &mut self.record;
        record.outcome = Outcome::Done;
        record.cached_tokens = timings.cached_prompt_tokens;
        record.queue_ms = (!timings.prefill.is_zero()).then(|| ms(timings.queue));
        let (transfer_ms, exposed_ms) = (ms(timings.transfer), ms(timings.transfer_exposed));
        record.handoff = (timings.transfer_bytes > 0).then_some(Handoff(
            timings.transfer_bytes,
            transfer_ms,
            exposed_ms,
        ));
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut record = std::mem::take(&mut self.record);
        let end = self.last.unwrap_or_else(Instant::now);
        record.end_ms = ms(end - self.received);
        let tokens = self.choices.iter().map(|(tokens, _)| *tokens);
        record.output_tokens = tokens.max().unwrap_or_default();
        self.log.write(Ended {
            record,
            chunks: std::mem::take(&mut self.chunks),
        });
    }
}

fn ms(time: Duration) -> f64 {
    1e3 * time.as_secs_f64()
}
