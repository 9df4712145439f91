//! Who is let in, who waits, who is turned away: alone, and under load on simulated workers.

mod adapters;
mod clocks;
mod refusals;
mod waiting;

use std::time::Duration;

use tasuki_core::{ModelId, RequestView, WorkerId};

use self::clocks::{Arrival, H200, World, goodput, poisson};
use super::*;
use crate::Fleet as _;
use crate::leg::LegKind;
use crate::testing::leg_spec;

/// A tenant's request, there from the beginning.
fn entrant(tenant: &str, view: RequestView) -> Entrant {
    Entrant {
        view,
        tenant: tenant.into(),
        priority: 0,
        arrived: Duration::ZERO,
    }
}

const TTFT_S: f64 = 2.0;
const TPOT_S: f64 = 0.025;

fn objectives() -> AdmissionConfig {
    AdmissionConfig {
        ttft: Some(Duration::from_secs_f64(TTFT_S)),
        tpot: Some(Duration::from_secs_f64(TPOT_S)),
        ..AdmissionConfig::default()
    }
}

fn off() -> AdmissionConfig {
    AdmissionConfig {
        off: true,
        ..AdmissionConfig::default()
    }
}

/// So many tenths of a second, from zero on.
pub(super) fn tenths(many: u64) -> impl Iterator<Item = Duration> {
    (0..many).map(|tenth| Duration::from_millis(100 * tenth))
}

/// Deterministic numbers in `0..1`.
fn draws(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state ^ (state >> 29)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

const SECONDS: f64 = 60.0;
const POOL: u32 = 400_000;

fn total(world: &World) -> f64 {
    goodput(world, SECONDS, TTFT_S, TPOT_S).values().sum()
}

fn at_rate(rate: f64, config: AdmissionConfig) -> World {
    let mut world = World::new(2, POOL, config);
    world.run(poisson(rate, SECONDS, draws(7)));
    world
}

#[test]
fn refusals_come_at_once() {
    for rate in [20.0, 32.0, 48.0] {
        let seen = at_rate(rate, objectives()).seen;
        let after: Vec<f64> = seen.iter().filter_map(|s| s.refused_after_s).collect();
        let late = after.iter().filter(|after| **after > 0.05).count();
        assert!(after.len() > 100, "{} at {rate}", after.len());
        assert!(
            late * 50 < after.len(),
            "{late} of {} at {rate}",
            after.len()
        );
    }
}

#[test]
fn at_twice_the_load_nine_tenths_of_the_best_goodput_are_left() {
    let rates = (1..40).step_by(3).map(f64::from);
    let best = rates.map(|rate| (total(&at_rate(rate, off())), rate));
    let (best, rate) = best.max_by(|a, b| a.0.total_cmp(&b.0)).expect("rates");
    let with = total(&at_rate(2.0 * rate, objectives()));
    let without = total(&at_rate(2.0 * rate, off()));
    assert!(with >= 0.9 * best, "{with} of {best}");
    assert!(without < 0.5 * best, "{without} of {best}");
}

/// A tenth of the tenants sends nine tenths of the load.
#[test]
fn a_tenant_that_sends_much_takes_nothing_from_the_others() {
    let mut draw = draws(3);
    let mut load = poisson(40.0, SECONDS, draws(11));
    for arrival in &mut load {
        let tenant = match draw() {
            share if share < 0.9 => "much".to_owned(),
            _ => format!("little-{}", (draw() * 9.0) as u32),
        };
        arrival.tenant = tenant.into();
    }
    let sent = |load: &[Arrival]| load.iter().filter(|a| &*a.tenant != "much").count();
    let sent = sent(&load) as f64 / SECONDS;
    let mut world = World::new(2, POOL, objectives());
    world.run(load);
    let good = goodput(&world, SECONDS, TTFT_S, TPOT_S);
    let much = good["much"];
    let little: f64 = good.values().sum::<f64>() - much;
    assert!(little >= 0.95 * sent, "{little} of {sent}");
    assert!(much > 10.0, "the rest is the others': {much}");
}

#[test]
fn the_first_token_cliff_is_where_prompts_together_pass_the_objective() {
    // Two workers: each number of prompts at once that is served in time, by length.
    for length in [500, 2_000, 8_000] {
        let prompt_s = H200.prompt_s(f64::from(length), 0.0);
        let fits = 2.0 * TTFT_S / prompt_s;
        for (share, all) in [(0.5, true), (2.0, false)] {
            let mut world = World::new(2, 10_000_000, objectives());
            // It learns the pace first.
            let mut load = poisson(4.0, 20.0, draws(5));
            load.extend((0..(fits * share) as u32).map(|_| arrival(30.0, length, 2)));
            let learnt = load.len() - (fits * share) as usize;
            world.run(load);
            let refused = |seen: &&clocks::Seen| seen.refused_after_s.is_some();
            let refused = world.seen[learnt..].iter().filter(refused).count();
            assert_eq!(refused == 0, all, "{length}: {refused} of {}", fits * share);
        }
    }
}

fn arrival(at: f64, prompt: u32, output: u32) -> Arrival {
    Arrival {
        at,
        prompt,
        output,
        tenant: "".into(),
        priority: 0,
    }
}

#[test]
fn a_lesser_number_goes_first() {
    let mut world = World::new(1, POOL, AdmissionConfig::default());
    let mut load: Vec<Arrival> = (0..100).map(|_| arrival(0.0, 5_000, 10)).collect();
    for urgent in &mut load[90..] {
        urgent.priority = -1;
    }
    world.run(load);
    let urgent = |index: &usize| *index >= 90;
    let before: Vec<usize> = world
        .order
        .iter()
        .copied()
        .take_while(|i| !urgent(i))
        .collect();
    assert!(
        before.len() < 20,
        "only what was let in before they came: {before:?}"
    );
    let next: Vec<usize> = world.order[before.len()..][..10].to_vec();
    assert!(next.iter().all(urgent), "{next:?}");
}

#[test]
fn of_a_full_queue_the_last_in_order_goes() {
    let limits = AdmissionConfig {
        max_sequences: 20,
        max_tokens: 60_000,
        ..AdmissionConfig::default()
    };
    let mut world = World::new(1, POOL, limits);
    let mut load: Vec<Arrival> = (0..40).map(|_| arrival(0.0, 5_000, 10)).collect();
    let other = Arrival {
        tenant: "other".into(),
        ..arrival(0.0, 5_000, 10)
    };
    load.push(other);
    world.run(load);
    // 60,000 tokens are 12 requests.
    assert!(world.most_waiting <= 13, "{}", world.most_waiting);
    let refused = |seen: &clocks::Seen| seen.refused_after_s == Some(0.0);
    assert!(refused(&world.seen[39]) && !refused(&world.seen[40]));
}

#[test]
fn memory_is_promised_before_prefill() {
    // Room for the prompts of three; without admission they would wait in the worker.
    let mut world = World::new(1, 16_000, AdmissionConfig::default());
    world.run((0..9).map(|_| arrival(0.0, 5_000, 50)).collect());
    assert!(world.most_waiting >= 6, "{}", world.most_waiting);
    assert!(world.seen.iter().all(|seen| seen.tpot_s.is_some()));
}

#[test]
fn an_idle_worker_takes_whatever_comes() {
    let strict = AdmissionConfig {
        ttft: Some(Duration::from_millis(1)),
        tpot: Some(Duration::from_millis(1)),
        ..AdmissionConfig::default()
    };
    let mut world = World::new(1, 4_096, strict);
    world.run(vec![arrival(0.0, 90_000, 5)]);
    assert!(world.seen[0].tpot_s.is_some());
}

/// One worker with much to do, and an entrant that waits for it.
fn crowded(config: AdmissionConfig) -> (World, Entrant) {
    let mut world = World::new(1, POOL, config);
    let key = world
        .fleet
        .place(&RequestView::new(1, 2))
        .expect("a worker")
        .prefill
        .key;
    for _ in 0..40 {
        world
            .fleet
            .on_dispatched(key, &leg_spec(LegKind::Colocated, 4_000, 100));
    }
    (world, entrant("a", RequestView::new(100, 10)))
}

#[test]
fn a_request_that_waited_too_long_is_refused_with_its_times() {
    let minute = AdmissionConfig {
        max_wait: Duration::from_secs(60),
        ..AdmissionConfig::default()
    };
    let (mut world, entrant) = crowded(minute);
    let id = world.admission.enter(entrant, &world.fleet);
    assert_eq!(
        world
            .admission
            .settle(Duration::from_secs(59), &world.fleet),
        []
    );
    let verdicts = world
        .admission
        .settle(Duration::from_secs(61), &world.fleet);
    let [(refused, Verdict::Refused(refusal))] = verdicts[..] else {
        panic!("{verdicts:?}");
    };
    assert_eq!(refused, id);
    let reason = "it has waited for 61.0s; the limit is 60.0s";
    assert_eq!(refusal.reason.to_string(), reason);
}

#[test]
fn a_request_that_left_is_forgotten() {
    let (mut world, entrant) = crowded(AdmissionConfig::default());
    let id = world.admission.enter(entrant, &world.fleet);
    assert_eq!(world.admission.waiting(), (1, 1, 100));
    assert_eq!(world.admission.waiting_for(ModelId(0)), 1);
    assert_eq!(world.admission.waiting_for(ModelId(1)), 0);
    world.admission.withdraw(id);
    assert_eq!(world.admission.waiting(), (0, 0, 0));
    assert_eq!(
        world
            .admission
            .settle(Duration::from_secs(100), &world.fleet),
        []
    );
}

#[test]
fn the_next_request_waits_until_the_admitted_one_is_placed() {
    let mut world = World::new(1, POOL, AdmissionConfig::default());
    let (_, entrant) = crowded(AdmissionConfig::default());
    let ids = [0, 1].map(|_| world.admission.enter(entrant.clone(), &world.fleet));
    let mut settle = || world.admission.settle(Duration::ZERO, &world.fleet);
    let first = settle();
    assert!(
        matches!(first[..], [(id, Verdict::Admitted(..))] if id == ids[0]),
        "{first:?}"
    );
    assert_eq!(settle(), []);
    world.admission.passed(ids[0]);
    let second = world.admission.settle(Duration::ZERO, &world.fleet);
    assert!(
        matches!(second[..], [(id, Verdict::Admitted(..))] if id == ids[1]),
        "{second:?}"
    );
}

#[test]
fn a_request_that_no_worker_can_take_does_not_wait_behind_others() {
    let (mut world, entrant) = crowded(AdmissionConfig::default());
    let waiting = world.admission.enter(entrant.clone(), &world.fleet);
    assert_eq!(world.admission.settle(Duration::ZERO, &world.fleet), []);
    let large = Entrant {
        view: RequestView::new(200_000, 10),
        ..entrant
    };
    let large = world.admission.enter(large, &world.fleet);
    let verdicts = world.admission.settle(Duration::ZERO, &world.fleet);
    assert!(
        matches!(verdicts[..], [(id, Verdict::Admitted(..))] if id == large),
        "{verdicts:?}"
    );
    world
        .fleet
        .drain(WorkerId(0), crate::fleet::DrainReason::Asked);
    assert_eq!(world.admission.settle(Duration::ZERO, &world.fleet), []);
    world.admission.withdraw(waiting);
}

#[test]
fn requests_that_wait_when_all_workers_are_gone_are_admitted_and_fail() {
    let (mut world, entrant) = crowded(AdmissionConfig::default());
    let ids = [0, 1].map(|_| world.admission.enter(entrant.clone(), &world.fleet));
    assert_eq!(world.admission.settle(Duration::ZERO, &world.fleet), []);
    world.fleet.remove(WorkerId(0));
    let mut at = |seconds| {
        world
            .admission
            .settle(Duration::from_secs(seconds), &world.fleet)
    };
    assert_eq!(at(1), []);
    assert_eq!(at(10), []);
    let told = at(11);
    assert!(
        matches!(told[..], [(id, Verdict::Admitted(..))] if id == ids[0]),
        "{told:?}"
    );
    world.admission.passed(ids[0]);
    let told = world
        .admission
        .settle(Duration::from_secs(11), &world.fleet);
    assert!(
        matches!(told[..], [(id, Verdict::Admitted(..))] if id == ids[1]),
        "{told:?}"
    );
}

#[test]
fn after_hours_of_little_load_refusals_come_at_once_too() {
    let mut load = poisson(8.0, 200.0, draws(5));
    let light = load.len();
    load.extend(poisson(60.0, 20.0, draws(6)).into_iter().map(|mut late| {
        late.at += 200.0;
        late
    }));
    let mut world = World::new(2, POOL, objectives());
    world.run(load);
    let after: Vec<f64> = world.seen[light..]
        .iter()
        .filter_map(|seen| seen.refused_after_s)
        .collect();
    let at_once = after.iter().filter(|after| **after < 0.05).count();
    assert!(after.len() > 300, "{}", after.len());
    assert!(
        2 * at_once > after.len(),
        "{at_once} of {} within 50 ms",
        after.len()
    );
}
