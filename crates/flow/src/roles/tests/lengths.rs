//! Loads whose prompts differ much in length.

use tasuki_core::{Rates, RequestView, Role};
use tasuki_policy::PolicyConfig;

use super::{at, balancer, decide, look, of, task};
use crate::FleetState;
use crate::fleet::WorkerInfo;
use crate::roles::{Balancer, Look, Objectives, RolesConfig};
use crate::testing::info;

/// What a balancer with a TTFT objective sees of three prefill workers and a decode worker after
/// 20 s. Three requests a second come, whose prompts are these, one after another. Costs are the
/// default ones.
fn look_at_prompts(prompts: &[u32]) -> (Balancer, Look) {
    let mut fleet = FleetState::new(vec![Vec::new()], PolicyConfig::default());
    for engine in ["a", "b", "c", "d"] {
        let worker = fleet.add();
        let info = WorkerInfo {
            role: if engine == "d" {
                Role::Decode
            } else {
                Role::Prefill
            },
            ..info(engine)
        };
        fleet.join(worker, info, at(0.0)).expect("joined");
    }
    for (index, &prompt) in (0..60).zip(prompts.iter().cycle()) {
        fleet.on_arrival(&RequestView::new(prompt, 40), at(f64::from(index) / 3.0));
    }
    let mut balancer = balancer();
    balancer.config.objectives.ttft_s = Some(2.0);
    let look = balancer.look(&fleet, 0, at(20.0)).expect("a look");
    (balancer, look)
}

#[test]
fn what_is_late_whatever_the_roles_draws_no_workers() {
    let longest = 20_000;
    let objectives = RolesConfig::default().objectives;
    let in_reach = |ttft_s, cached| {
        let objectives = Objectives {
            ttft_s,
            ..objectives
        };
        objectives.in_reach(&Rates::default(), f64::from(longest), cached)
    };
    assert!(!in_reach(Some(2.0), 0.0) && in_reach(Some(2.0), 0.95) && in_reach(None, 0.0));

    let (mut balancer, mixture) = look_at_prompts(&[400, 400, 400, 400, longest]);
    let followed = mixture.ahead.now().lengths;
    assert!((followed.prompt_tokens - 400.0).abs() < 1e-6);
    assert!((2.2..2.6).contains(&followed.rate), "{followed:?}");
    // All of it must be served.
    let all = mixture.load.lengths;
    assert!((2.8..3.2).contains(&all.rate), "{all:?}");
    let (_, short) = look_at_prompts(&[400]);
    let workers = |look: &Look| look.wanted().topology.workers();
    assert!(workers(&mixture) > workers(&short));
    let orders = balancer.decide(&mixture, at(20.0));
    let said = orders.first().map(|order| order.reason.to_string());
    let said = said.expect("an order");
    assert!(said.contains("/s too long for the objective"), "{said}");

    // Where nothing else comes they are what roles follow.
    let (_, long) = look_at_prompts(&[longest]);
    assert_eq!(long.ahead.now().lengths, long.load.lengths);
    assert!((long.load.lengths.prompt_tokens - f64::from(longest)).abs() < 1e-6);
}

#[test]
fn prompts_of_many_lengths_need_more_prefill_workers() {
    let capacity = |scatter: f64, prefill| {
        let mut task = task(10.0, 12_000.0, 250.0);
        task.rates.prompt_square_s = 0.0;
        task.lengths.prompt_squares *= scatter;
        task.outlook(of(prefill, 8, 0)).capacity
    };
    assert!(capacity(3.0, 1) < 0.9 * capacity(1.0, 1));
    // Several workers share what waits.
    assert!(capacity(3.0, 4) > 4.2 * capacity(3.0, 1));
}

/// Placement gives each mixed worker as many of prompts that are alike, so at an H100's pace a
/// split of 5000:250 gains nothing.
#[test]
fn equal_prompts_beside_decodes_make_few_answers_late() {
    let mut w2 = task(14.5, 5_000.0, 250.0);
    w2.rates.step_s *= 1.3;
    w2.rates.prompt_step_s *= 1.3;
    w2.rates.sequence_s *= 1.3;
    w2.rates.kv_token_s *= 1.8;
    let decided = |scatter: f64| {
        let mut task = w2;
        task.lengths.prompt_squares *= scatter;
        task.rates.prompt_square_s /= scatter;
        decide(&look(task, &[(Role::Mixed, 10.0), (Role::Mixed, 10.0)]))
    };
    assert_eq!(decided(1.0), None);
    assert!(decided(3.0).is_some());
}

/// Two mixed workers serve more where KV reads are slow, and a queue gives equal prompts to them as
/// evenly as they are computed: a split is left.
#[test]
fn equal_prompts_from_a_queue_make_no_answers_late() {
    let mut w2 = task(13.0, 5_000.0, 250.0);
    w2.rates.step_s *= 1.2;
    w2.rates.prompt_step_s *= 1.2;
    w2.rates.sequence_s *= 1.2;
    w2.rates.kv_token_s *= 2.0;
    let outlook = |topology| w2.outlook(topology);
    assert!(outlook(of(0, 0, 2)).capacity > 1.05 * outlook(of(1, 1, 0)).capacity);
    let split = look(w2, &[(Role::Prefill, 0.0), (Role::Decode, 10.0)]);
    let order = decide(&split).expect("an order");
    assert_eq!(order.reason.target(), of(0, 0, 2));
}
