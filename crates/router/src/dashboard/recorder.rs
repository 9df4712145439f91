//! What the dashboard shows of the past, in memory of a fixed size.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use tasuki_reqlog::Outcome;

use super::histogram::Histogram;
use crate::serve::api::Timings;

/// The series have one point for each interval.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// Points of the series: five minutes.
const POINTS: usize = 150;
/// Rates of links are means over so many intervals.
const LINK_INTERVALS: usize = 5;
/// Links that are shown: a fleet has as many as pairs of workers, and a page that draws them all
/// takes seconds for each state.
const LINKS: usize = 200;
/// Requests that are kept.
const REQUESTS: usize = 50;

/// What a request must keep to count as goodput; `None`: there is no such objective.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Objectives {
    pub ttft_s: Option<f64>,
    /// Mean time per token after the first.
    pub tpot_s: Option<f64>,
}

/// A request that has ended.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Request {
    pub id: String,
    /// Unix time.
    pub ended_at: f64,
    pub outcome: &'static str,
    pub prompt_tokens: usize,
    /// Of all choices.
    pub output_tokens: u64,
    pub total_s: f64,
    /// Null: the request did not end well.
    pub phases: Option<Phases>,
}

/// Where a request's time went, in seconds; `total` less their sum went to messages.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Phases {
    pub queue: f64,
    pub prefill: f64,
    /// The part of the transfer for which the request waited.
    pub transfer: f64,
    pub first_decode: f64,
    pub decode: f64,
    /// Of a request that was placed again.
    pub recovery: f64,
    pub first_token: f64,
    pub prefill_worker: String,
    pub decode_worker: String,
    pub cached_prompt_tokens: u32,
    pub transfer_bytes: u64,
    pub replacements: u32,
}

impl From<&Timings> for Phases {
    fn from(timings: &Timings) -> Self {
        Self {
            queue: timings.queue.as_secs_f64(),
            prefill: timings.prefill.as_secs_f64(),
            transfer: timings.transfer_exposed.as_secs_f64(),
            first_decode: timings.first_decode.as_secs_f64(),
            decode: timings.decode.as_secs_f64(),
            recovery: timings.recovery.as_secs_f64(),
            first_token: timings.first_token.as_secs_f64(),
            prefill_worker: timings.prefill_worker.clone(),
            decode_worker: timings.decode_worker.clone(),
            cached_prompt_tokens: timings.cached_prompt_tokens,
            transfer_bytes: timings.transfer_bytes,
            replacements: timings.replacements,
        }
    }
}

/// One interval of the series: numbers of events, and quantiles in seconds.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// Unix time of its end.
    pub at: f64,
    /// Requests that ended well.
    pub done: u64,
    /// Those of them that kept the objectives.
    pub good: u64,
    pub failed: u64,
    pub refused: u64,
    pub retries: u64,
    pub output_tokens: u64,
    pub transfer_bytes: u64,
    pub ttft_p50: Option<f64>,
    pub ttft_p99: Option<f64>,
    pub itl_p50: Option<f64>,
    pub itl_p99: Option<f64>,
}

/// KV that moved between two workers, for requests that ended in the last 10 s.
#[derive(Debug, Clone, Serialize)]
pub struct Link {
    pub from: String,
    pub to: String,
    pub bytes_per_s: f64,
    pub handoffs_per_s: f64,
}

/// The past as of now.
#[derive(Debug, Serialize)]
pub struct Past {
    pub interval_s: f64,
    pub objectives: Objectives,
    /// The oldest first.
    pub series: VecDeque<Point>,
    /// By their workers; where some are left out, the busiest ones, those first.
    pub links: Vec<Link>,
    /// Links by which KV moved, with those that `links` leaves out.
    pub links_in_use: usize,
    /// The latest first.
    pub requests: VecDeque<Request>,
}

/// Bytes and handoffs by the pair of workers.
type Moved = BTreeMap<(String, String), (u64, u64)>;

#[derive(Default)]
struct Kept {
    series: VecDeque<Point>,
    moved: VecDeque<Moved>,
    requests: VecDeque<Request>,
}

/// Counts what goes on. Tokens take no lock, the end of a request takes one.
#[derive(Default)]
pub struct Recorder {
    objectives: Objectives,
    first_token: Histogram,
    between_tokens: Histogram,
    output_tokens: AtomicU64,
    retries: AtomicU64,
    done: AtomicU64,
    good: AtomicU64,
    failed: AtomicU64,
    refused: AtomicU64,
    transfer_bytes: AtomicU64,
    kept: Mutex<Kept>,
}

impl Recorder {
    pub fn new(objectives: Objectives) -> Self {
        Self {
            objectives,
            ..Self::default()
        }
    }

    pub fn first_token(&self, seconds: f64) {
        self.first_token.observe(seconds, 1);
    }

    /// Tokens that follow others came, each so long after the one before it.
    pub fn between_tokens(&self, seconds: f64, count: u64) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.between_tokens.observe(seconds, count);
    }

    pub fn output_tokens(&self, count: u64) {
        self.output_tokens.fetch_add(count, Ordering::Relaxed);
    }

    pub fn retried(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    /// A request ended. `longest`: tokens of its longest choice.
    pub fn ended(&self, outcome: Outcome, longest: u64, mut request: Request) {
        let counter = match outcome {
            Outcome::Done => Some(&self.done),
            Outcome::Refused => Some(&self.refused),
            Outcome::Failed | Outcome::Unavailable => Some(&self.failed),
            // The client's doing.
            Outcome::Rejected | Outcome::Cancelled | Outcome::TooSlow => None,
        };
        if let Some(counter) = counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        if outcome == Outcome::Done && self.is_good(longest, &request) {
            self.good.fetch_add(1, Ordering::Relaxed);
        }
        request.outcome = outcome.as_str();
        request.ended_at = unix_time();
        let mut kept = self.lock();
        if let Some(phases) = &request.phases
            && phases.transfer_bytes > 0
        {
            self.transfer_bytes
                .fetch_add(phases.transfer_bytes, Ordering::Relaxed);
            let pair = (phases.prefill_worker.clone(), phases.decode_worker.clone());
            if kept.moved.is_empty() {
                kept.moved.push_front(Moved::new());
            }
            let (bytes, handoffs) = kept.moved[0].entry(pair).or_default();
            *bytes += phases.transfer_bytes;
            *handoffs += 1;
        }
        kept.requests.push_front(request);
        kept.requests.truncate(REQUESTS);
    }

    fn is_good(&self, longest: u64, request: &Request) -> bool {
        let Some(phases) = &request.phases else {
            return false;
        };
        let keeps = |objective: Option<f64>, found: f64| objective.is_none_or(|most| found <= most);
        let after_first = request.total_s - phases.first_token;
        let tpot = after_first / longest.saturating_sub(1).max(1) as f64;
        keeps(self.objectives.ttft_s, phases.first_token) && keeps(self.objectives.tpot_s, tpot)
    }

    /// Ends an interval every two seconds.
    pub async fn keep_time(&self) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        loop {
            ticks.tick().await;
            self.end_interval();
        }
    }

    fn end_interval(&self) {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed);
        let (ttft, itl) = (self.first_token.take(), self.between_tokens.take());
        let point = Point {
            at: unix_time(),
            done: take(&self.done),
            good: take(&self.good),
            failed: take(&self.failed),
            refused: take(&self.refused),
            retries: take(&self.retries),
            output_tokens: take(&self.output_tokens),
            transfer_bytes: take(&self.transfer_bytes),
            ttft_p50: ttft.map(|(median, _)| median),
            ttft_p99: ttft.map(|(_, high)| high),
            itl_p50: itl.map(|(median, _)| median),
            itl_p99: itl.map(|(_, high)| high),
        };
        let mut kept = self.lock();
        if kept.series.len() == POINTS {
            kept.series.pop_front();
        }
        kept.series.push_back(point);
        kept.moved.push_front(Moved::new());
        // The interval that goes on is none of them.
        kept.moved.truncate(1 + LINK_INTERVALS);
    }

    pub fn past(&self) -> Past {
        let kept = self.lock();
        let mut moved = Moved::new();
        for (pair, (bytes, handoffs)) in kept.moved.iter().skip(1).flatten() {
            let sum = moved.entry(pair.clone()).or_default();
            *sum = (sum.0 + bytes, sum.1 + handoffs);
        }
        let span_s = INTERVAL.as_secs_f64() * LINK_INTERVALS as f64;
        let mut links: Vec<Link> = moved
            .into_iter()
            .map(|((from, to), (bytes, handoffs))| Link {
                from,
                to,
                bytes_per_s: bytes as f64 / span_s,
                handoffs_per_s: handoffs as f64 / span_s,
            })
            .collect();
        let links_in_use = links.len();
        if links_in_use > LINKS {
            links.sort_by(|a, b| b.bytes_per_s.total_cmp(&a.bytes_per_s));
            links.truncate(LINKS);
        }
        Past {
            interval_s: INTERVAL.as_secs_f64(),
            objectives: self.objectives,
            series: kept.series.clone(),
            links,
            links_in_use,
            requests: kept.requests.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unix_time() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(first_token: f64, total_s: f64) -> Request {
        Request {
            total_s,
            phases: Some(Phases {
                first_token,
                transfer_bytes: 1_000,
                prefill_worker: "0".to_owned(),
                decode_worker: "1".to_owned(),
                ..Phases::default()
            }),
            ..Request::default()
        }
    }

    #[test]
    fn an_interval_has_what_happened_in_it() {
        let recorder = Recorder::new(Objectives {
            ttft_s: Some(0.5),
            tpot_s: Some(0.1),
        });
        recorder.first_token(0.2);
        recorder.between_tokens(0.01, 8);
        recorder.output_tokens(9);
        recorder.retried();
        recorder.ended(Outcome::Done, 11, request(0.4, 1.3)); // 0.09 s a token
        recorder.ended(Outcome::Done, 11, request(0.4, 1.5)); // 0.11 s a token
        recorder.ended(Outcome::Done, 1, request(0.6, 0.6));
        recorder.ended(Outcome::Refused, 0, Request::default());
        recorder.ended(Outcome::Unavailable, 0, Request::default());
        recorder.ended(Outcome::Cancelled, 3, Request::default());
        recorder.end_interval();
        let past = recorder.past();
        let point = &past.series[0];
        assert_eq!((point.done, point.good), (3, 1));
        assert_eq!((point.failed, point.refused, point.retries), (1, 1, 1));
        assert_eq!((point.output_tokens, point.transfer_bytes), (9, 3_000));
        assert!((point.ttft_p50.expect("a TTFT") / 0.2 - 1.0).abs() < 0.05);
        assert!((point.itl_p99.expect("an ITL") / 0.01 - 1.0).abs() < 0.05);
        let link = &past.links[0];
        assert_eq!((link.from.as_str(), link.to.as_str()), ("0", "1"));
        assert!((link.bytes_per_s - 300.0).abs() < 1e-9, "{link:?}");
        assert!((link.handoffs_per_s - 0.3).abs() < 1e-9, "{link:?}");
        assert_eq!(past.requests[0].outcome, "cancelled");
        recorder.end_interval();
        let point = &recorder.past().series[1];
        assert_eq!((point.done, point.ttft_p50), (0, None));
    }

    #[test]
    fn of_many_links_the_busiest_are_shown() {
        let recorder = Recorder::default();
        let moved = |from: usize, transfer_bytes: u64| {
            let mut request = request(0.1, 0.1);
            let phases = request.phases.as_mut().expect("phases");
            phases.prefill_worker = format!("{from:04}");
            phases.transfer_bytes = transfer_bytes;
            recorder.ended(Outcome::Done, 1, request);
        };
        for from in 0..3 * LINKS {
            moved(from, if from == 2 * LINKS { 2_000 } else { 1_000 });
        }
        recorder.end_interval();
        let past = recorder.past();
        assert_eq!((past.links.len(), past.links_in_use), (LINKS, 3 * LINKS));
        let busiest = format!("{:04}", 2 * LINKS);
        assert!(past.links.iter().any(|link| link.from == busiest));
    }

    #[test]
    fn memory_is_bounded() {
        let recorder = Recorder::default();
        for _ in 0..2 * POINTS {
            recorder.ended(Outcome::Done, 1, request(0.1, 0.1));
            recorder.end_interval();
        }
        let past = recorder.past();
        assert_eq!((past.series.len(), past.requests.len()), (POINTS, REQUESTS));
        assert_eq!(recorder.lock().moved.len(), 1 + LINK_INTERVALS);
        let link = &past.links[0];
        assert!((link.handoffs_per_s - 0.5).abs() < 1e-9, "{link:?}");
    }
}
