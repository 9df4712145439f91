//! When a request that waits is refused, and what its refusal says.

use super::*;
use crate::FleetState;
use crate::fleet::LoadReport;
use crate::testing::info;
use tasuki_policy::PolicyConfig;

/// A worker whose prompts take so many seconds before a request's own.
fn busy_for(seconds: f64) -> FleetState {
    let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
    let mut info = info("a");
    info.num_blocks = 100_000;
    let id = fleet.add();
    let key = fleet.join(id, info, Duration::ZERO).expect("it joins");
    let mut waits = |tokens: f64| {
        let load = LoadReport {
            running_requests: 1,
            waiting_prefill_tokens: tokens as u64,
            free_blocks: 90_000,
            ..LoadReport::default()
        };
        fleet.on_report(key, Some(&load), Duration::ZERO);
        fleet.recount(key);
        let forecast = fleet.forecast(&RequestView::new(100, 10));
        forecast.expect("a worker").wait_s
    };
    let (one, two) = (waits(1e6), waits(2e6));
    let found = waits(1e6 + (seconds - one) / (two - one) * 1e6);
    assert!((found - seconds).abs() < 0.01, "{found} of {seconds}");
    fleet
}

fn with_prompt(tenant: &str, prompt_tokens: u32) -> Entrant {
    entrant(tenant, RequestView::new(prompt_tokens, 10))
}

#[test]
fn a_request_that_waits_is_refused_once_its_own_prompt_alone_is_too_late() {
    let config = AdmissionConfig {
        ttft: Some(Duration::from_secs(8)),
        ..AdmissionConfig::default()
    };
    let fleet = busy_for(2.0);
    let mut admission = Admission::new(config);
    let id = admission.enter(with_prompt("a", 100), &fleet);
    assert_eq!(admission.settle(Duration::ZERO, &fleet), []);
    let before = Entrant {
        priority: -1,
        arrived: Duration::from_millis(6_400),
        ..with_prompt("a", 100)
    };
    admission.enter(before, &fleet);
    assert_eq!(admission.settle(Duration::from_millis(6_500), &fleet), []);
    let verdicts = admission.settle(Duration::from_millis(7_300), &fleet); // 0.9 of 8 s
    assert!(
        matches!(verdicts[..], [(refused, Verdict::Refused(_))] if refused == id),
        "{verdicts:?}"
    );
}

#[test]
fn a_quarter_of_the_objective_may_be_before_a_prompt_in_a_worker() {
    let config = AdmissionConfig {
        ttft: Some(Duration::from_secs(1)),
        ..AdmissionConfig::default()
    };
    for (wait_s, lets_in) in [(0.2, 1), (0.3, 0)] {
        let fleet = busy_for(wait_s);
        let mut admission = Admission::new(config);
        admission.enter(with_prompt("a", 100), &fleet);
        let verdicts = admission.settle(Duration::ZERO, &fleet);
        assert_eq!(verdicts.len(), lets_in, "{wait_s}: {verdicts:?}");
    }
}

#[test]
fn a_refusal_says_whose_work_is_before_it_and_when_to_come_back() {
    let config = AdmissionConfig {
        max_sequences: 50,
        max_tokens: u64::MAX,
        ..AdmissionConfig::default()
    };
    for (other, over_share) in [("a", false), ("b", true)] {
        let (world, _) = crowded(config);
        let mut admission = Admission::new(config);
        let mut enter = |tenant| admission.enter(with_prompt(tenant, 90_000), &world.fleet);
        enter(other);
        for _ in 0..49 {
            enter("a");
        }
        let last = enter("a");
        let verdicts = admission.settle(Duration::ZERO, &world.fleet);
        let [(refused, Verdict::Refused(refusal))] = verdicts[..] else {
            panic!("{verdicts:?}");
        };
        assert_eq!((refused, refusal.ahead), (last, 50));
        assert_eq!(refusal.over_share, over_share, "beside {other}");
        assert_eq!(refusal.retry_after, LATEST_RETRY);
    }
}
