//! What is happening now: counters that requests add to, and the view of them
//! on a terminal, or as plain lines in a log.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::console::warn;

/// How often the view changes on a terminal.
const REFRESH: Duration = Duration::from_millis(250);
/// How often there is a line where there is no terminal.
const LINE: Duration = Duration::from_secs(5);

/// Sums over a run, added to by every request. Nothing is decided by them.
#[derive(Debug, Default)]
pub struct Counters {
    sent: AtomicU64,
    ended: AtomicU64,
    failed: AtomicU64,
    tokens: AtomicU64,
    chunks: AtomicU64,
    first_tokens: AtomicU64,
    ttft_us: AtomicU64,
    gaps: AtomicU64,
    gap_us: AtomicU64,
}

impl Counters {
    /// A request goes out.
    pub fn sent(&self) {
        self.sent.fetch_add(1, Relaxed);
    }

    /// A request is over.
    pub fn ended(&self, failed: bool) {
        self.ended.fetch_add(1, Relaxed);
        self.failed.fetch_add(failed.into(), Relaxed);
    }

    /// A chunk came: `tokens` by the server's count (0: it does not count), and
    /// so long after the one before, or after the request was due.
    pub fn chunk(&self, tokens: u32, since_due: Duration, gap: Option<Duration>) {
        self.chunks.fetch_add(1, Relaxed);
        self.tokens.fetch_add(tokens.into(), Relaxed);
        match gap {
            None => {
                self.first_tokens.fetch_add(1, Relaxed);
                self.ttft_us
                    .fetch_add(since_due.as_micros() as u64, Relaxed);
            }
            Some(gap) => {
                self.gaps.fetch_add(tokens.max(1).into(), Relaxed);
                self.gap_us.fetch_add(gap.as_micros() as u64, Relaxed);
            }
        }
    }

    /// Forgets what was counted, such as a warm-up. Nothing may be in flight.
    pub fn reset(&self) {
        for counter in [
            &self.sent,
            &self.ended,
            &self.failed,
            &self.tokens,
            &self.chunks,
            &self.first_tokens,
            &self.ttft_us,
            &self.gaps,
            &self.gap_us,
        ] {
            counter.store(0, Relaxed);
        }
    }

    fn read(&self) -> Reading {
        Reading {
            sent: self.sent.load(Relaxed),
            ended: self.ended.load(Relaxed),
            failed: self.failed.load(Relaxed),
            tokens: self.tokens.load(Relaxed),
            chunks: self.chunks.load(Relaxed),
            first_tokens: self.first_tokens.load(Relaxed),
            ttft_us: self.ttft_us.load(Relaxed),
            gaps: self.gaps.load(Relaxed),
            gap_us: self.gap_us.load(Relaxed),
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Reading {
    sent: u64,
    ended: u64,
    failed: u64,
    tokens: u64,
    chunks: u64,
    first_tokens: u64,
    ttft_us: u64,
    gaps: u64,
    gap_us: u64,
}

impl Reading {
    /// What happened since `before`, `elapsed_s` ago.
    fn line(&self, before: &Self, elapsed_s: f64) -> String {
        let per_s = |now: u64, then: u64| (now - then) as f64 / elapsed_s.max(1e-9);
        let mean_ms =
            |sum: u64, sum_then: u64, count: u64, count_then: u64| match count - count_then {
                0 => "-".to_owned(),
                new => format!("{:.1} ms", (sum - sum_then) as f64 / new as f64 / 1e3),
            };
        // A chunk is not a token: where nobody counts tokens, chunks are shown.
        let (stream, unit) = if self.tokens > 0 {
            (per_s(self.tokens, before.tokens), "tok/s")
        } else {
            (per_s(self.chunks, before.chunks), "chunks/s")
        };
        format!(
            "{:.1} req/s  {stream:.0} {unit}  TTFT {}  ITL {}  in flight {}  errors {}",
            per_s(self.ended, before.ended),
            mean_ms(
                self.ttft_us,
                before.ttft_us,
                self.first_tokens,
                before.first_tokens
            ),
            mean_ms(self.gap_us, before.gap_us, self.gaps, before.gaps),
            self.sent.saturating_sub(self.ended), // another thread counts meanwhile
            self.failed,
        )
    }
}

/// Shows the counters until it is dropped.
pub struct LiveView {
    task: tokio::task::JoinHandle<()>,
    bar: Option<ProgressBar>,
}

impl LiveView {
    /// Begins to show them on stderr. `total`: requests, if that is known.
    pub fn start(counters: Arc<Counters>, total: Option<usize>) -> Self {
        let bar = std::io::stderr()
            .is_terminal()
            .then(|| progress_bar(total.map(|total| total as u64)));
        let task = tokio::spawn(show(counters, total, bar.clone()));
        Self { task, bar }
    }
}

impl Drop for LiveView {
    fn drop(&mut self) {
        self.task.abort();
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn progress_bar(total: Option<u64>) -> ProgressBar {
    let (bar, template) = match total {
        Some(total) => (
            ProgressBar::new(total),
            "{elapsed_precise} [{bar:24}] {pos}/{len}  {msg}",
        ),
        None => (ProgressBar::new_spinner(), "{elapsed_precise} {pos}  {msg}"),
    };
    let style = ProgressStyle::with_template(template).expect("the template is valid");
    bar.with_style(style.progress_chars("=> "))
}

async fn show(counters: Arc<Counters>, total: Option<usize>, bar: Option<ProgressBar>) {
    let began = Instant::now();
    let period = if bar.is_some() { REFRESH } else { LINE };
    // Rates are over the last second or more: over less they flicker.
    let spans = if bar.is_some() { 4 } else { 1 };
    let mut past = vec![(began, Reading::default()); spans];
    let mut ticks = tokio::time::interval_at(began + period, period);
    for turn in 0.. {
        ticks.tick().await;
        let (now, reading) = (Instant::now(), counters.read());
        let slot = &mut past[turn % spans];
        let line = reading.line(&slot.1, (now - slot.0).as_secs_f64());
        *slot = (now, reading);
        match &bar {
            Some(bar) => {
                bar.set_position(reading.ended);
                bar.set_message(line);
            }
            None => {
                let of = total.map_or(String::new(), |total| format!("/{total}"));
                let elapsed_s = (now - began).as_secs();
                warn(&format!("{elapsed_s:>5} s  {}{of}  {line}", reading.ended));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_of_the_time_since_the_last() {
        let counters = Counters::default();
        counters.sent();
        counters.chunk(1, Duration::from_millis(30), None);
        let before = counters.read();
        counters.sent();
        counters.sent();
        counters.chunk(1, Duration::from_millis(10), None);
        counters.chunk(
            3,
            Duration::from_millis(40),
            Some(Duration::from_millis(30)),
        );
        counters.ended(true);
        assert_eq!(
            counters.read().line(&before, 2.0),
            "0.5 req/s  2 tok/s  TTFT 10.0 ms  ITL 10.0 ms  in flight 2  errors 1"
        );
    }

    #[test]
    fn a_request_that_ends_while_counters_are_read_is_not_in_flight() {
        let reading = Reading {
            sent: 1,
            ended: 2,
            ..Reading::default()
        };
        let line = reading.line(&Reading::default(), 1.0);
        assert!(line.contains("in flight 0"), "{line}");
    }

    #[test]
    fn chunks_that_nobody_counts_are_not_called_tokens() {
        let counters = Counters::default();
        counters.chunk(0, Duration::from_millis(1), None);
        let line = counters.read().line(&Reading::default(), 0.5);
        assert!(
            line.contains("2 chunks/s") && line.contains("ITL -"),
            "{line}"
        );
    }
}
