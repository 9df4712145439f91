//! From records to metrics. Pure. Definitions:
//!
//! * TTFT: first token minus due. TTST: second token minus due. E2E: last token
//!   minus due. TPOT: (E2E - TTFT) / (output tokens - 1).
//! * ITL: gaps between successive tokens of all requests together; n tokens in
//!   one chunk are one gap and n - 1 gaps of zero. `itl_even` splits the gap
//!   before a chunk evenly among its tokens instead.
//! * Client queue: sent minus due. Pacing error: the same, where nothing but
//!   the client's own scheduling lies between (open loop, no limit).
//! * Concurrency: sum of E2E / duration. Peak output throughput: the best
//!   second. Goodput: requests a second that met every objective; attainment:
//!   their share of all sent, failed ones included.
//!
//! With a window, requests are those that were due inside it, tokens and ended
//! requests those that came inside it, whoever's they are. A failed request
//! counts as failed and in no latency or throughput.

use std::collections::{BTreeMap, HashMap};

use serde::{Serialize, Serializer};

use crate::client::Failure;
use crate::phases::Phases;
use crate::recorder::{Record, TokenCountSource};
use crate::slo::{Seen, Slo};
use crate::stats::{Spread, Values};

/// The part of a run that is measured, in seconds since its start.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Window {
    pub begin_s: f64,
    pub end_s: f64,
    pub excluded_requests: usize,
}

/// Metrics as in result files. None: nothing to tell.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Metrics {
    pub duration_s: f64,
    pub sent: usize,
    pub completed: usize,
    pub failed: usize,
    pub input_tokens: u64,
    pub output_tokens: u64,
    pub request_throughput: f64,
    pub input_throughput: f64,
    pub output_throughput: f64,
    pub peak_output_throughput: f64,
    pub total_throughput: f64,
    pub peak_concurrency: usize,
    pub concurrency: f64,
    pub goodput: Option<f64>,
    pub attainment: Option<f64>,
    pub ttft_ms: Option<Spread>,
    pub ttft_from_sent_ms: Option<Spread>,
    pub client_queue_ms: Option<Spread>,
    pub pacing_error_ms: Option<Spread>,
    pub ttst_ms: Option<Spread>,
    pub tpot_ms: Option<Spread>,
    pub itl_ms: Option<Spread>,
    pub itl_even_ms: Option<Spread>,
    pub e2e_ms: Option<Spread>,
    pub phases: Option<PhaseSpreads>,
}

/// How each phase spreads: name in results, name in the report, spread.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseSpreads(pub Vec<(&'static str, &'static str, Option<Spread>)>);

impl Serialize for PhaseSpreads {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, _, spread)| (name, spread)))
    }
}

/// Failures of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FailureCount {
    pub kind: String,
    pub count: usize,
    /// The first of them, in words.
    pub first: String,
}

/// All that a run comes to.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    pub window: Window,
    pub metrics: Metrics,
    /// The most frequent first.
    pub failures: Vec<FailureCount>,
    /// The least exact of all answers.
    pub token_count_source: TokenCountSource,
    /// Whether each record is measured.
    pub in_window: Vec<bool>,
    /// Whether each record met every objective; None without objectives, or not known.
    pub met: Vec<Option<bool>>,
    /// Requests that were in flight when the run was stopped.
    pub interrupted: usize,
}

/// What a summary depends on beside the records.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measuring<'a> {
    /// Begin and end of the steady state; None: the whole run.
    pub steady_s: Option<(f64, f64)>,
    pub slo: Option<&'a Slo>,
    /// Nothing but the client decides when a request is sent.
    pub paced: bool,
}

/// The metrics of `records`.
pub fn summarize(records: &[Record], measuring: Measuring<'_>) -> Summary {
    let ends = records.iter().map(|record| record.end_s);
    let (begin_s, end_s) = measuring
        .steady_s
        .unwrap_or((0.0, ends.fold(0.0, f64::max)));
    let in_window: Vec<bool> = records
        .iter()
        .map(|r| !is_interrupted(r) && begin_s <= r.due_s && r.due_s <= end_s)
        .collect();
    let measured: Vec<&Record> = std::iter::zip(records, &in_window)
        .filter_map(|(record, inside)| inside.then_some(record))
        .collect();
    let window = Window {
        begin_s,
        end_s,
        excluded_requests: records.len() - measured.len(),
    };
    let completed = measured.iter().filter(|r| r.failure.is_none());
    Summary {
        window,
        metrics: metrics(records, &measured, window, measuring),
        failures: failures(&measured),
        token_count_source: completed
            .map(|record| record.source)
            .max()
            .unwrap_or(TokenCountSource::Unknown),
        interrupted: records.iter().filter(|r| is_interrupted(r)).count(),
        met: records.iter().map(|r| met(r, measuring.slo)).collect(),
        in_window,
    }
}

fn is_interrupted(record: &Record) -> bool {
    record.failure == Some(Failure::Interrupted)
}

fn metrics(
    all: &[Record],
    measured: &[&Record],
    window: Window,
    measuring: Measuring<'_>,
) -> Metrics {
    let duration_s = window.end_s - window.begin_s;
    let rate = |count: f64| {
        if duration_s > 0.0 {
            count / duration_s
        } else {
            0.0
        }
    };
    let counts = Counts::new(all, window);
    let completed: Vec<&Record> = measured
        .iter()
        .copied()
        .filter(|record| record.failure.is_none())
        .collect();
    let seen: Vec<Seen> = completed.iter().filter_map(|record| seen(record)).collect();
    let verdicts = measured.iter().map(|record| met(record, measuring.slo));
    let verdicts = measuring
        .slo
        .and_then(|_| verdicts.collect::<Option<Vec<bool>>>());
    let good = verdicts.map(|met| met.into_iter().filter(|met| *met).count() as f64);
    let output_throughput = rate(counts.output_tokens as f64);
    let input_throughput = rate(counts.input_tokens as f64);
    let queue = || milliseconds(measured.iter().map(|r| Some(r.sent_s - r.due_s)));
    let (itl_ms, itl_even_ms) = inter_token(&completed);
    Metrics {
        duration_s,
        sent: measured.len(),
        completed: completed.len(),
        failed: measured.len() - completed.len(),
        input_tokens: counts.input_tokens,
        output_tokens: counts.output_tokens,
        request_throughput: rate(counts.ended as f64),
        input_throughput,
        output_throughput,
        // A run below a second has no second to be best.
        peak_output_throughput: (counts.best_second as f64).max(output_throughput),
        total_throughput: input_throughput + output_throughput,
        peak_concurrency: peak_concurrency(all, window),
        concurrency: rate(counts.waiting_s),
        goodput: good.map(rate),
        attainment: good
            .filter(|_| !measured.is_empty())
            .map(|good| good / measured.len() as f64),
        ttft_ms: milliseconds(seen.iter().map(|seen| Some(seen.ttft_s))),
        ttft_from_sent_ms: milliseconds(
            completed
                .iter()
                .map(|record| Some(record.first_s()? - record.sent_s)),
        ),
        client_queue_ms: queue(),
        pacing_error_ms: if measuring.paced { queue() } else { None },
        ttst_ms: milliseconds(seen.iter().map(|seen| seen.ttst_s)),
        tpot_ms: milliseconds(seen.iter().map(|seen| seen.tpot_s)),
        itl_ms,
        itl_even_ms,
        e2e_ms: milliseconds(seen.iter().map(|seen| Some(seen.e2e_s))),
        phases: phase_spreads(&completed),
    }
}

fn milliseconds(seconds: impl Iterator<Item = Option<f64>>) -> Option<Spread> {
    seconds
        .flatten()
        .map(|s| s * 1e3)
        .collect::<Values>()
        .spread()
}

/// Whether a request met every objective; a failed one has met none. None: there are none, or they
/// are of tokens that nobody counted.
fn met(record: &Record, slo: Option<&Slo>) -> Option<bool> {
    let slo = slo?;
    let seen = record.failure.is_none().then(|| seen(record)).flatten();
    let is_met = seen.is_some_and(|seen| slo.is_met(&seen));
    let is_known = record.source != TokenCountSource::Unknown || !slo.is_of_tokens();
    (is_known || !is_met).then_some(is_met)
}

/// What the user of a completed request saw; None if it had no token.
fn seen(record: &Record) -> Option<Seen> {
    let first_s = record.first_s()?;
    let tokens = record.output_tokens.unwrap_or(0);
    // A chunk without a token is no end of a gap.
    let with_tokens = record.arrived.iter().filter(|arrived| arrived.tokens > 0);
    let gaps = with_tokens
        .clone()
        .zip(with_tokens.skip(1))
        .map(|(before, after)| after.at_s - before.at_s);
    Some(Seen {
        ttft_s: first_s - record.due_s,
        ttst_s: record.token_s(2).map(|second_s| second_s - record.due_s),
        tpot_s: (tokens > 1).then(|| (record.end_s - first_s) / f64::from(tokens - 1)),
        itl_max_s: (tokens > 1).then(|| gaps.fold(0.0, f64::max)),
        e2e_s: record.end_s - record.due_s,
    })
}

/// Gaps between tokens, as they came and split evenly.
fn inter_token(records: &[&Record]) -> (Option<Spread>, Option<Spread>) {
    let (mut as_come, mut even) = (Values::default(), Values::default());
    for record in records {
        let mut before_s = None;
        for arrived in record.arrived.iter().filter(|arrived| arrived.tokens > 0) {
            let tokens = u64::from(arrived.tokens);
            if let Some(before_s) = before_s.replace(arrived.at_s) {
                let gap_ms = (arrived.at_s - before_s) * 1e3;
                as_come.add(gap_ms);
                even.add_times(gap_ms / tokens as f64, tokens);
            } else {
                even.add_times(0.0, tokens - 1);
            }
            as_come.add_times(0.0, tokens - 1);
        }
    }
    (as_come.spread(), even.spread())
}

fn phase_spreads(records: &[&Record]) -> Option<PhaseSpreads> {
    let told: Vec<Phases> = records.iter().filter_map(|record| record.phases).collect();
    let spread = |index: usize| {
        let times = told.iter().filter_map(|phases| phases.named()[index].2);
        times.collect::<Values>().spread()
    };
    let names = told.first()?.named().into_iter().enumerate();
    Some(PhaseSpreads(
        names
            .map(|(index, (name, title, _))| (name, title, spread(index)))
            .collect(),
    ))
}

fn failures(records: &[&Record]) -> Vec<FailureCount> {
    let mut kinds: BTreeMap<String, FailureCount> = BTreeMap::new();
    for failure in records.iter().filter_map(|record| record.failure.as_ref()) {
        let kind = failure.kind().into_owned();
        let count = kinds.entry(kind.clone()).or_insert_with(|| FailureCount {
            kind,
            count: 0,
            first: failure.to_string(),
        });
        count.count += 1;
    }
    let mut counts: Vec<FailureCount> = kinds.into_values().collect();
    counts.sort_by_key(|count| std::cmp::Reverse(count.count));
    counts
}

/// What came inside a window.
#[derive(Default)]
struct Counts {
    input_tokens: u64,
    output_tokens: u64,
    ended: usize,
    best_second: u64,
    /// Sum of the time from due to end that lies inside.
    waiting_s: f64,
}

impl Counts {
    fn new(records: &[Record], window: Window) -> Self {
        let (begin_s, end_s) = (window.begin_s, window.end_s);
        let inside = |at_s: f64| begin_s <= at_s && at_s <= end_s;
        let mut counts = Self::default();
        // A trace may take years, of which few seconds have tokens.
        let mut seconds: HashMap<u64, u64> = HashMap::new();
        let good = |r: &&Record| r.failure.is_none() || is_interrupted(r);
        for record in records.iter().filter(good) {
            if record.first_s().is_some_and(inside) {
                counts.input_tokens += u64::from(record.input_tokens.unwrap_or(0));
            }
            for arrived in record.arrived.iter().filter(|a| inside(a.at_s)) {
                counts.output_tokens += u64::from(arrived.tokens);
                let second = (arrived.at_s - begin_s) as u64;
                *seconds.entry(second).or_default() += u64::from(arrived.tokens);
            }
            if record.failure.is_none() && inside(record.end_s) {
                counts.ended += 1;
            }
            let waited_s = record.end_s.min(end_s) - record.due_s.max(begin_s);
            counts.waiting_s += waited_s.max(0.0);
        }
        counts.best_second = seconds.into_values().max().unwrap_or(0);
        counts
    }
}

/// The most requests in flight at one moment of the window.
fn peak_concurrency(records: &[Record], window: Window) -> usize {
    let flights = records
        .iter()
        .filter(|r| r.sent_s <= window.end_s && r.end_s >= window.begin_s);
    let mut changes: Vec<(f64, i64)> = flights
        .flat_map(|record| [(record.sent_s.max(window.begin_s), 1), (record.end_s, -1)])
        .collect();
    // One that ends when another begins makes room for it.
    changes.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let levels = changes.into_iter().scan(0, |level, (_, change)| {
        *level += change;
        Some(*level)
    });
    levels.max().unwrap_or(0) as usize
}
