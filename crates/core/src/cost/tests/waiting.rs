//! Requests that wait in the router.

use super::*;

#[test]
fn who_has_waited_for_room_counts_the_prompts_before_it_for_more() {
    let request = RequestView::new(4_000, 100);
    let new = price(&request);
    let waited = price(&RequestView {
        waited: true,
        ..request
    });
    let busy = Load {
        backlog_tokens: 9_000.0,
        ..IDLE
    };
    let wait_s = |price: &Price| price.prefill_s(&busy, 0) - price.prefill_s(&IDLE, 0);
    assert!(near(wait_s(&waited), WAITED_WEIGHT * wait_s(&new), 1e-9));
    assert_eq!(waited.decode_s(&busy, true), new.decode_s(&busy, true));
    assert_eq!(waited.prefill_s(&IDLE, 0), new.prefill_s(&IDLE, 0));
}
