//! Whole deployments.

mod clients;
mod roles;

use std::sync::Arc;

use tasuki_core::{Rates, Role};
use tasuki_policy::PolicyConfig;

use super::{ShellEvent, World, simulate};
use crate::client::{Clients, Request};
use crate::config::{Config, Fault, FaultKind};
use crate::link::{LinkSpec, NetworkSpec};
use crate::steps::StepModel;
use crate::time::Time;
use crate::worker::{Limits, WorkerConfig};
use crate::{Outcome, Run};

fn rates() -> Rates {
    Rates {
        step_s: 0.01,
        sequence_s: 1e-4,
        kv_token_s: 1e-7,
        prompt_step_s: 0.01,
        prompt_token_s: 1e-4,
        prompt_square_s: 0.0,
    }
}

fn config(roles: &[Role]) -> Config {
    let workers = roles.iter().map(|&role| WorkerConfig {
        role,
        host: 0,
        class: "test".into(),
        steps: Arc::new(StepModel::Rates(rates())),
        limits: Limits {
            launch_s: 0.0,
            receive_s: 0.0,
            lead_s: 0.0,
            lead_of_prompts: 0.0,
            itl_target_s: None,
            ..Limits::gpu(2_000, 4_096)
        },
    });
    let link = LinkSpec {
        bytes_per_s: 1e9,
        latency_s: 0.0,
    };
    Config {
        workers: workers.collect(),
        policy: PolicyConfig {
            strict_roles: roles.contains(&Role::Prefill),
            ..PolicyConfig::default()
        },
        network: NetworkSpec {
            within_host: link,
            between_hosts: link,
        },
        kv_bytes_per_token: 1e5,
        token_times: true,
        ..Config::default()
    }
}

/// A request of 500:20 tokens every `gap_s`.
fn steady(requests: usize, gap_s: f64) -> impl Iterator<Item = Request> {
    (0..requests).map(move |i| Request::new(i, Time::from_s(gap_s * i as f64), 500, 20))
}

fn all_answered(run: &Run, requests: usize) {
    assert_eq!(run.outcomes.len(), requests);
    for outcome in &run.outcomes {
        assert_eq!(outcome.failure, None, "{outcome:?}");
        assert_eq!(outcome.output_tokens, 20, "{outcome:?}");
    }
}

fn ms(at: Option<Time>) -> f64 {
    1e3 * at.map_or(f64::NAN, Time::as_s)
}

#[test]
fn a_request_on_an_idle_worker_takes_what_its_steps_take() {
    let run = simulate(config(&[Role::Mixed]), &mut steady(1, 1.0));
    all_answered(&run, 1);
    let outcome = &run.outcomes[0];
    assert!((ms(outcome.first) - 60.0).abs() < 0.01, "{outcome:?}");
    // 10 ms, a sequence's 0.1 ms and 501 tokens of KV.
    assert!((ms(outcome.second) - ms(outcome.first) - 10.15).abs() < 0.01);
    assert_eq!(outcome.token_times.len(), 20);
    assert_eq!(outcome.token_times[0], outcome.first.unwrap());
    assert!(outcome.token_times[19].s_since(outcome.end) < 1e-6);
    assert!(outcome.token_times.is_sorted());
}

#[test]
fn a_split_request_gets_its_first_token_before_its_kv_has_moved() {
    let run = simulate(config(&[Role::Prefill, Role::Decode]), &mut steady(1, 1.0));
    all_answered(&run, 1);
    let outcome = &run.outcomes[0];
    assert!(outcome.is_split());
    assert!((ms(outcome.first) - 60.0).abs() < 0.01, "{outcome:?}");
    // 500 tokens of 0.1 MB over 1 GB/s, and then the decode worker's first step.
    assert!((1e3 * outcome.exposed_s - 50.0).abs() < 0.1, "{outcome:?}");
    let second_ms = ms(outcome.second) - ms(outcome.first);
    assert!((second_ms - 50.0 - 10.15).abs() < 0.1, "{second_ms}");
    assert_eq!(run.moved_bytes, 5e7);
}

#[test]
fn the_kv_of_early_chunks_moves_while_later_ones_are_computed() {
    let mut config = config(&[Role::Prefill, Role::Decode]);
    for worker in &mut config.workers {
        worker.limits.max_batched_tokens = 128;
    }
    let run = simulate(config, &mut steady(1, 1.0));
    let outcome = &run.outcomes[0];
    // 128 tokens take 22.8 ms to compute and 12.8 ms to move: the last chunk's 116 are left.
    assert!((1e3 * outcome.exposed_s - 11.6).abs() < 0.3, "{outcome:?}");
    assert!(outcome.transfer_s > 0.04);
}

#[test]
fn prompts_that_come_together_are_computed_on_both_sides_of_a_split() {
    let mut config = config(&[Role::Prefill, Role::Decode]);
    config.policy.strict_roles = false;
    let run = simulate(config, &mut steady(20, 0.0));
    all_answered(&run, 20);
    // The decode worker has nothing else to do: a prompt there stalls no one.
    let there = run.outcomes.iter().filter(|o| o.prefill == 1).count();
    assert!(there >= 6, "{there} of 20");
}

#[test]
fn the_same_run_is_the_same_again() {
    let roles = [Role::Mixed, Role::Mixed, Role::Prefill, Role::Decode];
    let run = || simulate(config(&roles), &mut steady(200, 0.02)).outcomes;
    assert_eq!(run(), run());
}

#[test]
fn long_flights_and_single_steps_are_the_same_run() {
    let many = simulate(config(&[Role::Mixed; 2]), &mut steady(60, 0.05));
    // A request that comes every millisecond and asks for nothing cuts every flight short.
    let mut cut = config(&[Role::Mixed; 2]);
    cut.faults = (0..4_000)
        .map(|ms| Fault {
            at: Time::from_s(1e-3 * f64::from(ms)),
            worker: 0,
            kind: FaultKind::Slow { factor: 1.0 },
        })
        .collect();
    let single = simulate(cut, &mut steady(60, 0.05));
    assert_eq!(many.outcomes, single.outcomes);
}

#[test]
fn a_full_fleet_queues_and_loses_nothing() {
    let run = simulate(config(&[Role::Mixed]), &mut steady(150, 0.01));
    all_answered(&run, 150);
    let slowest = run
        .outcomes
        .iter()
        .filter_map(Outcome::ttft_s)
        .fold(0.0, f64::max);
    assert!(slowest > 1.0, "{slowest}");
}

#[test]
fn with_an_objective_what_would_be_late_is_refused() {
    let mut config = config(&[Role::Mixed]);
    config.admission.ttft = Some(std::time::Duration::from_millis(500));
    let run = simulate(config, &mut steady(300, 0.01));
    let refused = run
        .outcomes
        .iter()
        .filter(|outcome| outcome.failure.is_some())
        .count();
    assert!((50..290).contains(&refused), "{refused}");
    let served = run
        .outcomes
        .iter()
        .filter(|outcome| outcome.failure.is_none());
    let late = served
        .filter_map(Outcome::ttft_s)
        .filter(|ttft_s| *ttft_s > 0.6)
        .count();
    assert!(late < 5, "{late}");
}

#[test]
fn a_prompt_longer_than_the_objective_is_served_by_an_idle_worker_alone() {
    let mut config = config(&[Role::Mixed]);
    config.warm_router = true;
    config.admission.ttft = Some(std::time::Duration::from_millis(200));
    // Each takes 0.4 s; the second one comes while the first one is computed.
    let mut two = (0..2).map(|index| {
        let at = Time::from_s(0.1 * index as f64);
        Request::new(index, at, 3_900, 4)
    });
    let run = simulate(config, &mut two);
    let refused = run.outcomes.iter().filter(|o| o.failure.is_some());
    assert_eq!(refused.map(|o| o.index).collect::<Vec<_>>(), [1]);
}

#[test]
fn requests_survive_a_crash_of_any_worker() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    for worker in 0..4 {
        let mut config = config(&roles);
        config.faults = vec![Fault {
            at: Time::from_s(1.013),
            worker,
            kind: FaultKind::Crash { back_after_s: 2.0 },
        }];
        let run = simulate(config, &mut steady(120, 0.03));
        all_answered(&run, 120);
        let retried = run
            .outcomes
            .iter()
            .filter(|outcome| outcome.retries > 0)
            .count();
        assert!(retried > 0, "worker {worker} had nothing to lose");
        for outcome in &run.outcomes {
            assert_eq!(outcome.token_times.len(), 20, "{outcome:?}");
        }
    }
}

#[test]
fn a_slow_worker_gets_less_and_a_drained_one_nothing() {
    let share = |kind| {
        let mut config = config(&[Role::Mixed, Role::Mixed]);
        config.faults = vec![Fault {
            at: Time::ZERO,
            worker: 0,
            kind,
        }];
        let run = simulate(config, &mut steady(200, 0.04));
        all_answered(&run, 200);
        run.outcomes
            .iter()
            .filter(|outcome| outcome.decode == 0)
            .count()
    };
    assert_eq!(share(FaultKind::Drain), 0);
    let slow = share(FaultKind::Slow { factor: 4.0 });
    assert!((1..80).contains(&slow), "{slow}");
}

#[test]
fn prompts_that_begin_alike_go_where_their_beginning_is() {
    let groups = (0..160).map(|index: usize| Request {
        chunks: (0..3)
            .map(|chunk| (index % 4 * 10 + chunk) as u64)
            .collect(),
        ..Request::new(index, Time::from_s(0.05 * index as f64), 500, 20)
    });
    let with = |index: bool| {
        let mut config = config(&[Role::Mixed; 4]);
        config.prefix_index = index;
        let run = simulate(config, &mut groups.clone());
        run.workers
            .iter()
            .map(|worker| worker.cached_tokens)
            .sum::<u64>()
    };
    // All but the first of each group.
    assert!(with(true) > 140 * 384, "{}", with(true));
    assert!(with(false) < with(true));
}

#[test]
fn a_closed_loop_never_has_more_than_its_users() {
    struct Users(usize);
    impl Clients for Users {
        fn next(&mut self) -> Option<Request> {
            (self.0 < 4).then(|| {
                self.0 += 1;
                Request::new(self.0 - 1, Time::ZERO, 500, 20)
            })
        }
        fn over(&mut self, _: usize, at: Time) -> Option<Request> {
            (self.0 < 40).then(|| {
                self.0 += 1;
                Request::new(self.0 - 1, at, 500, 20)
            })
        }
    }
    let run = simulate(config(&[Role::Mixed]), &mut Users(0));
    all_answered(&run, 40);
    let mut changes: Vec<(Time, i32)> = Vec::new();
    for outcome in &run.outcomes {
        changes.extend([(outcome.sent, 1), (outcome.end, -1)]);
    }
    changes.sort_unstable();
    let mut level = 0;
    for (_, change) in changes {
        level += change;
        assert!(level <= 4);
    }
}

#[test]
fn a_client_with_a_limit_sends_later_than_due() {
    let mut config = config(&[Role::Mixed]);
    config.max_in_flight = Some(1);
    let run = simulate(config, &mut steady(10, 0.01));
    all_answered(&run, 10);
    let last = run
        .outcomes
        .iter()
        .max_by_key(|outcome| outcome.index)
        .unwrap();
    assert!(last.sent.s_since(last.due) > 1.0);
}

#[test]
fn what_the_core_was_told_and_decided_is_kept() {
    let mut config = config(&[Role::Prefill, Role::Decode]);
    config.record = true;
    let run = simulate(config, &mut steady(3, 0.5));
    let decisions = run
        .record
        .iter()
        .filter(|event| event.is_decision())
        .count();
    assert_eq!(decisions, 6);
    let arrived = run
        .record
        .iter()
        .filter(|event| matches!(event, ShellEvent::Arrived { .. }));
    assert_eq!(arrived.count(), 3);
}

/// One user, who sends a request whenever the one before is over.
struct User {
    left: usize,
}

impl Clients for User {
    fn next(&mut self) -> Option<Request> {
        None
    }

    fn over(&mut self, index: usize, at: Time) -> Option<Request> {
        self.left = self.left.checked_sub(1)?;
        Some(Request::new(index + 1, at, 500, 20))
    }
}

#[test]
fn requests_that_were_sent_after_others_are_forgotten() {
    let mut user = User { left: 50 };
    let mut world = World::new(config(&[Role::Mixed]), &mut user);
    world.send(Request::new(0, Time::ZERO, 500, 20));
    world.run();
    // They are looked through at every event.
    assert_eq!(world.following.len(), 0);
    all_answered(&world.finish(), 51);
}

#[test]
fn what_was_served_before_the_run_is_held_where_it_is_needed() {
    struct Later(usize);
    impl Later {
        fn names(index: usize) -> Arc<[u64]> {
            (0..3).map(|chunk| (10 * index + chunk) as u64).collect()
        }
    }
    impl Clients for Later {
        fn next(&mut self) -> Option<Request> {
            self.0 += 1;
            let at = Time::from_s(0.2 * self.0 as f64);
            let request = Request::new(self.0 - 1, at, 500, 20);
            let chunks = Self::names(self.0 - 1);
            (self.0 <= 20).then_some(Request { chunks, ..request })
        }
        fn held(&mut self, most: usize) -> Vec<Arc<[u64]>> {
            // Of each group of workers.
            assert_eq!(most, 1_000);
            (0..20).map(Self::names).collect()
        }
    }
    let (prefill, decode, mixed) = (Role::Prefill, Role::Decode, Role::Mixed);
    for roles in [[mixed; 2], [prefill, decode], [prefill, mixed]] {
        let mut config = config(&roles);
        let half = if roles[1] == decode { 1 } else { 2 };
        for worker in &mut config.workers {
            worker.limits.num_blocks = 4_000 / half;
        }
        let run = simulate(config, &mut Later(0));
        all_answered(&run, 20);
        let cached = run.outcomes.iter().filter(|o| o.cached_tokens == 384);
        assert_eq!(cached.count(), 20, "{roles:?}");
    }
}
