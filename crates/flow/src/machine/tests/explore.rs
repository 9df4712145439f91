//! Every schedule close to the undisturbed one, and thousands far from it.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tasuki_core::Role::{self, Decode, Mixed, Prefill};
use tasuki_core::{Capabilities, FirstToken, HandoffKind, Payload, Positions, RoleUse};

use super::world::{Action, Setup, World};
use crate::machine::config::OnKvLoss;

const MOST_STEPS: usize = 2_000;

/// Runs to the end; `pick` chooses among so many actions, 0 being the undisturbed one.
fn run(setup: &Setup, mut pick: impl FnMut(usize, &[Action]) -> usize) -> World {
    let mut world = World::new(setup.clone());
    for step in 0..MOST_STEPS {
        if world.machine.is_over() {
            world.check_end();
            return world;
        }
        let actions = world.actions();
        assert!(!actions.is_empty(), "stuck after {:#?}", world.trace);
        let action = actions[pick(step, &actions)].clone();
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.act(&action)));
        if let Err(panic) = outcome {
            eprintln!("{setup:?}\n{:#?}", world.trace);
            std::panic::resume_unwind(panic);
        }
    }
    panic!("no end after {:#?}", world.trace);
}

/// All runs that leave the undisturbed one at most `deviations` times.
fn explore(setup: &Setup, deviations: usize) -> usize {
    // A plan is a list of (step, action) where the run deviates.
    let mut plans: Vec<Vec<(usize, usize)>> = vec![vec![]];
    let mut runs = 0;
    while let Some(plan) = plans.pop() {
        let mut widths = Vec::new();
        let world = run(setup, |step, actions| {
            widths.push(actions.len());
            let planned = plan.iter().find(|(at, _)| *at == step);
            planned.map_or(0, |(_, action)| *action)
        });
        check(setup, &world);
        runs += 1;
        if plan.len() < deviations {
            let from = plan.last().map_or(0, |(step, _)| step + 1);
            for (step, &width) in widths.iter().enumerate().skip(from) {
                for action in 1..width {
                    let mut longer = plan.clone();
                    longer.push((step, action));
                    plans.push(longer);
                }
            }
        }
    }
    runs
}

fn check(setup: &Setup, world: &World) {
    if let Some(error) = &world.client.failed {
        let begun = !world.client.tokens.is_empty();
        let may = setup.on_kv_loss == OnKvLoss::Fail || !setup.capabilities.resumes;
        assert!(
            begun && may && !world.is_faultless(),
            "failed with {error} after {:#?}",
            world.trace
        );
    }
    if let Some(timings) = world.client.done.as_ref().filter(|_| world.is_faultless()) {
        assert_eq!(timings.replacements, 0, "after {:#?}", world.trace);
    }
}

#[test]
fn undisturbed_runs_end_without_replacement() {
    let fleets: [&[Role]; 4] = [
        &[Prefill, Decode],
        &[Mixed],
        &[Mixed, Mixed],
        &[Prefill, Prefill, Decode, Decode],
    ];
    for roles in fleets {
        for (n, first, max_tokens) in [(1, 1, 1), (1, 1, 5), (1, 4, 4), (3, 1, 3), (3, 2, 9)] {
            let world = run(&Setup::new(roles, n, first, max_tokens, 0), |_, _| 0);
            assert_eq!(world.client.done.expect("the end").replacements, 0);
        }
    }
}

#[test]
fn every_run_with_two_deviations() {
    let mut runs = 0;
    for roles in [
        &[Prefill, Decode][..],
        &[Prefill, Decode, Decode],
        &[Prefill, Prefill, Decode, Decode],
        &[Mixed, Mixed],
    ] {
        for (n, first, max_tokens) in [(1, 3, 8), (1, 2, 2), (2, 1, 3)] {
            runs += explore(&Setup::new(roles, n, first, max_tokens, 2), 2);
        }
    }
    assert!(runs > 10_000, "only {runs} runs");
}

#[test]
fn every_run_with_three_deviations_of_the_smallest_split() {
    let runs = explore(&Setup::new(&[Prefill, Decode, Decode], 1, 2, 8, 2), 3);
    assert!(runs > 20_000, "only {runs} runs");
}

#[test]
fn every_run_with_two_deviations_and_a_client_that_acts() {
    for (n, first, max_tokens) in [(1, 3, 8), (2, 2, 8)] {
        let mut setup = Setup::new(&[Prefill, Decode, Decode], n, first, max_tokens, 2);
        setup.client_acts = true;
        explore(&setup, 2);
    }
}

#[test]
fn every_run_with_two_deviations_and_logprobs_of_the_prompt() {
    for (n, first, max_tokens) in [(1, 3, 8), (1, 1, 8), (2, 1, 3)] {
        let mut setup = Setup::new(&[Prefill, Decode, Decode], n, first, max_tokens, 2);
        setup.scored = true;
        explore(&setup, 2);
    }
}

#[test]
fn every_run_with_two_deviations_and_several_tokens_at_once() {
    for (n, first, max_tokens) in [(1, 7, 9), (2, 5, 6)] {
        let mut setup = Setup::new(&[Prefill, Decode, Decode], n, first, max_tokens, 2);
        setup.run = 3;
        explore(&setup, 2);
    }
}

#[test]
fn every_run_with_two_deviations_and_legs_that_stall() {
    for roles in [&[Mixed, Mixed][..], &[Prefill, Decode, Decode]] {
        for n in [1, 2] {
            let mut setup = Setup::new(roles, n, 2, 8, 2);
            setup.stalls = true;
            let runs = explore(&setup, 2);
            assert!(runs > 100, "{runs} runs");
        }
    }
}

#[test]
fn every_run_with_two_deviations_and_a_budget_that_is_used_up() {
    for n in [1, 2] {
        let mut setup = Setup::new(&[Prefill, Decode, Decode], n, 3, 8, 2);
        setup.dry = 2;
        explore(&setup, 2);
    }
}

/// Workers that neither resume nor retarget, and hand over one choice at a time.
const NO_RESUME: Capabilities = Capabilities {
    handoff: HandoffKind::Concurrent,
    first_token: FirstToken::Decode,
    positions: Positions::Counted,
    resumes: false,
    retargets: false,
    splits_choices: false,
    role_use: RoleUse::Discount,
    payload: Payload::Tokens,
    reports_load: false,
    reports_cache: false,
};

/// The same, and prefill runs to its end before decode begins.
const SERIAL: Capabilities = Capabilities {
    handoff: HandoffKind::Ticket,
    ..NO_RESUME
};

#[test]
fn every_run_with_two_deviations_of_workers_with_fewer_capabilities() {
    let resumes = Capabilities {
        positions: Positions::Exact,
        resumes: true,
        ..SERIAL
    };
    let fleets: [&[Role]; 3] = [
        &[Prefill, Decode],
        &[Prefill, Prefill, Decode, Decode],
        &[Mixed, Mixed],
    ];
    for capabilities in [NO_RESUME, SERIAL, resumes] {
        let mut runs = 0;
        for roles in fleets {
            for (n, first, max_tokens) in [(1, 3, 8), (1, 1, 8), (2, 2, 4)] {
                let mut setup = Setup::new(roles, n, first, max_tokens, 2);
                setup.capabilities = capabilities;
                let undisturbed = run(&setup, |_, _| 0);
                assert_eq!(undisturbed.client.done.expect("the end").replacements, 0);
                runs += explore(&setup, 2);
            }
        }
        assert!(runs > 2_000, "only {runs} runs");
    }
}

#[test]
fn every_run_with_two_deviations_of_fewer_capabilities_and_a_client_that_acts() {
    for capabilities in [NO_RESUME, SERIAL] {
        let mut setup = Setup::new(&[Prefill, Decode, Decode], 1, 3, 8, 2);
        setup.capabilities = capabilities;
        setup.client_acts = true;
        setup.scored = true;
        explore(&setup, 2);
    }
}

#[test]
fn every_run_with_two_deviations_of_a_request_that_is_not_tokens() {
    let opaque = |capabilities| Capabilities {
        payload: Payload::Opaque,
        ..capabilities
    };
    let fixed = Capabilities {
        role_use: RoleUse::Only,
        ..NO_RESUME
    };
    for capabilities in [fixed, NO_RESUME, SERIAL].map(opaque) {
        for client_acts in [false, true] {
            let mut setup = Setup::new(&[Prefill, Decode, Decode], 1, 3, 8, 2);
            setup.capabilities = capabilities;
            setup.frames = true;
            setup.client_acts = client_acts;
            explore(&setup, 2);
        }
    }
}

#[test]
fn lost_kv_fails_the_request_only_when_told_to() {
    let mut setup = Setup::new(&[Prefill, Prefill, Decode, Decode], 1, 3, 8, 2);
    setup.on_kv_loss = OnKvLoss::Fail;
    explore(&setup, 2);
}

/// Seeds of runs that failed once; a failure prints what to add here.
const REGRESSIONS: &[u64] = &[];

#[test]
fn random_runs_far_from_the_undisturbed_one() {
    tasuki_searches::run(20_000, REGRESSIONS, random_run);
}

fn random_run(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let roles: Vec<Role> = (0..random.random_range(1..5))
        .map(|_| [Prefill, Decode, Mixed][random.random_range(0..3)])
        .collect();
    let first = random.random_range(1..6);
    let most = first + random.random_range(0..4);
    let n = random.random_range(1..4);
    let mut setup = Setup::new(&roles, n, first, most, random.random_range(0..8));
    setup.client_acts = random.random_bool(0.3);
    setup.scored = random.random_bool(0.3);
    setup.run = random.random_range(1..4);
    setup.dry = random.random_range(0..4);
    setup.capabilities = [Capabilities::default(), NO_RESUME, SERIAL][random.random_range(0..3)];
    setup.frames =
        !setup.capabilities.resumes && n == 1 && !setup.scored && random.random_bool(0.5);
    let world = run(&setup, |_, actions| random.random_range(0..actions.len()));
    check(&setup, &world);
}
