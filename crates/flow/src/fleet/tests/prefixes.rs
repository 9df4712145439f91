//! A conversation's next turn goes where its KV is, when that is cheaper.

use tasuki_core::{Capabilities, Chunks, ModelId};

use super::*;
use crate::Placed;
use crate::fleet::CacheEvents;

const LONG: u32 = 896;

/// Two mixed workers that can take anything, and report their cache or do not.
fn two(reports_cache: bool) -> (FleetState, [WorkerKey; 2]) {
    let mut fleet = fleet(2);
    let mut join = |id: u32| {
        let info = WorkerInfo {
            capabilities: Capabilities {
                reports_cache,
                ..Capabilities::default()
            },
            ..info(&format!("e{id}"))
        };
        fleet.join(WorkerId(id), info, NOW).expect("joined")
    };
    let keys = [join(0), join(1)];
    (fleet, keys)
}

fn chunks(first: u32) -> Chunks {
    let prompt: Vec<u32> = (first..first + LONG).collect();
    Chunks::new(&[info("").chunks], "", &prompt)
}

fn request(first: u32) -> RequestView {
    RequestView {
        chunks: chunks(first),
        ..RequestView::new(LONG, 2)
    }
}

/// Placed, dispatched, answered and ended; where.
fn serve(fleet: &mut FleetState, first: u32, cached: u32) -> WorkerKey {
    let Placed {
        prefill, decode, ..
    } = fleet.place(&request(first)).expect("placed");
    assert_eq!(prefill.key, decode.key, "it is too short to be split");
    let slot = dispatch(fleet, prefill.key, first);
    fleet.on_output(prefill.key, slot, 0, cached);
    fleet.on_ended(prefill.key, slot, None);
    fleet.recount(prefill.key);
    prefill.key
}

fn dispatch(fleet: &mut FleetState, key: WorkerKey, first: u32) -> LegSlot {
    let leg = LegSpec {
        chunks: chunks(first),
        ..spec(LegKind::Colocated, LONG)
    };
    fleet.on_dispatched(key, &leg).expect("it is there")
}

#[test]
fn the_next_turn_goes_where_its_kv_is() {
    let (mut fleet, _) = two(false);
    for first in [0, 10_000, 20_000, 30_000] {
        let there = serve(&mut fleet, first, 0);
        for _ in 0..5 {
            assert_eq!(serve(&mut fleet, first, LONG), there);
        }
    }
}

#[test]
fn it_goes_elsewhere_where_its_worker_has_much_to_do() {
    let (mut fleet, _) = two(false);
    let there = serve(&mut fleet, 0, 0);
    for other in 1..10 {
        dispatch(&mut fleet, there, 10_000 * other);
    }
    assert_ne!(serve(&mut fleet, 0, 0), there);
}

#[test]
fn what_is_cached_is_no_backlog() {
    let (mut fleet, keys) = two(false);
    let backlog = |fleet: &FleetState| view(fleet, 0).prefill_backlog_tokens();
    let first = dispatch(&mut fleet, keys[0], 0);
    assert_eq!(backlog(&fleet), u64::from(LONG));
    fleet.on_output(keys[0], first, 0, 0);
    fleet.recount(keys[0]);
    dispatch(&mut fleet, keys[0], 0);
    assert_eq!(backlog(&fleet), 1);
}

#[test]
fn a_worker_that_was_restarted_holds_nothing() {
    let (mut fleet, keys) = two(false);
    dispatch(&mut fleet, keys[0], 0);
    fleet.leave(keys[0]);
    let again = fleet.join(WorkerId(0), info("again"), NOW).expect("joined");
    dispatch(&mut fleet, again, 0);
    assert_eq!(view(&fleet, 0).prefill_backlog_tokens(), u64::from(LONG));
}

#[test]
fn what_another_router_placed_is_known_by_events() {
    let (mut fleet, keys) = two(true);
    for first in [0, 10_000, 20_000, 30_000] {
        let there = keys[(first / 10_000) as usize % 2];
        let number = 1 + u64::from(first / 20_000);
        let scheme = fleet.chunk_schemes(ModelId::default())[0];
        let events = CacheEvents {
            number,
            reset: number == 1,
            stored: chunks(first).by(&scheme).to_vec(),
            ..CacheEvents::default()
        };
        assert!(fleet.on_cache_events(there, &events));
        for _ in 0..5 {
            assert_eq!(serve(&mut fleet, first, LONG), there);
        }
    }
}

#[test]
fn what_an_earlier_request_is_about_to_store_is_computed_once() {
    let (mut fleet, keys) = two(true);
    let backlog = |fleet: &FleetState| view(fleet, 0).prefill_backlog_tokens();
    let first = dispatch(&mut fleet, keys[0], 0);
    dispatch(&mut fleet, keys[0], 0);
    assert_eq!(backlog(&fleet), u64::from(LONG) + 1);
    fleet.on_ended(keys[0], first, None);
    assert_eq!(fleet.chunks_held(WorkerId(0)), LONG as usize / 128);
}

#[test]
fn events_of_an_old_connection_say_nothing() {
    let (mut fleet, keys) = two(true);
    fleet.leave(keys[0]);
    let stale = CacheEvents {
        number: 7,
        ..CacheEvents::default()
    };
    assert!(
        fleet.on_cache_events(keys[0], &stale),
        "nobody is to be asked"
    );
    assert_eq!(fleet.chunks_held(WorkerId(0)), 0);
}

#[test]
fn a_handoff_goes_to_the_decode_worker_that_holds_the_prompt() {
    let (mut fleet, keys) = two(true);
    let third = fleet.add();
    let third = fleet.join(third, info("e2"), NOW).expect("joined");
    for (holder, first) in [(keys[1], 0), (third, 10_000)] {
        let scheme = fleet.chunk_schemes(ModelId::default())[0];
        let events = CacheEvents {
            number: 1,
            reset: true,
            stored: chunks(first).by(&scheme).to_vec(),
            ..CacheEvents::default()
        };
        assert!(fleet.on_cache_events(holder, &events));
        for _ in 0..5 {
            let decode = fleet.place_decode(&request(first), keys[0], &[]);
            assert_eq!(decode.map(|decode| decode.key), Some(holder));
        }
    }
}
