//! How one of several workers of the right role is chosen.

use tasuki_core::{RequestView, WorkerId, mix};

use crate::placement::able::Able;
use crate::placement::index::Member;
use crate::placement::pairs::Tie;

/// A rule by which a worker is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// One after another.
    RoundRobin,
    /// The one with the fewest requests.
    LeastLoaded,
    /// Of two that are drawn, the one with fewer requests.
    PowerOfTwo,
    /// The same worker for the requests of a tenant: see [`RequestView::session`].
    ConsistentHash,
    /// The same worker for prompts that begin alike: see [`RequestView::prefix`].
    PrefixHash,
}

/// A worker that is chosen by its key has at most so many times the mean of all requests.
const MOST_OF_MEAN: f64 = 1.25;

/// What of a request a worker is chosen for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Half {
    Prefill,
    Decode,
}

/// A worker that takes the request, and its group.
type Candidate<'a> = (&'a Able<'a>, &'a Member);

/// Chooses one of the workers, in whatever order they are given.
pub fn pick<'a>(
    rule: Rule,
    mut workers: Vec<Candidate<'a>>,
    half: Half,
    request: &RequestView,
    tie: u64,
) -> Option<Candidate<'a>> {
    if workers.is_empty() {
        return None;
    }
    // The two halves of a request are chosen apart from each other.
    let drawn = Tie::new(mix(tie) ^ half as u64);
    let order = |(_, member): &Candidate<'a>| drawn.order(member.id);
    let fewest = |(_, member): &Candidate<'a>| (member.requests, drawn.order(member.id));
    match rule {
        Rule::RoundRobin => {
            let turn = (tie % workers.len() as u64) as usize;
            let (_, chosen, _) = workers.select_nth_unstable_by_key(turn, |(_, one)| one.id);
            Some(*chosen)
        }
        Rule::LeastLoaded => workers.into_iter().min_by_key(fewest),
        Rule::PowerOfTwo => {
            if workers.len() > 2 {
                workers.select_nth_unstable_by_key(1, order);
                workers.truncate(2);
            }
            workers.into_iter().min_by_key(fewest)
        }
        Rule::ConsistentHash => by_key(workers, request.session, half),
        Rule::PrefixHash => by_key(workers, request.prefix, half),
    }
}

/// The worker of a key: the first of the key's own order of all workers that has not more than
/// its share of requests. So a worker that joins or leaves moves its own keys and no others.
fn by_key(workers: Vec<Candidate<'_>>, key: u64, half: Half) -> Option<Candidate<'_>> {
    let all: u64 = workers.iter().map(|(_, one)| u64::from(one.requests)).sum();
    let mean = (all + 1) as f64 / workers.len() as f64;
    let most = (MOST_OF_MEAN * mean).ceil();
    let key = mix(key ^ half as u64);
    let order = |id: WorkerId| mix(mix(u64::from(id.0)) ^ key);
    let with_room = workers.into_iter();
    with_room
        .filter(|(_, one)| f64::from(one.requests) < most)
        .min_by_key(|(_, one)| order(one.id))
}
