//! How long the run of one rate is, and whether it shows a queue that would grow in a longer one.
//!
//! A rate above what a design serves adds to a queue all the time. In a short run the queue stays
//! within the TTFT objective, so all requests meet it. A run of [`RUN_OF_TTFT`] times the objective
//! shows rates that are far too high. The growth of its queue says what a longer one would see.

use tasuki_sim::{Outcome, Run, Time};

use super::planner::Planner;

/// A run takes so many times the TTFT objective, and so many times the longest request that meets
/// the objectives, if that is not too many requests.
const RUN_OF_TTFT: f64 = 20.0;
const RUN_OF_E2E: f64 = 3.0;
const MOST_TIMES: u32 = 4;
/// A run that takes less than this share of the longest request says nothing: all requests could
/// be served together within the objectives, at whatever rate they come.
const LEAST_OF_E2E: f64 = 0.8;
/// A run that takes less than so many times the TTFT objective says nothing about a queue.
const LEAST_OF_TTFT: f64 = 2.0;
/// The same of `--quick`.
const QUICK_RUN_OF_TTFT: f64 = 8.0;
const QUICK_RUN_OF_E2E: f64 = 1.0;
const QUICK_REQUESTS: (u32, u32) = (200, 1_500);
/// Requests of a run that shows a rate, at most: some seconds of computing.
const MOST_SEEN: u32 = 100_000;
const QUICK_MOST_SEEN: u32 = 10_000;
/// In a shorter run the first answers have hardly ended in its second quarter.
const ANSWERED_OF_E2E: f64 = 2.5;
/// Of the requests that come, so many more in flight are what a design serves at its limit.
const GROWTH: f64 = 0.03;
/// So many standard deviations of the number of requests in flight count as chance.
const CHANCE: f64 = 1.0;

impl Planner<'_> {
    /// Requests of a run that judges a rate: as many as were asked for or are enough, and no more
    /// than the file has.
    pub(super) fn requests(&self, rate: f64) -> u32 {
        self.requests_of(rate, self.run_s(), self.fewest_and_most())
    }

    /// Requests of a run that shows what a rate above the highest one brings.
    pub(super) fn requests_to_see(&self, rate: f64) -> u32 {
        let run_s = self.run_s().max(RUN_OF_TTFT * self.longest_s().0);
        let (fewest, most) = self.fewest_and_most();
        let most_seen = match self.goal.quick {
            true => QUICK_MOST_SEEN,
            false => MOST_SEEN,
        };
        self.requests_of(rate, run_s, (fewest, most.max(most_seen)))
    }

    fn requests_of(&self, rate: f64, run_s: f64, (fewest, most): (u32, u32)) -> u32 {
        let wanted = self.workload.num_requests;
        let wanted = wanted.unwrap_or_else(|| ((rate * run_s) as u32).clamp(fewest, most));
        wanted.min(self.file_requests.unwrap_or(u32::MAX))
    }

    fn run_s(&self) -> f64 {
        let (ttft_s, e2e_s) = self.longest_s();
        let (of_ttft, of_e2e) = match self.goal.quick {
            true => (QUICK_RUN_OF_TTFT, QUICK_RUN_OF_E2E),
            false => (RUN_OF_TTFT, RUN_OF_E2E),
        };
        (of_ttft * ttft_s).max(of_e2e * e2e_s)
    }

    fn fewest_and_most(&self) -> (u32, u32) {
        let fewest = self.goal.probe_requests;
        match self.goal.quick {
            true => QUICK_REQUESTS,
            false => (fewest, MOST_TIMES * fewest),
        }
    }

    /// What the shortest run takes that says something.
    fn least_s(&self) -> f64 {
        let (ttft_s, e2e_s) = self.longest_s();
        (LEAST_OF_TTFT * ttft_s).max(LEAST_OF_E2E * e2e_s)
    }

    pub(super) fn is_too_short(&self, rate: f64) -> bool {
        f64::from(self.requests(rate)) < rate * self.least_s()
    }

    /// Whether a longer run would miss the objectives: between its second and its last quarter more
    /// and more requests waited for their second token or decoded, by more than a small share of
    /// those that came meanwhile.
    pub(super) fn is_outgrown(&self, run: &Run) -> bool {
        let over_s = self.arrivals_s(run);
        let (ttft_s, e2e_s) = self.longest_s();
        // The load of a log may grow by itself.
        if self.log.is_some() && over_s >= RUN_OF_TTFT * ttft_s {
            return false;
        }
        let came = |from: f64| {
            let quarter = from * over_s..=(from + 0.25) * over_s;
            let all = run.outcomes.iter();
            all.filter(|o| quarter.contains(&o.due.as_s())).count() as f64
        };
        let grows = |left: fn(&Outcome) -> Time, from: f64| {
            let in_flight = |from: f64| {
                let (from_s, until_s) = (from * over_s, (from + 0.25) * over_s);
                in_flight(&run.outcomes, left, from_s, until_s)
            };
            // Where more requests come, more are in flight.
            let load = match self.log {
                Some(_) => (came(0.75) / came(from).max(1.0)).max(1.0),
                None => 1.0,
            };
            let (before, after) = (load * in_flight(from), in_flight(0.75));
            let between = (0.75 - from) * run.outcomes.len() as f64;
            after - before > GROWTH * between + CHANCE * before.max(1.0).sqrt()
        };
        // Before its second token, a request may wait for a decode worker.
        grows(|outcome| outcome.second.unwrap_or(outcome.end), 0.25)
            || (over_s >= ANSWERED_OF_E2E * e2e_s && grows(|outcome| outcome.end, 0.5))
    }

    /// When the last request came that follows no other one.
    fn arrivals_s(&self, run: &Run) -> f64 {
        let turns = self.conversations.turns as usize;
        let first = run.outcomes.iter().filter(|o| o.index % turns == 0);
        first.map(|o| o.due.as_s()).fold(0.0, f64::max)
    }

    /// The requests that count: those of the second half, as the first ones find idle workers. After
    /// the last conversation has begun the load is less than the rate. A log counts whole, its load
    /// changes.
    pub(super) fn counted<'a>(&self, run: &'a Run) -> Vec<&'a Outcome> {
        let until_s = self.arrivals_s(run);
        let from_s = match self.log {
            Some(_) => 0.0,
            None => 0.5 * until_s,
        };
        let counts = |outcome: &&Outcome| (from_s..=until_s).contains(&outcome.due.as_s());
        run.outcomes.iter().filter(counts).collect()
    }

    /// The rate, or the highest one at which as many requests as there are take long enough. Where
    /// there is no end of them, one from which the search comes down to such rates.
    pub(super) fn long_enough(&self, rate: f64) -> f64 {
        let limits = [self.workload.num_requests, self.file_requests];
        let given = limits.into_iter().flatten().min();
        let times = if given.is_some() { 0.99 } else { 100.0 };
        let most = given.unwrap_or(self.fewest_and_most().1);
        rate.min(times * f64::from(most) / self.least_s())
    }

    /// What makes a run of this rate longer.
    pub(super) fn lengthen(&self, rate: f64) -> &'static str {
        match (self.workload.num_requests, self.file_requests) {
            (_, Some(most)) if self.requests(rate) == most => {
                "higher rates need longer runs: give a trace with more requests"
            }
            (Some(_), _) => "higher rates need longer runs: raise --num-requests",
            (None, _) if self.goal.quick => "higher rates need longer runs: leave out --quick",
            (None, _) => "higher rates need longer runs: raise --probe-requests",
        }
    }

    /// Seconds to the first and to the last token of a request that just meets the objectives, or of
    /// all turns of a conversation: those of the question, so that runs of variations are as long.
    /// How long users think does not count: they think when a run begins as later.
    pub(super) fn longest_s(&self) -> (f64, f64) {
        let ttft_s = self.goal.slo.ttft_s.unwrap_or(self.limits.ttft_s);
        let tpot_s = self.goal.slo.tpot_s.unwrap_or(self.limits.tpot_s);
        let each_s = ttft_s + tpot_s * self.lengths.output;
        (ttft_s, self.conversations.turns * each_s)
    }
}

/// Requests that came and have not left yet, between `from_s` and `until_s`, in the mean.
fn in_flight(outcomes: &[Outcome], left: fn(&Outcome) -> Time, from_s: f64, until_s: f64) -> f64 {
    let stays = outcomes.iter().map(|outcome| {
        let end_s = left(outcome).as_s().min(until_s);
        (end_s - outcome.due.as_s().max(from_s)).max(0.0)
    });
    stays.sum::<f64>() / (until_s - from_s).max(1e-9)
}
