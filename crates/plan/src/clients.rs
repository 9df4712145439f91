//! The workloads and arrivals of `tasuki bench serve` as a source of simulated requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tasuki_bench::arrivals::{Arrival, Schedule};
use tasuki_bench::plan::{Planned, Prompt, Workload};
use tasuki_bench::tokens::Segment;
use tasuki_core::mix;
use tasuki_sim::{Clients, Request, Time};

/// Tokens of a chunk, as workers of 16 and of 32 tokens a block name them.
const CHUNK_TOKENS: u32 = 128;

/// See the module.
pub struct BenchClients {
    workload: Box<dyn Workload>,
    arrival: Arrival,
    schedule: Schedule,
    /// Users of a closed loop that have not begun.
    users: std::ops::Range<usize>,
    /// Nothing is due after this time.
    until: Time,
    /// Of the drawn times: those in the middle and at the end of the run, which takes so long.
    halves: Option<(f64, f64, f64)>,
    /// Output tokens of requests that others follow.
    asked: HashMap<usize, u32>,
    pub last_due: Time,
}

impl BenchClients {
    pub fn new(
        workload: Box<dyn Workload>,
        arrival: Arrival,
        seed: u64,
        duration_s: Option<f64>,
    ) -> Self {
        let users = if arrival.is_closed() {
            arrival.max_concurrency.unwrap_or(1)
        } else {
            0
        };
        Self {
            workload,
            schedule: Schedule::new(arrival, seed),
            users: 0..users,
            arrival,
            until: duration_s.map_or(Time::NEVER, Time::from_s),
            halves: None,
            asked: HashMap::new(),
            last_due: Time::ZERO,
        }
    }

    /// Lets so many independent requests come in `over_s`, half of them in either half: by chance
    /// a short run has some percent fewer, and so says too much of the rate.
    pub fn evenly(mut self, requests: u32, over_s: f64, seed: u64) -> Self {
        let mut drawn = Schedule::new(self.arrival, seed);
        let mut after = |gaps: u32| (0..gaps).filter_map(|_| drawn.gap_ends()).last();
        let (first, rest) = (requests / 2, requests - requests / 2);
        if let (Some(middle_s), Some(end_s)) = (after(first), after(rest)) {
            self.halves = Some((middle_s, end_s, over_s));
        }
        self
    }

    fn even(&self, drawn: Duration) -> Duration {
        let Some((middle_s, end_s, over_s)) = self.halves else {
            return drawn;
        };
        let drawn_s = drawn.as_secs_f64();
        let share = match drawn_s < middle_s {
            true => 0.5 * drawn_s / middle_s,
            false => 0.5 + 0.5 * (drawn_s - middle_s) / (end_s - middle_s),
        };
        Duration::from_secs_f64(share * over_s)
    }

    fn request(&mut self, planned: &Planned, due: Time) -> Option<Request> {
        if due >= self.until {
            return None;
        }
        self.last_due = self.last_due.max(due);
        self.asked.insert(planned.index, planned.output_tokens);
        let segments = match &planned.prompt {
            Prompt::Segments(segments) => segments.as_slice(),
            _ => &[],
        };
        let prompt_tokens = planned.input_tokens.unwrap_or(1).max(1);
        Some(Request {
            // A prompt that is all its own nobody shares, unless another turn follows.
            chunks: match segments.len() > 1 || self.workload.has_turns() {
                true => chunks(segments),
                false => Arc::default(),
            },
            ..Request::new(planned.index, due, prompt_tokens, planned.output_tokens)
        })
    }
}

impl Clients for BenchClients {
    fn next(&mut self) -> Option<Request> {
        if self.arrival.is_closed() {
            let due = self.arrival.user_start(self.users.next()?);
            let planned = self.workload.next()?;
            return self.request(&planned, Time::ZERO.plus(due));
        }
        let planned = self.workload.next()?;
        let drawn = self.schedule.due(&planned).unwrap_or_default();
        self.request(&planned, Time::ZERO.plus(self.even(drawn)))
    }

    fn over(&mut self, index: usize, at: Time) -> Option<Request> {
        let tokens = self.asked.remove(&index).unwrap_or_default();
        let answer = " ".repeat(tokens as usize);
        match self.workload.answered(index, &answer) {
            Some((thinking, planned)) => self.request(&planned, at.plus(thinking)),
            None if self.arrival.is_closed() && at < self.until => {
                let planned = self.workload.next()?;
                self.request(&planned, at)
            }
            None => None,
        }
    }
}

/// Names of the whole chunks of a prompt.
fn chunks(segments: &[Segment]) -> Arc<[u64]> {
    let (mut names, mut name, mut filled) = (Vec::new(), 0u64, 0);
    for segment in segments {
        let mut done = 0;
        while done < segment.tokens {
            let part = (CHUNK_TOKENS - filled).min(segment.tokens - done);
            // Content is that of the stream from there on.
            name = mix(name ^ mix(segment.stream ^ mix(u64::from(done))) ^ u64::from(part));
            filled += part;
            done += part;
            if filled == CHUNK_TOKENS {
                names.push(name);
                filled = 0;
            }
        }
    }
    names.into()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::SimulateArgs;

    fn sent(words: &str) -> BenchClients {
        let args = SimulateArgs::try_parse_from(words.split_whitespace()).unwrap();
        let workload = args.workload.plan_lengths().unwrap();
        let arrival = args.arrival.arrival(workload.has_times()).unwrap();
        BenchClients::new(workload.build().unwrap(), arrival, 0, None)
    }

    #[test]
    fn a_second_turn_begins_like_the_first_one() {
        let mut clients = sent("simulate --workload multi-turn --turns 2 --lengths 1000:50");
        let first = clients.next().unwrap();
        let second = clients.over(first.index, Time::ZERO).unwrap();
        assert_eq!(first.chunks.len(), 7);
        assert_eq!(second.chunks[..7], first.chunks[..]);
        // Nobody shares a prompt of one turn, so it needs no names.
        assert!(
            sent("simulate --lengths 1000:50")
                .next()
                .unwrap()
                .chunks
                .is_empty()
        );
    }

    fn segment(stream: u64, tokens: u32) -> Segment {
        Segment { stream, tokens }
    }

    #[test]
    fn prompts_share_the_names_of_what_they_begin_with_alike() {
        let one = chunks(&[segment(7, 300), segment(1, 100)]);
        let two = chunks(&[segment(7, 300), segment(2, 100)]);
        assert_eq!((one.len(), two.len()), (3, 3));
        assert_eq!(one[..2], two[..2]);
        assert_ne!(one[2], two[2]);
        // The same content behind another beginning is another prompt.
        let three = chunks(&[segment(3, 128), segment(7, 300)]);
        assert!(three.iter().all(|name| !one.contains(name)));
        // What follows a prompt begins with it.
        assert_eq!(chunks(&[segment(7, 300)])[..], one[..2]);
    }
}
