//! Clients with a limit of requests in flight.

use super::*;

#[test]
fn requests_that_fail_at_once_make_way_for_all_that_wait() {
    let count = 20_000;
    let config = Config {
        max_in_flight: Some(1),
        // The first request is served to its end; no worker takes the others.
        faults: vec![Fault {
            at: Time::from_s(0.1),
            worker: 0,
            kind: FaultKind::Drain,
        }],
        ..config(&[Role::Mixed])
    };
    let run = simulate(
        config,
        &mut (0..count).map(|index| Request::new(index, Time::ZERO, 100, 100)),
    );
    let served = run.outcomes.iter().filter(|o| o.failure.is_none());
    assert_eq!((served.count(), run.outcomes.len()), (1, count));
    assert!(run.outcomes.is_sorted_by_key(|outcome| outcome.index));
}
