//! The topology that is worth changing to, and the first step there.

use super::outlook::{Outlook, Topology};

/// So many numbers of prefill workers, and of decode workers, are compared at most.
const GRID: u32 = 20;

/// Another topology that pays, and why.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Better {
    pub from: (Topology, Outlook),
    pub to: (Topology, Outlook),
    /// Seconds of requests over the horizon, also if the lengths are off by their error.
    pub gain_s: f64,
    /// The same that the change takes.
    pub change_s: f64,
}

/// The topology with the least cost in seconds, of as many workers. `kept`: so many of each role
/// stay.
pub fn best(cost_s: impl Fn(Topology) -> f64, now: Topology, kept: Topology) -> Topology {
    let workers = now.workers();
    let movable = workers - kept.workers();
    let mut best = (now, cost_s(now));
    let mut consider = |prefill: u32, decode: u32| {
        let topology = Topology {
            prefill: kept.prefill + prefill,
            decode: kept.decode + decode,
            mixed: kept.mixed + movable - prefill - decode,
        };
        if !topology.serves() {
            return best.0;
        }
        let cost_s = cost_s(topology);
        // Equal ones are no reason to change.
        if cost_s < best.1 * (1.0 - 1e-9) {
            best = (topology, cost_s);
        }
        best.0
    };
    let step = movable.div_ceil(GRID).max(1);
    for prefill in (0..=movable).step_by(step as usize) {
        for decode in (0..=movable - prefill).step_by(step as usize) {
            consider(prefill, decode);
        }
        consider(prefill, movable - prefill);
    }
    let mut found = consider(0, 0);
    let mut step = step / 2;
    while step > 0 {
        let (prefill, decode) = (found.prefill - kept.prefill, found.decode - kept.decode);
        for (prefill, decode) in around(prefill, decode, step) {
            if prefill + decode <= movable {
                found = consider(prefill, decode);
            }
        }
        step /= 2;
    }
    best.0
}

/// The points next to one.
fn around(prefill: u32, decode: u32, step: u32) -> impl Iterator<Item = (u32, u32)> {
    let near = move |value: u32| [value.saturating_sub(step), value, value + step];
    near(prefill)
        .into_iter()
        .flat_map(move |p| near(decode).map(|d| (p, d)))
}
