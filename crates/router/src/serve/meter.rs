//! Measures one request as its client sees it.

use std::sync::Arc;
use std::time::Instant;

use tasuki_core::FailureKind;
use tasuki_reqlog::Outcome;

use super::api::{Account, Event, outcome_of};
use crate::dashboard::{Phases, Request};
use crate::metrics::Metrics;

/// From the request's arrival to its end; counts as in flight while it lives.
pub struct Meter {
    metrics: Arc<Metrics>,
    received: Instant,
    /// Of each choice: tokens so far, and when the last came.
    choices: Vec<(u64, Instant)>,
    seen_first: bool,
    seen_second: bool,
    outcome: Outcome,
    failure: Option<FailureKind>,
    /// Where a failure does not count at once: another generation may go on with the answer.
    account: Option<Arc<Account>>,
    /// For the dashboard.
    request: Request,
}

/// The end of a generation. Dropped: it is counted.
pub struct Ending {
    metrics: Arc<Metrics>,
    outcome: Outcome,
    failure: Option<FailureKind>,
    /// Of the longest choice.
    tokens: u64,
    request: Request,
    counts: bool,
}

impl Ending {
    /// It is not counted.
    pub fn forget(mut self) {
        self.counts = false;
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if !self.counts {
            return;
        }
        if let Some(kind) = self.failure {
            self.metrics.failed(kind);
        }
        self.metrics.ended(self.outcome);
        let request = std::mem::take(&mut self.request);
        let recorder = &self.metrics.recorder;
        recorder.ended(self.outcome, self.tokens, request);
    }
}

impl Meter {
    pub fn new(
        metrics: Arc<Metrics>,
        id: &str,
        prompt_tokens: usize,
        received: Instant,
        account: Option<Arc<Account>>,
    ) -> Self {
        metrics.in_flight.inc();
        metrics.prompt_tokens.inc_by(prompt_tokens as u64);
        Self {
            metrics,
            received,
            choices: Vec::new(),
            seen_first: false,
            seen_second: false,
            outcome: Outcome::Cancelled,
            failure: None,
            account,
            request: Request {
                id: id.to_owned(),
                prompt_tokens,
                ..Request::default()
            },
        }
    }

    /// Takes note of what the client is about to get.
    pub fn observe(&mut self, event: &Event, now: Instant) {
        match event {
            Event::PromptLogprobs(_) => {}
            Event::Tokens { choice, tokens, .. } => self.tokens(*choice, tokens.len() as u64, now),
            Event::Frame { tokens, .. } => self.tokens(0, u64::from(*tokens), now),
            Event::Done(timings) => {
                self.outcome = Outcome::Done;
                self.metrics.finished(timings);
                self.request.phases = Some(Phases::from(&**timings));
                self.request.total_s = timings.total.as_secs_f64();
            }
            Event::Failed(error) => {
                self.failure = Some(error.kind());
                self.outcome = outcome_of(error);
            }
        }
    }

    /// Whether the client has got a token.
    pub fn has_begun(&self) -> bool {
        self.seen_first
    }

    /// The client lost its request, for it read too slowly.
    pub fn too_slow(&mut self) {
        self.outcome = Outcome::TooSlow;
    }

    fn tokens(&mut self, choice: u32, count: u64, now: Instant) {
        if count == 0 {
            return;
        }
        self.metrics.output_tokens.inc_by(count);
        self.metrics.recorder.output_tokens(count);
        let since_start = (now - self.received).as_secs_f64();
        if !self.seen_first {
            self.seen_first = true;
            self.metrics.first_token.observe(since_start);
            self.metrics.recorder.first_token(since_start);
        }
        let choice = choice as usize;
        if self.choices.len() <= choice {
            self.choices.resize(choice + 1, (0, now));
        }
        let (known, last) = self.choices[choice];
        self.choices[choice] = (known + count, now);
        if known + count >= 2 && !self.seen_second {
            self.seen_second = true;
            self.metrics.second_token.observe(since_start);
        }
        if known > 0 {
            let each = (now - last).as_secs_f64() / count as f64;
            self.metrics.recorder.between_tokens(each, count);
            self.metrics.between_tokens.observe(each, count);
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.metrics.in_flight.dec();
        let tokens = || self.choices.iter().map(|(tokens, _)| *tokens);
        let mut request = std::mem::take(&mut self.request);
        request.output_tokens = tokens().sum();
        if request.phases.is_none() {
            request.total_s = self.received.elapsed().as_secs_f64();
        }
        let ending = Ending {
            metrics: Arc::clone(&self.metrics),
            outcome: self.outcome,
            failure: self.failure,
            tokens: tokens().max().unwrap_or_default(),
            request,
            counts: true,
        };
        if self.outcome == Outcome::Failed
            && let Some(account) = self.account.take()
        {
            account.keep(ending);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::workers::testing::registry;

    #[test]
    fn tokens_are_timed_as_the_client_sees_them() {
        let metrics = Arc::new(Metrics::new(&registry(0)));
        let received = Instant::now();
        let at = |seconds| received + Duration::from_secs(seconds);
        let tokens = |choice, count| Event::Tokens {
            choice,
            tokens: vec![7; count],
            logprobs: Vec::new(),
            finish: None,
        };
        let mut meter = Meter::new(Arc::clone(&metrics), "r", 5, received, None);
        meter.observe(&tokens(0, 1), at(1));
        meter.observe(&tokens(1, 1), at(2));
        meter.observe(&tokens(0, 1), at(3));
        meter.observe(&tokens(1, 4), at(4)); // half a second each
        drop(meter);
        let text = metrics.text();
        for line in [
            "tasuki_requests_in_flight 0",
            "tasuki_output_tokens_total 7",
            "tasuki_time_to_first_token_seconds_sum 1.0",
            "tasuki_time_to_second_token_seconds_sum 3.0",
            "tasuki_inter_token_latency_seconds_sum 4.0",
            "tasuki_inter_token_latency_seconds_count 5",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        assert_eq!(metrics.recorder.past().requests[0].output_tokens, 7);
    }
}
