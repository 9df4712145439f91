//! The workloads and arrivals of `tasuki bench serve` as a source of simulated requests.

use std::collections::{HashMap, VecDeque};
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
    under_way: UnderWay,
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
            under_way: UnderWay::default(),
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

    /// Lets conversations be under way when the run begins, as many as there would be after a long
    /// time: users think before each turn but the first. So a run that is shorter than a
    /// conversation has the load of a long one. `rate`: conversations a second; `over_s`: of the
    /// run.
    pub fn under_way(mut self, rate: f64, turns: u32, think_time_s: f64, over_s: f64) -> Self {
        let thinking = rate * think_time_s;
        // Of those who think, so many have done so by the end of the run.
        let done = 1.0 - (-over_s / think_time_s).exp();
        for number in 0..(thinking * done).round() as u64 {
            for turn in 1..turns {
                let chance = mix(mix(number) ^ u64::from(turn)) as f64 / u64::MAX as f64;
                let due_s = -think_time_s * (1.0 - chance * done).ln();
                self.begin_before(turn, Time::from_s(due_s));
            }
        }
        self.under_way
            .due
            .make_contiguous()
            .sort_by_key(|request| request.due);
        // Workers hold those that say nothing during the run for as long as the others.
        let all = (thinking * f64::from(turns)).round() as usize;
        self.under_way.others = all.saturating_sub(self.under_way.held.len());
        self
    }

    /// A conversation whose `turn`-th turn, from 0, is due then.
    fn begin_before(&mut self, turn: u32, due: Time) {
        let Some(mut planned) = self.workload.next() else {
            return;
        };
        let mut said = 0;
        for _ in 0..turn {
            let answer = " ".repeat(planned.output_tokens as usize);
            said = planned.input_tokens.unwrap_or(0) + planned.output_tokens;
            match self.workload.answered(planned.index, &answer) {
                Some((_, next)) => planned = next,
                None => return,
            }
        }
        if let Some(request) = self.request(&planned, due) {
            let known = (said / CHUNK_TOKENS) as usize;
            let known = &request.chunks[..known.min(request.chunks.len())];
            self.under_way.held.push(known.into());
            self.under_way.due.push_back(request);
        }
    }

    /// The next request that follows no other one.
    fn fresh(&mut self) -> Option<Request> {
        let planned = self.workload.next()?;
        let drawn = self.schedule.due(&planned).unwrap_or_default();
        self.request(&planned, Time::ZERO.plus(self.even(drawn)))
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
        if self.under_way.due.is_empty() {
            return self.under_way.fresh.take().or_else(|| self.fresh());
        }
        let fresh = self.under_way.fresh.take().or_else(|| self.fresh());
        self.under_way.before(fresh)
    }

    fn held(&mut self, most: usize) -> Vec<Arc<[u64]>> {
        self.under_way.held(most)
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

/// Conversations that began before the run.
#[derive(Default)]
struct UnderWay {
    /// Their next turns, by time.
    due: VecDeque<Request>,
    /// What workers hold of them.
    held: Vec<Arc<[u64]>>,
    /// Conversations that say nothing during the run.
    others: usize,
    /// A request of a new one that comes after the first of `due`.
    fresh: Option<Request>,
}

impl UnderWay {
    /// The next request: the first of `due`, or `fresh` if that comes before it.
    fn before(&mut self, fresh: Option<Request>) -> Option<Request> {
        let first = self.due.front()?;
        match fresh {
            Some(fresh) if fresh.due < first.due => Some(fresh),
            later => {
                self.fresh = later;
                self.due.pop_front()
            }
        }
    }

    /// What workers with room for so many chunks hold: of all conversations the same share.
    fn held(&self, most: usize) -> Vec<Arc<[u64]>> {
        let sent = self.held.len();
        let chunks: usize = self.held.iter().map(|names| names.len()).sum();
        if chunks == 0 {
            return Vec::new();
        }
        let (each, all) = (chunks.div_ceil(sent), sent + self.others);
        let share = (most as f64 / (each * all) as f64).min(1.0);
        let (mut held, mut others) = (Vec::new(), 0usize);
        for (at, names) in (1..).zip(&self.held) {
            let by = |at: usize, of: usize| (share * at as f64 * of as f64 / sent as f64) as usize;
            if by(at, sent) > by(at - 1, sent) {
                held.push(Arc::clone(names));
            }
            while others < by(at, self.others) {
                others += 1;
                let name = |chunk| mix(mix(!(others as u64)) ^ chunk);
                held.push((0..each as u64).map(name).collect());
            }
        }
        held
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
