//! Free blocks that sequences of other routers wait for.

use super::*;

/// A worker of 100 blocks of 16 tokens.
fn joined(fleet: &mut FleetState, worker: u32) -> WorkerKey {
    let key = fleet.join(WorkerId(worker), info(&format!("e{worker}")), NOW);
    key.expect("joined")
}

fn report(fleet: &mut FleetState, key: WorkerKey, load: LoadReport) {
    fleet.on_report(key, Some(&load), NOW);
    fleet.recount(key);
}

/// Six sequences wait with so much KV.
fn waits(tokens: Option<u64>) -> LoadReport {
    LoadReport {
        waiting_requests: 6,
        waiting_sequences: 6,
        waiting_kv_tokens: tokens,
        ..idle()
    }
}

/// Eight sequences decode, in half of the blocks: the steps are longer than where six wait.
fn decodes() -> LoadReport {
    LoadReport {
        running_requests: 8,
        running_sequences: 8,
        running_kv_tokens: 800,
        free_blocks: 50,
        waiting_kv_tokens: Some(0),
        ..LoadReport::default()
    }
}

#[test]
fn a_router_that_placed_nothing_avoids_a_worker_whose_free_blocks_others_wait_for() {
    let chosen = |tokens| {
        let mut fleet = fleet(2);
        let keys = [0, 1].map(|worker| joined(&mut fleet, worker));
        report(&mut fleet, keys[0], waits(tokens));
        report(&mut fleet, keys[1], decodes());
        let request = RequestView::new(200, 100);
        let missing = fleet.forecast(&request).expect("a worker").missing_tokens;
        assert_eq!(missing, 0.0, "{tokens:?}");
        let placed = fleet.place(&request).expect("a worker");
        [placed.prefill, placed.decode].map(|half| half.key.worker.0)
    };
    assert_eq!(chosen(Some(1_600)), [1, 1], "all of its blocks");
    assert_eq!(chosen(Some(600)), [0, 0], "there is room beside them");
    assert_eq!(chosen(None), [0, 0], "not known");
}

#[test]
fn a_request_waits_where_others_wait_for_all_free_blocks() {
    let mut fleet = fleet(1);
    let key = joined(&mut fleet, 0);
    let mut missing = |load| {
        report(&mut fleet, key, load);
        let forecast = fleet.forecast(&RequestView::new(200, 100));
        forecast.expect("a worker").missing_tokens
    };
    assert_eq!(
        missing(waits(Some(1_600))),
        264.0,
        "prompt and first growth"
    );
    assert_eq!(missing(waits(None)), 0.0);
    // They hold half of theirs already: nothing decodes, and half is not free.
    let half = LoadReport {
        free_blocks: 50,
        ..waits(Some(800))
    };
    assert_eq!(missing(half), 0.0);
}

#[test]
fn blocks_that_our_own_legs_wait_for_are_counted_once() {
    let mut fleet = fleet(1);
    let key = joined(&mut fleet, 0);
    let leg = fleet.on_dispatched(key, &leg_spec(LegKind::Decode, 320, 16));
    let leg = leg.expect("the worker is there");
    let mut spare = |applied, tokens| {
        let load = LoadReport {
            applied_legs: Some(applied),
            ..waits(tokens)
        };
        report(&mut fleet, key, load);
        view(&fleet, 0).spare_blocks()
    };
    // 20 blocks of prompt and 1 of growth: by us, by the worker, and with 30 of others.
    assert_eq!(spare(0, Some(0)), 79);
    assert_eq!(spare(0, Some(480)), 49);
    assert_eq!(spare(1, Some(320)), 79);
    assert_eq!(spare(1, Some(800)), 49);
    assert_eq!(spare(1, None), 79);
    // It has output, and waits again: the worker took its blocks.
    fleet.on_output(key, leg, 0, 0);
    report(&mut fleet, key, waits(Some(320)));
    assert_eq!(view(&fleet, 0).spare_blocks(), 80);
}
