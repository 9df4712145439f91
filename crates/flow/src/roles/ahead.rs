//! What is expected within the horizon: the load now, as long as it lasts, and then what came before
//! it, until roles follow that. From then on all topologies are worth the same.

use super::demand::Lengths;
use super::outlook::{Task, Topology};

/// Seconds until a load that comes back is known by its arrivals (`arrivals.rs`: within 2), and
/// followed.
const FOLLOWED_AFTER_S: f64 = 2.5;

/// Loads, each with its share of the horizon. The first one is the load now.
#[derive(Debug, Clone)]
pub struct Ahead {
    now: Task,
    now_share: f64,
    later: Vec<(f64, Task)>,
}

impl Ahead {
    /// The load stays as it is for the whole horizon.
    pub fn steady(now: Task) -> Self {
        Self {
            now,
            now_share: 1.0,
            later: Vec::new(),
        }
    }

    /// The load lasts for so many seconds. Then `later` comes, in these shares, which add up to 1,
    /// until roles follow it.
    pub fn changing(now: Task, rest_s: f64, later: Vec<(f64, Task)>) -> Self {
        let now_share = (rest_s / now.horizon_s).min(1.0);
        if now_share == 1.0 || later.is_empty() {
            return Self::steady(now);
        }
        let later_share = (1.0 - now_share).min(FOLLOWED_AFTER_S / now.horizon_s);
        let later = later.into_iter();
        let later = later.map(|(share, task)| (share * later_share, task));
        Self {
            now,
            now_share,
            later: later.collect(),
        }
    }

    /// What is to be served now.
    pub fn now(&self) -> &Task {
        &self.now
    }

    /// Seconds of requests over the horizon.
    pub fn cost_s(&self, topology: Topology) -> f64 {
        let later = self.later.iter();
        let later = later.map(|(share, task)| share * task.outlook(topology).cost_s);
        self.now_cost_s(topology) + later.sum::<f64>()
    }

    /// Of these, those of the load now.
    pub fn now_cost_s(&self, topology: Topology) -> f64 {
        self.now_share * self.now.outlook(topology).cost_s
    }

    /// The same with other lengths: by the standard errors of each load. `prompts`, `outputs`:
    /// 1 for longer ones, -1 for shorter ones. `output_error`: the error of the outputs that counts.
    pub fn tilted(
        &self,
        [prompts, outputs]: [i32; 2],
        output_error: impl Fn(&Lengths) -> f64,
    ) -> Self {
        let tilted = |task: &Task| {
            let lengths = &task.lengths;
            task.tilted(
                (1.0 + lengths.prompt_error).powi(prompts),
                (1.0 + output_error(lengths)).powi(outputs),
            )
        };
        Self {
            now: tilted(&self.now),
            now_share: self.now_share,
            later: self
                .later
                .iter()
                .map(|(share, task)| (*share, tilted(task)))
                .collect(),
        }
    }
}
