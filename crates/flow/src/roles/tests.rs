//! The balancer on workers made by hand.

mod lengths;

use std::time::Duration;

use tasuki_core::{ModelId, Rates, Role, WorkerId};

use super::owner::{Claim, Held, Ownership};
use super::{
    Ahead, Balancer, Bound, Lengths, Look, Objectives, Order, Outlook, RolesConfig, Seen, Task,
    Topology, Wanted, search,
};

/// An H200's steps with Qwen3-4B's shape, roughly.
const H200: Rates = Rates {
    step_s: 2.63e-3,
    sequence_s: 1.38e-5,
    kv_token_s: 3.04e-8,
    prompt_step_s: 2.63e-3,
    prompt_token_s: 1.15e-5,
    prompt_square_s: 4.7e-10,
};

/// So many requests a second of fixed lengths, first tokens within 2 s, tokens within 8 ms.
fn task(rate: f64, prompt: f64, output: f64) -> Task {
    Task {
        lengths: Lengths {
            rate,
            prompt_tokens: prompt,
            prompt_squares: prompt * prompt,
            cached: 0.0,
            output_tokens: output,
            context_tokens: prompt + output / 2.0,
            prompt_error: 0.05,
            output_error: 0.05,
            output_error_soon: 0.05,
        },
        rates: H200,
        objectives: Objectives {
            ttft_s: Some(2.0),
            tpot_s: Some(0.008),
        },
        pool_tokens: 8e5,
        handoff_s: 2e-3,
        queued: 0.0,
        horizon_s: 30.0,
    }
}

fn of(prefill: u32, decode: u32, mixed: u32) -> Topology {
    Topology {
        prefill,
        decode,
        mixed,
    }
}

const NONE: Topology = Topology {
    prefill: 0,
    decode: 0,
    mixed: 0,
};

fn best(task: &Task, now: Topology) -> Outlook {
    task.outlook(search::best(
        |topology| task.outlook(topology).cost_s,
        now,
        NONE,
    ))
}

/// Workers of these roles, each with so many sequences.
fn look(task: Task, workers: &[(Role, f64)]) -> Look {
    let mut now = NONE;
    let mut seen = Vec::new();
    for (&(role, sequences), id) in workers.iter().zip(0..) {
        *now.of(role) += 1;
        seen.push(Seen {
            id: WorkerId(id),
            role,
            pinned: false,
            sequences,
            kv_tokens: 500.0 * sequences,
            backlog_tokens: 0.0,
        });
    }
    Look {
        workers: seen,
        now,
        kept: NONE,
        ahead: Ahead::steady(task),
        load: task,
    }
}

fn balancer() -> Balancer {
    Balancer::new(ModelId::default(), RolesConfig::default())
}

/// The only order of a new balancer, if there is one.
fn decide(look: &Look) -> Option<Order> {
    let orders = balancer().decide(look, at(1.0));
    assert!(orders.len() <= 1, "{orders:?}");
    orders.into_iter().next()
}

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

#[test]
fn long_prompts_are_best_split_and_short_ones_not() {
    let long = task(13.0, 5_000.0, 250.0);
    let short = task(42.0, 512.0, 512.0);
    let capacity = |task: &Task, topology| task.outlook(topology).capacity;
    assert!(capacity(&long, of(1, 1, 0)) > 1.05 * capacity(&long, of(0, 0, 2)));
    assert!(capacity(&short, of(0, 0, 2)) > 1.1 * capacity(&short, of(1, 1, 0)));
    // Tokens that come late where prompts are computed between them count too.
    assert!(long.outlook(of(1, 1, 0)).cost_s < long.outlook(of(0, 0, 2)).cost_s);
    let none = task(13.0, 5_000.0, 250.0).outlook(of(2, 0, 0));
    assert_eq!((none.capacity, none.bound), (0.0, Bound::Decode));
}

#[test]
fn costs_grow_with_the_load_and_fall_with_workers() {
    for topology in [of(1, 1, 0), of(0, 0, 2), of(1, 0, 1), of(2, 3, 4)] {
        let mut before = 0.0;
        for rate in 1..60 {
            let outlook = task(f64::from(rate), 512.0, 512.0).outlook(topology);
            assert!(
                outlook.cost_s.is_finite() && outlook.cost_s > before,
                "{topology} {rate}"
            );
            before = outlook.cost_s;
        }
    }
    let task = task(30.0, 512.0, 512.0);
    let cost = |workers| best(&task, of(0, 0, workers)).cost_s;
    for workers in 1..40 {
        assert!(cost(workers + 1) <= cost(workers) * 1.001, "{workers}");
    }
}

#[test]
fn a_large_fleet_gets_what_a_full_comparison_finds() {
    for (rate, prompt, output) in [(500.0, 5_000.0, 250.0), (1_500.0, 512.0, 512.0)] {
        let task = task(rate, prompt, output);
        let found = best(&task, of(0, 0, 70));
        let mut least = f64::INFINITY;
        for prefill in 0..=70 {
            for decode in 0..=70 - prefill {
                let topology = of(prefill, decode, 70 - prefill - decode);
                if topology.serves() {
                    least = least.min(task.outlook(topology).cost_s);
                }
            }
        }
        assert!(found.cost_s <= 1.02 * least, "{found:?} against {least}");
    }
}

#[test]
fn the_change_that_pays_is_made_one_at_a_time() {
    let mut balancer = balancer();
    let workers = [(Role::Mixed, 30.0), (Role::Mixed, 3.0)];
    let look = look(task(13.0, 5_000.0, 250.0), &workers);
    let orders = balancer.decide(&look, at(1.0));
    let [order] = &orders[..] else {
        panic!("{orders:?}")
    };
    assert_eq!((order.from, order.to), (Role::Mixed, Role::Prefill));
    // Fewer sequences wait there for prompts.
    assert_eq!(order.worker, WorkerId(1));
    assert!(order.reason.gain_s() > 0.0);
    let said = order.reason.to_string();
    assert!(
        said.contains("13.0 requests/s of 5000:250 tokens"),
        "{said}"
    );
    assert!(said.contains("2 mixed can serve"), "{said}");
    // It is not reported yet.
    assert_eq!(balancer.decide(&look, at(1.2)), []);
}

#[test]
fn of_many_workers_several_change_at_a_time() {
    let mut balancer = balancer();
    let workers: Vec<_> = (0..64).map(|_| (Role::Mixed, 3.0)).collect();
    let look = look(task(64.0 * 6.5, 5_000.0, 250.0), &workers);
    let orders = balancer.decide(&look, at(1.0));
    assert_eq!(orders.len(), 4, "{orders:?}");
    for (index, order) in orders.iter().enumerate() {
        let others = &orders[..index];
        assert!(others.iter().all(|one| one.worker != order.worker));
    }
    // None goes beyond the topology that pays.
    let target = orders[0].reason.target();
    let to = |role| orders.iter().filter(|one| one.to == role).count() as u32;
    assert!(to(Role::Prefill) <= target.prefill && to(Role::Decode) <= target.decode);
    assert_eq!(balancer.decide(&look, at(1.2)), []);
}

#[test]
fn what_does_not_pay_or_is_in_doubt_is_left() {
    let busy = |task: Task, sequences: f64| {
        let look = look(task, &[(Role::Mixed, sequences), (Role::Mixed, sequences)]);
        decide(&look)
    };
    let beside = |task: Task| busy(task, 10.0);
    assert_eq!(beside(task(42.0, 512.0, 512.0)), None);
    let mut doubted = task(13.0, 5_000.0, 250.0);
    assert!(beside(doubted).is_some());
    doubted.lengths.prompt_error = 0.9;
    doubted.lengths.output_error = 0.9;
    assert_eq!(beside(doubted), None);
    // So many requests decode there that their loss is more than the gain.
    assert_eq!(busy(task(13.0, 5_000.0, 250.0), 1e4), None);
}

#[test]
fn what_is_expected_to_pay_is_done_before_it_is_known() {
    // Such prompts take so long here that hardly any other answers would suit two mixed workers.
    let mut new = task(13.0, 5_000.0, 250.0);
    new.rates.prompt_token_s *= 1.5;
    new.rates.prompt_square_s *= 1.5;
    new.lengths.output_error = 0.9;
    let decided = |soon: f64, sequences: f64| {
        let mut task = new;
        task.lengths.output_error_soon = soon;
        decide(&look(
            task,
            &[(Role::Mixed, sequences), (Role::Mixed, sequences)],
        ))
    };
    assert!(decided(0.1, 3.0).is_some());
    // It stays in doubt, or the change costs more than to wait.
    assert_eq!(decided(0.9, 3.0), None);
    assert_eq!(decided(0.1, 300.0), None);
}

#[test]
fn a_load_that_soon_ends_is_no_reason_to_change() {
    let now = task(13.0, 5_000.0, 250.0);
    let later = || vec![(1.0, task(42.0, 512.0, 512.0))];
    let lasting = |rest_s, later| {
        let workers = [(Role::Mixed, 1.0), (Role::Mixed, 1.0)];
        let mut look = look(now, &workers);
        look.ahead = Ahead::changing(now, rest_s, later);
        decide(&look)
    };
    assert!(lasting(60.0, later()).is_some());
    assert!(lasting(2.0, Vec::new()).is_some(), "nothing else is known");
    assert_eq!(lasting(2.0, later()), None);
    assert!(
        lasting(20.0, later()).is_some(),
        "roles follow what comes after it"
    );
    // Nor is one that may come.
    let look = |now, later| {
        let mut look = look(now, &[(Role::Mixed, 1.0), (Role::Mixed, 1.0)]);
        look.ahead = Ahead::changing(now, 2.0, vec![(1.0, later)]);
        look
    };
    let short = task(42.0, 512.0, 512.0);
    assert_eq!(decide(&look(short, now)), None);
}

#[test]
fn a_role_that_an_operator_set_stays() {
    let mut look = look(
        task(13.0, 5_000.0, 250.0),
        &[(Role::Mixed, 1.0), (Role::Mixed, 9.0)],
    );
    look.workers[0].pinned = true;
    look.kept = of(0, 0, 1);
    let order = decide(&look).expect("an order");
    assert_eq!(order.worker, WorkerId(1));
    look.workers[1].pinned = true;
    look.kept = of(0, 0, 2);
    assert_eq!(decide(&look), None);
}

#[test]
fn as_many_workers_are_asked_for_as_the_load_needs() {
    let wanted = |rate, now| Wanted::new(&task(rate, 5_000.0, 250.0), now);
    let few = wanted(5.0, of(1, 1, 0));
    let many = wanted(50.0, of(2, 2, 0));
    assert!(few.topology.workers() <= 2, "{few:?}");
    assert!((5..=12).contains(&many.topology.workers()), "{many:?}");
    assert!(many.topology.prefill >= 3, "{many:?}");
    assert!(task(50.0, 5_000.0, 250.0).outlook(many.topology).capacity >= 50.0);
    // Where nobody asked for a split none is asked for.
    let mixed = wanted(50.0, of(0, 0, 2));
    assert_eq!((mixed.topology.prefill, mixed.topology.decode), (0, 0));
    assert_eq!(
        wanted(1e6, of(0, 0, 2)).topology.workers(),
        8,
        "there is a limit"
    );
}

/// Workers' roles, each with its owner and epoch.
type Roles = Vec<(String, u64)>;

fn step(router: &mut Ownership, roles: &mut Roles, now: Duration) -> Claim {
    let known = roles.clone();
    let held = known.iter().zip(0..).map(|((owner, epoch), id)| Held {
        worker: WorkerId(id),
        role: Role::Mixed,
        owner,
        epoch: *epoch,
    });
    let claim = router.look(held, now);
    if let Claim::Set(worker, _) = claim {
        // The worker takes later epochs only.
        let role = &mut roles[worker.0 as usize];
        if router.next_epoch() > role.1 {
            *role = (router.name().to_owned(), router.next_epoch());
        }
    }
    claim
}

#[test]
fn one_router_owns_the_roles_and_another_one_follows_it() {
    let mut roles: Roles = vec![("start".to_owned(), 0); 3];
    let mut a = Ownership::new("a", at(0.0));
    let mut b = Ownership::new("b", at(0.0));
    for tick in 0..200 {
        let now = at(0.25 * f64::from(tick));
        step(&mut a, &mut roles, now);
        step(&mut b, &mut roles, now);
        assert!(!(a.owns() && b.owns()), "{roles:?}");
    }
    assert!(a.owns() && !b.owns());
    assert_eq!((a.taken, b.taken), (1, 0));
    // The owner is gone: not at once, but then for good.
    let mut taken = None;
    for tick in 200..400 {
        step(&mut b, &mut roles, at(0.25 * f64::from(tick)));
        if b.owns() {
            taken.get_or_insert(0.25 * f64::from(tick - 200));
        }
    }
    let after_s = taken.expect("it is succeeded");
    assert!((4.0..10.0).contains(&after_s), "{after_s}");
    let latest = roles.iter().map(|(_, epoch)| *epoch).max();
    // It comes back with what it knew, and follows.
    assert_eq!(step(&mut a, &mut roles, at(100.0)), Claim::Follow);
    assert!(!a.owns() && b.next_epoch() > latest.unwrap_or_default() - 1);
}

#[test]
fn of_two_that_begin_at_once_one_prevails() {
    let mut roles: Roles = vec![("start".to_owned(), 0); 2];
    let mut a = Ownership::new("a", at(0.0));
    let mut b = Ownership::new("b", at(0.0));
    // Each sees the roles as they were, and tells another worker.
    let told = |router: &mut Ownership, worker: u32| {
        let held = [Held {
            worker: WorkerId(worker),
            role: Role::Mixed,
            owner: "start",
            epoch: 0,
        }];
        assert!(matches!(
            router.look(held.into_iter(), at(0.0)),
            Claim::Set(..)
        ));
    };
    told(&mut a, 0);
    told(&mut b, 1);
    roles[0] = (a.name().to_owned(), 1);
    roles[1] = (b.name().to_owned(), 1);
    step(&mut a, &mut roles, at(0.3));
    step(&mut b, &mut roles, at(0.3));
    assert!(b.owns() && !a.owns(), "{roles:?}");
}

#[test]
fn an_operators_epoch_counts_but_does_not_own() {
    let mut a = Ownership::new("a", at(0.0));
    let pinned = ("router admin".to_owned(), 40);
    let mut roles: Roles = vec![pinned.clone(), ("start".to_owned(), 0)];
    let claim = step(&mut a, &mut roles, at(0.0));
    assert_eq!(claim, Claim::Set(WorkerId(1), Role::Mixed));
    assert_eq!(a.next_epoch(), 41);
    step(&mut a, &mut roles, at(0.3));
    assert!(a.owns());
    // The operator sets the owner's role too: nobody takes it back.
    roles[1] = ("router admin".to_owned(), 50);
    for tick in 0..200 {
        let claim = step(&mut a, &mut roles, at(1.0 + 0.25 * f64::from(tick)));
        assert_eq!(claim, Claim::Follow);
    }
    assert_eq!(roles[0], pinned);
}
