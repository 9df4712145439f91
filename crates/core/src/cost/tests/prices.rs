//! What a request costs on a worker, by the worker's load.

use super::*;

#[test]
fn a_prompt_is_charged_for_the_decodes_that_it_stalls() {
    let price = price(&RequestView::new(4_000, 100));
    let busy = Load {
        sequences: 90.0,
        stalled_sequences: 60.0,
        ..IDLE
    };
    let own_s = |load| price.prefill_s(load, 0) - H200.prompt_step_s;
    assert!(near(own_s(&busy), 61.0 * own_s(&IDLE), 1e-9));
    assert!(near(own_s(&IDLE), H200.prompt_s(4_000.0, 0.0), 1e-9));
}

#[test]
fn costs_grow_with_every_kind_of_load() {
    let mut draw = Draw(8);
    for _ in 0..2_000 {
        let request = RequestView::new(
            1 + (8_000.0 * draw.next()) as u32,
            2 + (300.0 * draw.next()) as u32,
        );
        let price = price(&request);
        let mut load = || Load {
            backlog_tokens: 9_000.0 * draw.next(),
            sequences: 99.0 * draw.next(),
            stalled_sequences: 99.0 * draw.next(),
            kv_tokens: 1e5 * draw.next(),
            spare_tokens: 1e4 * draw.next(),
        };
        let (less, added) = (load(), load());
        let more = [
            Load {
                backlog_tokens: less.backlog_tokens + added.backlog_tokens,
                ..less
            },
            Load {
                sequences: less.sequences + added.sequences,
                ..less
            },
            Load {
                stalled_sequences: less.stalled_sequences + added.stalled_sequences,
                ..less
            },
            Load {
                kv_tokens: less.kv_tokens + added.kv_tokens,
                ..less
            },
            Load {
                spare_tokens: less.spare_tokens - added.spare_tokens,
                ..less
            },
        ];
        for more in more {
            assert!(price.prefill_s(&less, 0) <= price.prefill_s(&more, 0));
            for whole in [false, true] {
                assert!(price.decode_s(&less, whole) <= price.decode_s(&more, whole));
            }
        }
    }
}

#[test]
fn a_cached_prefix_is_neither_computed_nor_moved() {
    let mut request = RequestView::new(1_000, 10);
    request.warm = vec![crate::Warm {
        worker: WorkerId(3),
        tokens: 900,
    }];
    let price = price(&request);
    let cached = request.cached_tokens(WorkerId(3));
    let computed_s = H200.prompt_step_s + H200.prompt_s(1_000.0, 900.0);
    assert!(near(price.prefill_s(&IDLE, cached), computed_s, 1e-9));
    assert_eq!(request.cached_tokens(WorkerId(0)), 0);
    let model = CostModel::default();
    let moved_s = |held| model.handoff_s(&request, held, true);
    assert!(moved_s(900) < moved_s(0));
    // Of a prompt that is cached whole, the last token is computed.
    assert!(price.prefill_s(&IDLE, 1_000) > 0.0);
}

#[test]
fn missing_room_costs_time() {
    let price = price(&RequestView::new(160, 16));
    let full = Load {
        spare_tokens: 80.0,
        ..IDLE
    };
    assert!(price.decode_s(&full, false) > price.decode_s(&IDLE, false));
    assert_eq!(price.decode_s(&full, true), price.decode_s(&IDLE, true));
    assert!(price.prefill_s(&full, 0) > price.prefill_s(&IDLE, 0));
}

#[test]
fn a_stall_matters_less_the_shorter_steps_are_than_the_objective() {
    let request = RequestView::new(4_000, 100);
    let busy = Load {
        sequences: 60.0,
        stalled_sequences: 60.0,
        kv_tokens: 60_000.0,
        ..IDLE
    };
    let stall_s = |tpot_s| {
        let config = CostConfig {
            tpot_s,
            ..CostConfig::default()
        };
        let price = Price::new(config, H200, &request);
        price.prefill_s(&busy, 0) - price.prefill_s(&IDLE, 0)
    };
    let step_s = H200.decode_s(60.0, 60_000.0);
    let whole_s = stall_s(None);
    assert!(near(whole_s, 60.0 * H200.prompt_s(4_000.0, 0.0), 1e-9));
    assert!(near(stall_s(Some(2.0 * step_s)), whole_s / 4.0, 1e-9));
    assert!(near(stall_s(Some(step_s)), whole_s, 1e-9));
    assert!(
        near(stall_s(Some(step_s / 2.0)), whole_s, 1e-9),
        "beyond it, as without an objective"
    );
}

#[test]
fn roles_cost_a_share_of_an_idle_workers_time() {
    let price = price(&RequestView::new(1_000, 200));
    for role in [Role::Prefill, Role::Decode, Role::Mixed] {
        assert_eq!(price.prefill_preference_s(role) > 0.0, role == Role::Decode);
        assert_eq!(price.decode_preference_s(role) > 0.0, role == Role::Prefill);
    }
    let share = CostConfig::default().role_preference;
    let idle_s = price.prefill_s(&IDLE, 0);
    assert!(near(
        price.prefill_preference_s(Role::Decode),
        share * idle_s,
        1e-9
    ));
}
