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

#[test]
fn what_prompts_share_does_not_depend_on_the_size_of_blocks() {
    let cached = |block_size: u32| {
        let mut config = config(&[Role::Prefill, Role::Decode]);
        for worker in &mut config.workers {
            worker.limits.block_size = block_size;
        }
        config.prefix_index = true;
        // Eight chunks of 128 tokens are alike.
        let mut requests = (0..20).map(|index| Request {
            chunks: (0..11)
                .map(|c| if c < 8 { c } else { 100 * index as u64 + c })
                .collect(),
            ..Request::new(index, Time::from_s(index as f64), 1_500, 20)
        });
        let run = simulate(config, &mut requests);
        let cached: Vec<u32> = run.outcomes.iter().map(|o| o.cached_tokens).collect();
        assert_eq!(cached[0], 0);
        assert!(
            cached[1..].iter().all(|tokens| *tokens == cached[1]),
            "{cached:?}"
        );
        cached[1]
    };
    for (block_size, tokens) in [
        (16, 1_024),
        (48, 1_008),
        (128, 1_024),
        (256, 1_024),
        (640, 640),
    ] {
        assert_eq!(cached(block_size), tokens, "{block_size}");
    }
}
