//! How many workers the load asks for: a signal for what starts and ends workers.

use super::outlook::{Bound, Task, Topology};
use super::search::best;

/// More workers are not asked for, in times those that are there.
const MOST_TIMES: u32 = 4;

/// The fewest workers that serve the load within the objectives, and why not fewer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Wanted {
    pub topology: Topology,
    /// What would limit one worker less.
    pub bound: Bound,
    /// Requests a second that must be served: those that come, and those that wait within the
    /// horizon; by the standard error of the measured load more.
    pub needed: f64,
}

impl Wanted {
    /// For the roles of `now`; where all workers are mixed, only those are asked for.
    pub(super) fn new(task: &Task, now: Topology) -> Self {
        let error = task
            .lengths
            .prompt_error
            .max(task.lengths.output_error)
            .min(0.25);
        let needed = (task.lengths.rate + task.queued / task.horizon_s) * (1.0 + error);
        let mut task = *task;
        task.lengths.rate = needed;
        task.queued = 0.0;
        let split = now.prefill + now.decode > 0;
        let shape = |workers: u32| {
            let mixed = Topology {
                mixed: workers,
                ..Topology::default()
            };
            if split {
                let cost_s = |topology| task.outlook(topology).cost_s;
                let topology = best(cost_s, mixed, Topology::default());
                (topology, task.outlook(topology))
            } else {
                (mixed, task.outlook(mixed))
            }
        };
        let most = now.workers().max(1) * MOST_TIMES;
        // Capacity grows with the number of workers.
        let (mut low, mut high) = (0, most);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if shape(middle).1.capacity >= needed {
                high = middle;
            } else {
                low = middle;
            }
        }
        let (topology, at) = shape(high);
        let fewer = if low > 0 { shape(low).1 } else { at };
        Self {
            topology,
            bound: fewer.bound,
            needed,
        }
    }
}
