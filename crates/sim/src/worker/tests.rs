//! Workers alone: what a turn brings, checked against steps counted by hand.

use std::sync::Arc;
use std::time::Duration;

use tasuki_core::{Rates, Role};
use tasuki_flow::LegKind;

use super::{Limits, NewLeg, SeqId, Stage, Told, Worker, WorkerConfig};
use crate::steps::testing::{decodes, prompts};
use crate::steps::{StepModel, StepTable};
use crate::time::Time;

mod steps;

/// A decode step takes 10 ms and a prompt token 0.1 ms.
fn worker(limits: Limits) -> Worker {
    let rates = Rates {
        step_s: 0.01,
        sequence_s: 0.0,
        kv_token_s: 0.0,
        prompt_step_s: 0.0,
        prompt_token_s: 1e-4,
        prompt_square_s: 0.0,
    };
    worker_at(rates, limits)
}

fn worker_at(rates: Rates, limits: Limits) -> Worker {
    let config = WorkerConfig {
        role: Role::Mixed,
        host: 0,
        class: "test".into(),
        steps: Arc::new(StepModel::Rates(rates)),
        limits,
    };
    Worker::new(config, true, false)
}

fn limits() -> Limits {
    Limits {
        itl_target_s: None,
        launch_s: 0.0,
        receive_s: 0.0,
        lead_s: 0.0,
        lead_of_prompts: 0.0,
        block_size: 16,
        max_batched_tokens: 512,
        ..Limits::gpu(100, 640)
    }
}

fn leg(tokens: u32, output_tokens: u32) -> NewLeg {
    NewLeg {
        request: 0,
        attempt: 0,
        waited: Duration::ZERO,
        kind: LegKind::Colocated,
        number: 1,
        tokens,
        resumed: 0,
        output_tokens,
        chunks: Arc::default(),
    }
}

/// Turns until nothing is due: what was told and when, in ms.
fn told(worker: &mut Worker) -> Vec<(Told, u64)> {
    let mut all = Vec::new();
    while worker.next != Time::NEVER {
        let now = worker.next;
        worker.turn(now);
        all.extend(
            worker
                .told
                .iter()
                .map(|told| (*told, (1e3 * now.as_s()).round() as u64)),
        );
        worker.forget_gone();
        assert!(all.len() < 1_000, "it does not end");
    }
    all
}

#[test]
fn what_lies_between_steps_is_waited_for_and_is_not_reported_as_a_step() {
    let between = Limits {
        between_s: 1e-3,
        between_sequence_s: 2e-3,
        ..limits()
    };
    let mut worker = worker(between);
    worker.submit(leg(100, 11), Time::ZERO);
    // A prompt step of 10 ms and 1 more, ten decode steps of 10 and 3 more.
    let expected = [(Told::First(0), 11), (Told::Finished(0), 141)];
    assert_eq!(told(&mut worker), expected);
    let load = worker.load(Time::from_s(1.0));
    let reported = [load.last_decode, load.last_prefill].map(|step| step.unwrap().duration_s);
    assert!(
        reported.iter().all(|s| (s - 0.01).abs() < 1e-9),
        "{reported:?}"
    );
}

#[test]
fn a_request_takes_its_prompt_and_its_steps() {
    let mut worker = worker(limits());
    worker.submit(leg(100, 11), Time::ZERO);
    assert_eq!(
        told(&mut worker),
        [(Told::First(0), 10), (Told::Finished(0), 110)]
    );
    assert_eq!(worker.pool.available(), 100);
    assert_eq!(worker.counters.steps, 11);
    assert_eq!(worker.counters.output_tokens, 11);
}

#[test]
fn a_later_attempt_is_computed_before_what_came_after_the_first_one() {
    let mut worker = worker(limits());
    worker.submit(leg(400, 2), Time::from_s(5.0));
    let again = NewLeg {
        waited: Duration::from_secs(1),
        ..leg(500, 2)
    };
    let again = worker.submit(again, Time::from_s(5.0));
    let all = told(&mut worker);
    assert_eq!(all[0].0, Told::First(again), "{all:?}");
}

#[test]
fn a_prompt_that_comes_while_others_decode_joins_the_next_step() {
    let mut worker = worker(limits());
    worker.submit(leg(100, 101), Time::ZERO);
    worker.turn(worker.next);
    worker.turn(worker.next); // the prompt is computed, a flight of many steps begins
    assert!(worker.next > Time::from_s(0.05));
    // In the middle of the third step after 10 ms.
    worker.submit(leg(200, 2), Time::from_s(0.035));
    assert_eq!(worker.next, Time::from_s(0.04));
    let all = told(&mut worker);
    // A step of 10 ms and 200 tokens of 0.1 ms, then a step of both.
    assert_eq!(all[..2], [(Told::First(1), 70), (Told::Finished(1), 80)]);
    assert_eq!(all[2], (Told::Finished(0), 1_030));
}

#[test]
fn a_prompt_that_comes_too_late_for_a_step_is_part_of_the_one_after_it() {
    let planned_early = Limits {
        lead_s: 3e-3,
        lead_sequence_s: 1e-3,
        ..limits()
    };
    let mut worker = worker(planned_early);
    worker.submit(leg(100, 201), Time::ZERO);
    worker.turn(worker.next);
    worker.turn(worker.next);
    worker.submit(leg(200, 50), Time::from_s(0.035)); // computed from 40 to 70 ms
    worker.turn(worker.next);
    let third = worker.submit(leg(100, 2), Time::from_s(0.067));
    let all = told(&mut worker);
    // The step from 70 ms on is planned: another 10 ms, and 10 of its own with the decode beside.
    assert!(all.contains(&(Told::First(third), 100)), "{all:?}");
}

#[test]
fn behind_a_step_with_prompts_the_next_one_is_planned_earlier() {
    let firsts = |lead_of_prompts| {
        let mut worker = worker(Limits {
            lead_of_prompts,
            ..limits()
        });
        worker.submit(leg(200, 3), Time::ZERO); // computed from 0 to 20 ms
        worker.turn(worker.next);
        let second = worker.submit(leg(200, 1), Time::from_s(0.018));
        let all = told(&mut worker);
        let first = all.iter().find(|(told, _)| *told == Told::First(second));
        first.unwrap().1
    };
    // A step of 10 ms and 20 of its own follows at once, or behind one of 10 ms.
    assert_eq!((firsts(0.05), firsts(0.15)), (50, 60));
}

#[test]
fn a_decode_that_is_taken_away_in_a_flight_leaves_no_block_behind() {
    let mut worker = worker(limits());
    let first = worker.submit(leg(100, 201), Time::ZERO);
    worker.submit(leg(100, 301), Time::ZERO);
    for _ in 0..4 {
        worker.turn(worker.next);
    }
    // Of 10 ms each; of those that are left out each one may begin a block.
    let steps = worker.flight.as_ref().unwrap().steps;
    assert!(steps > 4, "{steps}");
    worker.remove(first);
    worker.wake(worker.next.minus_s(0.03));
    told(&mut worker);
    assert_eq!(worker.pool.available(), 100);
}

#[test]
fn only_the_first_prompt_after_a_pause_takes_as_long_as_one_alone() {
    let alone = prompts([(100.0, 0.03), (512.0, 0.03)]);
    let steady = prompts([(100.0, 0.02), (512.0, 0.02)]);
    let steps = StepTable::new(&alone, &steady, &decodes(0.01), &[]).unwrap();
    let mut worker = Worker::new(
        WorkerConfig {
            steps: Arc::new(StepModel::Table(steps)),
            ..worker(limits()).config
        },
        true,
        false,
    );
    for _ in 0..3 {
        worker.submit(leg(512, 1), Time::ZERO);
    }
    let firsts = told(&mut worker);
    let firsts = firsts
        .iter()
        .filter(|(told, _)| matches!(told, Told::First(_)));
    assert_eq!(firsts.map(|&(_, ms)| ms).collect::<Vec<_>>(), [30, 50, 70]);
}

#[test]
fn an_idle_worker_starts_with_the_first_prompt_of_a_burst() {
    let mut worker = worker(Limits {
        launch_s: 1e-3,
        receive_s: 1e-4,
        ..limits()
    });
    for _ in 0..3 {
        worker.submit(leg(100, 2), Time::ZERO);
    }
    let all = told(&mut worker);
    // 1 ms, a prompt of 10 ms; then a step of 10 ms and the two others.
    let firsts = all
        .iter()
        .filter(|(told, _)| matches!(told, Told::First(_)));
    let firsts: Vec<u64> = firsts.map(|(_, at)| *at).collect();
    assert_eq!(firsts, [11, 41, 41]);
}

#[test]
fn without_blocks_the_youngest_gives_way_and_is_computed_again() {
    let limits = Limits {
        max_model_len: 160,
        ..Limits {
            num_blocks: 20,
            ..limits()
        }
    };
    let mut worker = worker(limits);
    for _ in 0..2 {
        worker.submit(leg(144, 60), Time::ZERO);
    }
    let all = told(&mut worker);
    assert!(worker.counters.preemptions > 0);
    assert!(
        all.iter().any(|(told, _)| *told == Told::Paused(1)),
        "{all:?}"
    );
    let finished = all
        .iter()
        .filter(|(told, _)| matches!(told, Told::Finished(_)));
    assert_eq!(finished.count(), 2);
    assert_eq!(worker.pool.available(), 20);
    // What it had produced counts.
    assert_eq!(worker.counters.output_tokens, 120);
}

#[test]
fn who_gives_way_again_is_computed_again_as_it_stands() {
    let limits = Limits {
        max_model_len: 240,
        ..Limits {
            num_blocks: 20,
            ..limits()
        }
    };
    let mut worker = worker(limits);
    for _ in 0..3 {
        worker.submit(leg(16, 200), Time::ZERO);
    }
    let all = told(&mut worker);
    let paused = |seq| {
        let of = all
            .iter()
            .filter(move |(told, _)| *told == Told::Paused(seq));
        of.count()
    };
    assert!((0..3).any(|seq| paused(seq) > 1), "{all:?}");
    assert_eq!(worker.pool.available(), 20);
    assert_eq!(worker.counters.output_tokens, 600);
}

#[test]
fn prompts_that_begin_alike_are_computed_once() {
    let mut worker = worker(limits());
    let chunks: Arc<[u64]> = [1, 2].into();
    let alike = NewLeg {
        chunks,
        ..leg(300, 1)
    };
    worker.submit(alike.clone(), Time::ZERO);
    told(&mut worker);
    worker.submit(alike, Time::from_s(1.0));
    told(&mut worker);
    assert_eq!(
        (worker.counters.prompt_tokens, worker.counters.cached_tokens),
        (344, 256)
    );
}

#[test]
fn a_decode_leg_gets_room_or_waits_for_it() {
    let limits = Limits {
        num_blocks: 60,
        max_model_len: 400,
        ..limits()
    };
    let mut worker = worker(limits);
    let pulled = NewLeg {
        kind: LegKind::Decode,
        ..leg(380, 11)
    };
    let first: SeqId = worker.submit(pulled.clone(), Time::ZERO);
    let second = worker.submit(pulled, Time::ZERO);
    assert!(worker.may_credit(first) && !worker.may_credit(second));
    assert_eq!(worker.assign(first), 0);
    worker.arrive(first, Time::from_s(0.1));
    assert_eq!(worker.sequence(first).stage, Stage::Inbound);
    assert_eq!(told(&mut worker), [(Told::Finished(first), 200)]);
    assert_eq!(worker.denied(), [second]);
    assert!(worker.may_credit(second) && worker.denied().is_empty());
}

#[test]
fn the_load_has_the_kv_of_what_will_decode() {
    let mut worker = worker(limits());
    let waiting = |worker: &mut Worker, awaited| {
        let load = worker.load(Time::ZERO);
        let kv_tokens = load.waiting_kv_tokens.expect("known");
        assert_eq!(load.awaited_sequences, awaited);
        (load.waiting_requests, load.waiting_sequences, kv_tokens)
    };
    for (kind, tokens) in [
        (LegKind::Colocated, 600),
        (LegKind::Prefill, 50),
        (LegKind::Decode, 70),
    ] {
        let leg = NewLeg {
            kind,
            ..leg(tokens, 11)
        };
        worker.submit(leg, Time::ZERO);
    }
    assert_eq!(waiting(&mut worker, 1), (3, 2, 670));
    // Parts of both prompts are computed, then all.
    worker.turn(worker.next);
    assert_eq!(waiting(&mut worker, 1), (1, 2, 670));
    while worker.load(Time::ZERO).running_sequences == 0 {
        worker.turn(worker.next);
    }
    assert_eq!(waiting(&mut worker, 1), (1, 1, 70));
    worker.remove(2);
    assert_eq!(waiting(&mut worker, 0), (0, 0, 0));
}

#[test]
fn a_slow_worker_takes_longer() {
    let mut worker = worker(limits());
    worker.slowness = 2.0;
    worker.submit(leg(100, 11), Time::ZERO);
    assert_eq!(told(&mut worker)[1], (Told::Finished(0), 220));
}
