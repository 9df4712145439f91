//! Roles that follow a load.

use tasuki_flow::roles::RolesConfig;

use super::*;
use crate::roles::{Roles, Thresholds};

/// Long prompts with short answers for 40 s, short ones with long answers, and long ones again.
fn swinging() -> impl Iterator<Item = Request> {
    let long = (0..400).map(|i| (0.1 * i as f64, 3_000, 40));
    let short = (0..400).map(|i| (40.0 + 0.1 * i as f64, 100, 400));
    let again = (0..400).map(|i| (80.0 + 0.1 * i as f64, 3_000, 40));
    let all = long.chain(short).chain(again).enumerate();
    all.map(|(index, (due_s, prompt, output))| {
        Request::new(index, Time::from_s(due_s), prompt, output)
    })
}

#[test]
fn roles_follow_a_load_and_nothing_is_lost() {
    let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    let fixed = Config {
        warm_router: true,
        ..config(&roles)
    };
    let follow = Config {
        roles: Roles::Follow(RolesConfig::default()),
        ..fixed.clone()
    };
    let [fixed, follow] = [fixed, follow].map(|config| simulate(config, &mut swinging()));
    let (mut asked, mut total_s) = ([0; 2], [0.0; 2]);
    for (run, which) in [(&fixed, 0), (&follow, 1)] {
        for outcome in &run.outcomes {
            assert_eq!(outcome.failure, None, "{outcome:?}");
            assert_eq!(outcome.retries, 0, "{outcome:?}");
            asked[which] += outcome.output_tokens;
            total_s[which] += outcome.end.s_since(outcome.due);
        }
    }
    assert_eq!(asked, [400 * 40 + 400 * 400 + 400 * 40; 2]);
    assert!(fixed.role_changes.is_empty());
    let changes = follow.role_changes.len();
    assert!((2..40).contains(&changes), "{:?}", follow.role_changes);
    assert!(total_s[1] < 0.9 * total_s[0], "{total_s:?}");
    assert!(follow.role_changes[0].reason.contains("requests/s"));
}

#[test]
fn thresholds_split_long_prompts_and_move_workers_that_are_too_slow() {
    let roles = [Role::Prefill, Role::Decode, Role::Decode, Role::Decode];
    let config = Config {
        prompt_threshold: Some(1_000),
        roles: Roles::Thresholds(Thresholds {
            ttft_s: 0.5,
            itl_s: 0.1,
            low: 0.8,
            every_s: 5.0,
        }),
        ..config(&roles)
    };
    let run = simulate(config, &mut swinging());
    for outcome in &run.outcomes {
        assert_eq!(outcome.failure, None, "{outcome:?}");
        // One that its decode worker gives back for want of memory when a single token is
        // missing has nothing left to decode: it is computed again as a whole.
        let pauses = outcome.token_times.windows(2).map(|t| t[1].s_since(t[0]));
        let pauses: Vec<f64> = pauses.collect();
        let lacked_one = outcome.retries > 0
            && pauses
                .split_last()
                .is_some_and(|(last, others)| others.iter().all(|pause| pause < last));
        let is_long = outcome.prompt_tokens >= 1_000;
        assert_eq!(outcome.is_split(), is_long && !lacked_one, "{outcome:?}");
    }
    let first = &run.role_changes[0];
    assert_eq!((first.from, first.to), (Role::Decode, Role::Prefill));
}

#[test]
fn a_worker_takes_over_what_a_lost_one_did_alone() {
    for lost in [0, 1] {
        let config = Config {
            warm_router: true,
            roles: Roles::Follow(RolesConfig::default()),
            faults: vec![Fault {
                at: Time::from_s(10.0),
                worker: lost,
                kind: FaultKind::Crash { back_after_s: 1e6 },
            }],
            ..config(&[Role::Prefill, Role::Decode])
        };
        // A split serves twice as many of them as one worker that does both.
        let requests = (0..200).map(|i| (0.2 * i as f64, 1_000, 20)).enumerate();
        let mut requests = requests.map(|(index, (due_s, prompt, output))| {
            Request::new(index, Time::from_s(due_s), prompt, output)
        });
        let run = simulate(config, &mut requests);
        let failed = run.outcomes.iter().filter(|o| o.failure.is_some()).count();
        assert!(failed < 10, "{failed} failed: {:?}", run.role_changes);
    }
}

#[test]
fn a_worker_that_is_back_has_the_role_that_it_started_with() {
    let mut clients = std::iter::empty::<Request>();
    let config = Config {
        faults: vec![Fault {
            at: Time::ZERO,
            worker: 1,
            kind: FaultKind::Crash { back_after_s: 1.0 },
        }],
        ..config(&[Role::Prefill, Role::Decode])
    };
    let mut world = World::new(config, &mut clients);
    let role = |world: &World<'_>| {
        let state = world.fleet.worker(tasuki_core::WorkerId(1));
        (
            state.map(|state| state.view.role),
            world.workers[1].config.role,
        )
    };
    world.take_role(1, 2);
    assert_eq!(role(&world), (Some(Role::Mixed), Role::Mixed));
    world.fault(0);
    world.restart(1);
    assert_eq!(role(&world), (Some(Role::Decode), Role::Decode));
}
