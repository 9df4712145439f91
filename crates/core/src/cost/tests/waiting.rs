//! Requests that wait in the router.

use super::*;

#[test]
fn who_has_waited_for_room_counts_the_prompts_before_it_for_more() {
    let request = || RequestView::new(4_000, 100);
    let waited = price(&request().after(2 * PROMPTS_AHEAD));
    let busy = Load {
        backlog_tokens: 9_000.0,
        ..IDLE
    };
    let wait_s = |price: &Price| price.prefill_s(&busy, 0) - price.prefill_s(&IDLE, 0);
    let new = price(&request());
    assert!(near(wait_s(&waited), 3.0 * wait_s(&new), 1e-9));
    assert_eq!(waited.decode_s(&busy, true), new.decode_s(&busy, true));
    assert_eq!(waited.prefill_s(&IDLE, 0), new.prefill_s(&IDLE, 0));
    let soon = request().after(Duration::from_millis(9));
    assert_eq!(
        soon,
        request(),
        "one that comes and one that is placed are the same"
    );
}
