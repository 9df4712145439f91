//! Workers that fail one request after another get no new work for a while.

use tasuki_core::FailureKind;

use super::*;
use crate::leg::{LegEnd, LegEndReason as R, Ticket};

fn at(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn end(reason: R, failure: FailureKind) -> LegEnd {
    LegEnd {
        reason,
        failure,
        message: String::new(),
        answer: None,
        ticket: None,
        timings: None,
    }
}

/// A leg on the worker ends so.
fn leg_ends(fleet: &mut FleetState, key: WorkerKey, spec: &LegSpec, ended: &LegEnd) {
    let slot = fleet.on_dispatched(key, spec).expect("connected");
    fleet.on_outcome(key, slot, ended);
    fleet.on_ended(key, slot, None);
}

fn fail(fleet: &mut FleetState, key: WorkerKey, times: usize) {
    for _ in 0..times {
        let ended = end(R::Failed, FailureKind::Device);
        leg_ends(fleet, key, &spec(LegKind::Colocated, 10), &ended);
    }
}

fn place(fleet: &mut FleetState) -> Result<u32, NoPlacement> {
    let placed = fleet.place(&RequestView::new(10, 1));
    placed.map(|placed| placed.prefill.key.worker.0)
}

fn joined(workers: u32) -> (FleetState, Vec<WorkerKey>) {
    let mut fleet = fleet(workers as usize);
    let keys = (0..workers)
        .map(|id| {
            let key = fleet.join(WorkerId(id), info(&format!("engine-{id}")), NOW);
            let key = key.expect("joined");
            fleet.on_report(key, Some(&idle()), NOW);
            key
        })
        .collect();
    (fleet, keys)
}

#[test]
fn a_failing_worker_gets_no_work_until_one_request_succeeds_there() {
    let (mut fleet, keys) = joined(2);
    fail(&mut fleet, keys[0], 2);
    assert_eq!(view(&fleet, 0).health, Health::Ready);
    fail(&mut fleet, keys[0], 1);
    assert_eq!(view(&fleet, 0).health, Health::Failing);
    for _ in 0..10 {
        assert_eq!(place(&mut fleet), Ok(1));
    }
    assert!(fleet.on_report(keys[0], Some(&idle()), at(2)), "half open");
    let trial = fleet.on_dispatched(keys[0], &spec(LegKind::Colocated, 10));
    let trial = trial.expect("connected");
    fleet.on_report(keys[0], None, at(3));
    assert_eq!(
        view(&fleet, 0).health,
        Health::Failing,
        "one trial at a time"
    );
    fleet.on_output(keys[0], trial, 0, 0);
    assert_eq!(view(&fleet, 0).health, Health::Ready);
    fail(&mut fleet, keys[0], 2);
    assert_eq!(view(&fleet, 0).health, Health::Ready, "it counts anew");
}

#[test]
fn what_is_no_failure_of_the_worker_keeps_it_ready() {
    let (mut fleet, keys) = joined(2);
    let ends = [
        (R::Rejected, FailureKind::Client),
        (R::Failed, FailureKind::Model),
        (R::Failed, FailureKind::Client),
        (R::Refused, FailureKind::Overload),
        (R::Returned, FailureKind::Memory),
        (R::Aborted, FailureKind::Device),
    ];
    for (reason, failure) in ends {
        for _ in 0..10 {
            let ended = end(reason, failure);
            leg_ends(&mut fleet, keys[0], &spec(LegKind::Colocated, 10), &ended);
        }
        assert_eq!(
            view(&fleet, 0).health,
            Health::Ready,
            "{reason:?} {failure}"
        );
    }
}

#[test]
fn where_all_have_failed_the_one_that_failed_first_is_tried() {
    let (mut fleet, keys) = joined(3);
    for (worker, seconds) in [(1, 1), (0, 2), (2, 3)] {
        fleet.on_report(keys[worker], Some(&idle()), at(seconds));
        fail(&mut fleet, keys[worker], 3);
    }
    assert!((0..3).all(|worker| view(&fleet, worker).health == Health::Failing));
    assert_eq!(fleet.can_place(&RequestView::new(10, 1)), Ok(()));
    assert_eq!(place(&mut fleet), Ok(1));
    fail(&mut fleet, keys[1], 1);
    fleet.on_report(keys[1], None, at(4));
    fail(&mut fleet, keys[1], 1);
    assert_eq!(place(&mut fleet), Ok(0));
    assert_eq!(view(&fleet, 2).health, Health::Failing);
    fleet.leave(keys[0]);
    fleet.leave(keys[1]);
    assert_eq!(place(&mut fleet), Ok(2));
    fleet.leave(keys[2]);
    assert!(place(&mut fleet).is_err());
    assert!(fleet.can_place(&RequestView::new(10, 1)).is_err());
}

#[test]
fn a_failing_prefill_and_a_failing_decode_worker_are_tried_together() {
    let policy = PolicyConfig {
        strict_roles: true,
        ..PolicyConfig::default()
    };
    let mut fleet = FleetState::new(vec![Vec::new()], policy);
    let roles = [Role::Prefill, Role::Decode, Role::Decode];
    for (id, role) in (0..).zip(roles) {
        let worker = fleet.add();
        let mut info = info(&format!("engine-{id}"));
        info.role = role;
        let key = fleet.join(worker, info, at(id)).expect("joined");
        fail(&mut fleet, key, 3);
    }
    let Placed {
        prefill, decode, ..
    } = fleet.place(&RequestView::new(10, 5)).expect("a pair");
    assert_eq!((prefill.key.worker.0, decode.key.worker.0), (0, 1));
    assert_eq!(view(&fleet, 2).health, Health::Failing);
}

#[test]
fn draining_and_failing_go_together() {
    let (mut fleet, keys) = joined(1);
    fail(&mut fleet, keys[0], 3);
    fleet.drain(WorkerId(0), DrainReason::Asked);
    assert_eq!(view(&fleet, 0).health, Health::Draining);
    assert!(place(&mut fleet).is_err(), "an operator's word counts");
    assert!(!fleet.undrain(WorkerId(0), DrainReason::Asked));
    assert_eq!(view(&fleet, 0).health, Health::Failing);
}

#[test]
fn lost_kv_counts_against_both_sides_but_only_the_one_at_fault_stays_out() {
    let (mut fleet, keys) = joined(3);
    let from = |prefill: u32| LegSpec {
        handoff: Some(Handoff::With(info(&format!("engine-{prefill}")).peer)),
        ..spec(LegKind::Decode, 10)
    };
    let lost = end(R::KvLost, FailureKind::Transport);
    let good = end(R::Finished, FailureKind::Device);
    for _ in 0..3 {
        leg_ends(&mut fleet, keys[1], &from(0), &lost); // worker 0 cannot send
        leg_ends(&mut fleet, keys[1], &from(2), &good);
    }
    assert_eq!(view(&fleet, 0).health, Health::Failing);
    assert_eq!(view(&fleet, 1).health, Health::Ready);
    // KV of a worker that is gone is not the decode worker's fault.
    fleet.leave(keys[2]);
    for _ in 0..10 {
        leg_ends(&mut fleet, keys[1], &from(2), &lost);
    }
    assert_eq!(view(&fleet, 1).health, Health::Ready);
}

/// A decode worker whose handshake a prefill worker refuses says FAILED, not KV_LOST.
#[test]
fn a_prefill_worker_that_fits_no_other_stays_out_and_not_those_that_it_refuses() {
    let (mut fleet, keys) = joined(4);
    let from = |prefill: u32| LegSpec {
        handoff: Some(Handoff::With(info(&format!("engine-{prefill}")).peer)),
        ..spec(LegKind::Decode, 10)
    };
    let refused = end(R::Failed, FailureKind::Transport);
    let good = end(R::Finished, FailureKind::Device);
    for decode in [1, 3, 1] {
        leg_ends(&mut fleet, keys[decode], &from(0), &refused);
        leg_ends(&mut fleet, keys[decode], &from(2), &good);
    }
    let health = [0, 1, 2, 3].map(|id| view(&fleet, id).health);
    use Health::{Failing, Ready};
    assert_eq!(health, [Failing, Ready, Ready, Ready]);
    // A failure to compute is the decode worker's own.
    for _ in 0..3 {
        let broken = end(R::Failed, FailureKind::Device);
        leg_ends(&mut fleet, keys[1], &from(2), &broken);
    }
    let health = [1, 2].map(|id| view(&fleet, id).health);
    assert_eq!(health, [Failing, Ready]);
}

#[test]
fn a_prefill_workers_trial_lasts_until_its_kv_is_handed_over() {
    let (mut fleet, keys) = joined(2);
    let prefill = spec(LegKind::Prefill, 10);
    let lost = end(R::Failed, FailureKind::Transport);
    for _ in 0..3 {
        leg_ends(&mut fleet, keys[0], &prefill, &lost);
    }
    assert_eq!(view(&fleet, 0).health, Health::Failing);
    fleet.on_report(keys[0], Some(&idle()), at(2));
    let trial = fleet.on_dispatched(keys[0], &prefill).expect("connected");
    fleet.on_output(keys[0], trial, 1, 0);
    assert_eq!(
        view(&fleet, 0).health,
        Health::Failing,
        "a token does not show that KV gets away"
    );
    fleet.on_outcome(keys[0], trial, &end(R::HandedOff, FailureKind::Device));
    fleet.on_ended(keys[0], trial, None);
    assert_eq!(view(&fleet, 0).health, Health::Ready);
    let next = fleet.on_dispatched(keys[0], &prefill);
    assert!(next.is_some());
    assert_eq!(
        view(&fleet, 0).health,
        Health::Ready,
        "no further leg is a trial"
    );
}

#[test]
fn a_trial_whose_end_says_nothing_of_the_worker_makes_room_for_another() {
    let (mut fleet, keys) = joined(1);
    fail(&mut fleet, keys[0], 3);
    fleet.on_report(keys[0], Some(&idle()), at(2));
    let from_one_that_left = LegSpec {
        handoff: Some(Handoff::With(info("engine-9").peer)),
        ..spec(LegKind::Decode, 10)
    };
    let redeemed = LegSpec {
        handoff: Some(Handoff::Redeem {
            ticket: Ticket(Vec::new()),
            from: "engine-9".into(),
        }),
        ..spec(LegKind::Decode, 10)
    };
    for leg in [from_one_that_left, redeemed] {
        let lost = end(R::KvLost, FailureKind::Transport);
        leg_ends(&mut fleet, keys[0], &leg, &lost);
        fleet.recount(keys[0]);
        assert_eq!(view(&fleet, 0).health, Health::Ready, "{leg:?}");
    }
    let trial = fleet.on_dispatched(keys[0], &spec(LegKind::Colocated, 10));
    fleet.on_report(keys[0], None, at(3));
    assert_eq!(view(&fleet, 0).health, Health::Failing);
    fleet.on_ended(keys[0], trial.expect("connected"), None); // aborted: nobody waits for it
    fleet.recount(keys[0]);
    assert_eq!(view(&fleet, 0).health, Health::Ready);
}

#[test]
fn kv_lost_by_a_ticket_counts_against_both_workers_until_some_is_taken() {
    let (mut fleet, keys) = joined(2);
    let prefill = LegSpec {
        handoff: Some(Handoff::IssueTicket),
        ..spec(LegKind::Prefill, 10)
    };
    let issued = LegEnd {
        ticket: Some(Ticket(Vec::new())),
        ..end(R::HandedOff, FailureKind::Device)
    };
    let decode = LegSpec {
        handoff: Some(Handoff::Redeem {
            ticket: Ticket(Vec::new()),
            from: "engine-0".into(),
        }),
        ..spec(LegKind::Decode, 10)
    };
    let lost = end(R::KvLost, FailureKind::Transport);
    for failures in 0..3 {
        for worker in [0, 1] {
            assert_eq!(view(&fleet, worker).health, Health::Ready, "{failures}");
        }
        leg_ends(&mut fleet, keys[0], &prefill, &issued);
        leg_ends(&mut fleet, keys[1], &decode, &lost);
    }
    for &key in &keys {
        assert_eq!(view(&fleet, key.worker.0).health, Health::Failing);
        fleet.on_report(key, Some(&idle()), at(2));
    }
    leg_ends(&mut fleet, keys[0], &prefill, &issued);
    leg_ends(&mut fleet, keys[1], &decode, &lost);
    for &key in &keys {
        fleet.on_report(key, Some(&idle()), at(3));
        assert_eq!(view(&fleet, key.worker.0).health, Health::Failing, "longer");
        fleet.on_report(key, Some(&idle()), at(4));
    }
    leg_ends(&mut fleet, keys[0], &prefill, &issued);
    let open = |fleet: &FleetState, worker| {
        let state = fleet.worker(WorkerId(worker)).expect("known");
        state.breakers().read().any(|(_, open, _)| open)
    };
    assert!(open(&fleet, 0) && open(&fleet, 1));
    let finished = end(R::Finished, FailureKind::Device);
    leg_ends(&mut fleet, keys[1], &decode, &finished);
    assert!(!open(&fleet, 0) && !open(&fleet, 1));
}
