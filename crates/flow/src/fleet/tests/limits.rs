//! What workers say that they take at most.

use super::*;

fn of_choices(choices: u32) -> RequestView {
    RequestView {
        choices,
        ..RequestView::new(100, 10)
    }
}

/// Mixed workers that tell these limits.
fn telling(limits: &[Option<u32>]) -> FleetState {
    let mut fleet = fleet(limits.len());
    for (&max_sequences, id) in limits.iter().zip(0..) {
        let info = WorkerInfo {
            max_sequences,
            ..info(&format!("e{id}"))
        };
        fleet.join(WorkerId(id), info, NOW).expect("joined");
    }
    fleet
}

#[test]
fn a_request_of_many_choices_goes_where_so_many_are_generated_at_once() {
    let mut fleet = telling(&[Some(64), Some(128)]);
    for _ in 0..4 {
        let placed = fleet.place(&of_choices(65)).expect("a worker");
        let workers = [placed.prefill, placed.decode].map(|half| half.key.worker.0);
        assert_eq!(workers, [1, 1]);
    }
    let error = fleet.place(&of_choices(129)).expect_err("too many");
    assert_eq!(
        error,
        NoPlacement::TooManyChoices {
            choices: 129,
            tokens: 110,
            limit_choices: 128
        }
    );
    // Until it is known to be gone, the wide worker may come back.
    fleet.drain(WorkerId(1), DrainReason::Asked);
    let error = fleet.place(&of_choices(65)).expect_err("none for now");
    assert!(error.may_pass(), "{error}");
    fleet.remove(WorkerId(1));
    let error = fleet.place(&of_choices(65)).expect_err("too many");
    assert!(!error.may_pass(), "{error}");
}

#[test]
fn a_worker_that_tells_no_limit_takes_any_number() {
    let mut fleet = telling(&[None]);
    assert!(fleet.place(&of_choices(1_000)).is_ok());
}

#[test]
fn a_load_beyond_all_measure_is_that_of_a_busy_worker() {
    let mut fleet = fleet(2);
    let keys = [0, 1].map(|id| {
        let key = fleet.join(WorkerId(id), info(&format!("engine-{id}")), NOW);
        key.expect("joined")
    });
    let sample = StepSample {
        number: 1,
        duration_s: f64::MAX,
        sequences: u32::MAX,
        kv_tokens: u64::MAX,
        prefill_tokens: u32::MAX,
        prefill_squares: f64::MAX,
    };
    let most = LoadReport {
        applied_legs: Some(0),
        waiting_requests: u32::MAX,
        running_requests: u32::MAX,
        waiting_prefill_tokens: u64::MAX,
        free_blocks: u32::MAX,
        running_sequences: u32::MAX,
        waiting_sequences: u32::MAX,
        awaited_sequences: u32::MAX,
        running_kv_tokens: u64::MAX,
        waiting_kv_tokens: Some(u64::MAX),
        is_draining: false,
        last_decode: Some(sample),
        last_prefill: Some(sample),
    };
    for &key in &keys {
        fleet.on_dispatched(key, &spec(LegKind::Colocated, 10));
    }
    fleet.on_report(keys[0], Some(&most), NOW);
    fleet.on_report(keys[1], Some(&idle()), NOW);
    for _ in 0..3 {
        let placed = fleet.place(&RequestView::new(10, 5)).expect("a placement");
        assert_eq!(placed.prefill.key, keys[1]);
        assert!(fleet.forecast(&RequestView::new(10, 5)).is_ok());
        fleet.on_dispatched(keys[1], &spec(LegKind::Colocated, 10));
    }
    assert!(view(&fleet, 0).requests() > 0 && !view(&fleet, 0).is_idle());
}
